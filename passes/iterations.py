"""Spares a long loop over experts most of its normalisation: three of its rounds are run, the others are copied.

    masks[0] ... masks[1] ... masks[2] ...      run, as `normalize` would
    masks[3] ... masks[127] ...                 copies of round 1, with their own weights and numbers

A round begins where the next expert's number is taken, and all rounds are as long. Round e is a copy of round 1 if each
of its nodes does the same with the same values, but for its own weights, which have round 1's sizes; for what the round
before it left; and for numbers that grow by the same step in every round, as between rounds 1 and 2. What is copied
keeps the sizes of round 1, whose number of rows is another: which rows a value has is told by its label, not its size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moe_compile.passes.candidates import name_of, value_of

_FEWEST = 6
_RUN = 3
Steps = dict[tuple[Any, ...], int]


@dataclass(frozen=True)
class Rounds:
    """A loop over experts in a part of a graph.

    Attributes:
        nodes: each round's nodes.
        outer: for each round from the third on, round 1's weights and such -> its own.
        numbers: what stands in round 1 and in round 2 in places where numbers grow.
    """

    nodes: tuple[tuple[Node, ...], ...]
    outer: tuple[dict[Node, Node], ...]
    numbers: frozenset[tuple[int, int]]

    @property
    def copied(self) -> tuple[tuple[Node, ...], ...]:
        """The rounds that need not run."""
        return self.nodes[_RUN:]

    def stand_ins(self) -> dict[Node, Node]:
        """What reads the last round reads the last one that runs instead."""
        return dict(zip(self.nodes[-1], self.nodes[_RUN - 1], strict=True))


def find_rounds(nodes: Sequence[Node]) -> Rounds | None:
    """The loop in some nodes, None if there is none that is long and regular enough."""
    for heads in _heads(nodes):
        place = {node: index for index, node in enumerate(nodes)}
        starts = [place[head] for head in heads]
        length = starts[1] - starts[0]
        if any(later - earlier != length for earlier, later in pairwise(starts)):
            continue
        if starts[-1] + length > len(nodes):
            continue
        rounds = tuple(tuple(nodes[start : start + length]) for start in starts)
        found = _compared(rounds)
        if found is not None and _left_alone(nodes, rounds):
            return found
    return None


def _heads(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Nodes that take number 0, 1, 2, ... of the same value."""
    counted: dict[tuple[Any, ...], list[Node]] = {}
    for node in nodes:
        source, *rest = node.args or (None,)
        number = rest[-1] if rest and not node.kwargs else None
        if isinstance(source, Node) and type(number) is int and name_of(node) in ("getitem", "eq", "select"):
            heads = counted.setdefault((node.target, source, *rest[:-1]), [])
            if number == len(heads):
                heads.append(node)
    yield from (heads for heads in counted.values() if len(heads) >= _FEWEST)


def _left_alone(nodes: Sequence[Node], rounds: tuple[tuple[Node, ...], ...]) -> bool:
    """Whether, of the rounds that are to be copied, only the last is read by what is no round."""
    owner = {node: number for number, nodes in enumerate(rounds) for node in nodes}
    last = len(rounds) - 1
    for node in nodes:
        for operand in node.all_input_nodes:
            read = owner.get(operand)
            if read is not None and node not in owner and read != last:
                return False
    return True


def _compared(rounds: tuple[tuple[Node, ...], ...]) -> Rounds | None:
    steps: Steps = {}
    outer: list[dict[Node, Node]] = []
    for number in range(1, len(rounds)):
        comparison = _Comparison(rounds, number, steps)
        if not all(map(comparison.alike, range(len(rounds[0])))):
            return None
        if number >= 2:
            outer.append(comparison.outer)
    return Rounds(rounds, tuple(outer[_RUN - 2 :]), frozenset(steps_between(steps)))


def steps_between(steps: Steps) -> Iterator[tuple[int, int]]:
    """The numbers of rounds 1 and 2 in each place where they differ."""
    for (*_, first), step in steps.items():
        if step:
            yield first, first + step


class _Comparison:
    """Walks through round 1 and another side by side."""

    def __init__(self, rounds: tuple[tuple[Node, ...], ...], number: int, steps: Steps) -> None:
        self.first, self.other, self.number, self.steps = rounds[1], rounds[number], number, steps
        self.inside = {node: index for index, node in enumerate(rounds[1])}
        self.before = {node: index for index, node in enumerate(rounds[0])}
        self.previous = rounds[number - 1]
        self.outer: dict[Node, Node] = {}

    def alike(self, index: int) -> bool:
        """Whether the nodes at a place do the same."""
        a, b = self.first[index], self.other[index]
        same = a.op == b.op and a.target == b.target and a.kwargs.keys() == b.kwargs.keys()
        if not same or len(a.args) != len(b.args):
            return False
        arguments = [
            *enumerate(zip(a.args, b.args, strict=True)),
            *((k, (v, b.kwargs[k])) for k, v in a.kwargs.items()),
        ]
        return all(self._equal((index, place), x, y) for place, (x, y) in arguments)

    def _equal(self, place: tuple[Any, ...], a: Any, b: Any) -> bool:
        if isinstance(a, Node):
            return isinstance(b, Node) and self._same_value(a, b)
        if isinstance(a, tuple | list):
            pairs = zip(a, b, strict=True) if type(a) is type(b) and len(a) == len(b) else None
            return pairs is not None and all(self._equal((*place, i), x, y) for i, (x, y) in enumerate(pairs))
        if isinstance(a, slice):
            parts = ((a.start, b.start), (a.stop, b.stop), (a.step, b.step)) if isinstance(b, slice) else None
            return parts is not None and all(self._equal((*place, i), x, y) for i, (x, y) in enumerate(parts))
        if type(a) is int and type(b) is int:
            return self._grows((*place, a), b - a)
        # The message of an assertion names symbols that are new in every round.
        return type(a) is type(b) and (a == b or (isinstance(a, str) and place[1] == 1))

    def _grows(self, place: tuple[Any, ...], by: int) -> bool:
        if self.number == 1:
            return by == 0
        if self.number == 2:
            self.steps[place] = by
        return by == self.steps[place] * (self.number - 1)

    def _same_value(self, a: Node, b: Node) -> bool:
        if a in self.inside:
            return self.other[self.inside[a]] is b
        if a in self.before:
            return self.previous[self.before[a]] is b
        if a is not b and (_metadata(a) is None or _metadata(a) != _metadata(b)):
            return False
        return self.outer.setdefault(a, b) is b


def _metadata(node: Node) -> Any:
    value = value_of(node)
    if not isinstance(value, Tensor):
        return None
    return value.shape, value.stride(), value.dtype, value.device, type(value)


def copy_rounds(
    rounds: Rounds, graph: Graph, normal: dict[Node, Node], finals: dict[Node, Node], origins: dict[Node, Node]
) -> bool:
    """Adds the rounds that did not run to a normal form, in place.

    Args:
        rounds: the loop.
        graph: the normal form of everything else.
        normal: inputs of the part, and what lies in front of the loop -> their values in `graph`.
        finals: as in `NormalForm`; gets entries for the new rounds.
        origins: likewise.

    Returns:
        False if the rounds that ran do not tell what the others are; nothing was changed then.
    """
    ran = [_operators(graph, set(nodes), origins) for nodes in rounds.nodes[:_RUN]]
    if not ran[1] or any(len(operators) != len(ran[1]) for operators in ran):
        return False
    numbers = _numbers(ran, rounds)
    if numbers is None:
        return False
    meant: dict[Node, Node] = {}
    for source, own in rounds.outer[0].items():
        given = normal.get(source)
        if given is None or (meant.setdefault(given, source) is not source and own is not source):
            return False
    inside = {node: index for index, node in enumerate(ran[1])}
    before = {node: index for index, node in enumerate(ran[0])}
    copies = list(ran)
    if any(normal.get(own) is None for outer in rounds.outer for own in outer.values()):
        return False
    at = ran[-1][-1]
    index_of = {source: index for index, source in enumerate(rounds.nodes[1])}
    for number, (sources, outer) in enumerate(zip(rounds.copied, rounds.outer, strict=True), start=_RUN):
        new: list[Node] = []

        def value(node: Node, outer: dict[Node, Node] = outer, new: list[Node] = new) -> Node:
            if node in inside:
                return new[inside[node]]
            if node in before:
                return copies[-1][before[node]]
            return normal[outer[meant[node]]] if node in meant else node

        for index, template in enumerate(ran[1]):
            with graph.inserting_after(at):
                at = graph.node_copy(template, value)
            for place, (one, step) in numbers.get(index, {}).items():
                at.update_arg(place, one + (number - 1) * step)
            at.meta = template.meta
            origins[at] = sources[index_of[origins[template]]]
            new.append(at)
        copies.append(new)
    _finish(rounds, copies, graph, finals)
    return True


def _operators(graph: Graph, nodes: set[Node], origins: dict[Node, Node]) -> list[Node]:
    return [node for node in graph.nodes if origins.get(node) in nodes]


def _numbers(ran: list[list[Node]], rounds: Rounds) -> dict[int, dict[int, tuple[int, int]]] | None:
    """Operator of round 1 -> argument -> its number there and the step to round 2; None if the two differ otherwise."""
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for index, (a, b) in enumerate(zip(ran[1], ran[2], strict=True)):
        if a.target != b.target or len(a.args) != len(b.args) or a.kwargs.keys() != b.kwargs.keys():
            return None
        for place, (x, y) in enumerate(zip(a.args, b.args, strict=True)):
            if isinstance(x, int) and isinstance(y, int) and x != y:
                if (x, y) not in rounds.numbers:
                    return None
                found.setdefault(index, {})[place] = (x, y - x)
            elif not isinstance(x, Node | str) and _without_nodes(x) != _without_nodes(y):
                return None
    return found


def _without_nodes(argument: Any) -> Any:
    return map_arg(argument, lambda node: None)


def _finish(rounds: Rounds, copies: list[list[Node]], graph: Graph, finals: dict[Node, Node]) -> None:
    """Lets everything behind the loop read its last round, and says what the copied rounds are worth."""
    last_run = dict(zip(copies[_RUN - 1], copies[-1], strict=True))
    loop = {node for operators in copies for node in operators}
    for old, new in last_run.items():
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in loop)
    of_template = {node: index for index, node in enumerate(copies[1])}
    own: list[int | None] = []
    for source in rounds.nodes[1]:
        final = finals.get(source)
        own.append(of_template.get(final) if final is not None else None)
    by_round = {node: place for nodes in rounds.nodes[:_RUN] for place, node in enumerate(nodes)}
    for source, final in [*finals.items()]:
        # A buffer that every round writes to is worth what the last one left.
        is_own = source in by_round and own[by_round[source]] is not None
        if final in last_run and not is_own:
            finals[source] = last_run[final]
    for sources, operators in zip(rounds.copied, copies[_RUN:], strict=True):
        for place, source in enumerate(sources):
            index = own[place]
            template = finals.get(rounds.nodes[1][place])
            if index is not None:
                finals[source] = operators[index]
            elif template is not None:
                finals[source] = template
