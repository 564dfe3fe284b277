"""Proves that all experts of a loop compute the same, and collects what differs: their weights and biases.

    silu(mm(rows_0, w_0))        silu(mm(rows_3, w_3))        alike; (mm, 1) -> w_0, ..., w_3
    silu(mm(rows_0, w_0))        gelu(mm(rows_3, w_3))        "expert 3 does gelu where expert 0 does silu"

Two experts' operators are walked through side by side, from what they add to the output back to the rows they picked.
"""

from typing import Any

import torch
from torch.fx import Node

from moe_compile.passes.block import Block, arguments, aten
from moe_compile.passes.facts import Label, is_tensor
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.rowwise import labels_of, shape_equal

_INDICES = ("token", "slot", "pair")


def experts_alike(block: Block, parts: tuple[tuple[int, Node], ...]) -> dict[tuple[Node, int], list[Node]]:
    """Proves that all experts compute the same, and collects what differs.

    Args:
        block: the derivation.
        parts: (expert, its rows), in the order in which the experts run.

    Returns:
        (operator of expert 0, index of an argument) -> the outside values of experts 0, 1, ... at that place.

    Raises:
        NotProvenError: if experts are missing, or two of them differ in more than outside values of one shape.
    """
    by_number = dict(parts)
    experts = len(parts)
    missing = sorted(set(range(experts)) - set(by_number))
    if missing:
        # Ids from the last expert on are sentinels here as there, so experts may be missing at the end alone.
        raise NotProvenError(f"expert {missing[0]} of {max(by_number) + 1} never runs", parts[-1][1])
    differing: dict[tuple[Node, int], list[Node]] = {}
    for expert in range(1, experts):
        _Comparison(block, expert, differing).compare(by_number[0], by_number[expert])
    return {place: [*values, *[values[0]] * (experts - len(values))] for place, values in differing.items()}


class _Comparison:
    """Walks through expert 0 and another one side by side."""

    def __init__(self, block: Block, expert: int, differing: dict[tuple[Node, int], list[Node]]) -> None:
        self.block, self.expert, self.differing = block, expert, differing
        self.pairs: dict[Node, Node] = {}

    def compare(self, first: Node, other: Node) -> None:
        """Compares two operators of the block, and all that they are made of."""
        if first is other or self.pairs.get(other) is first:
            return
        self.pairs[other] = first
        fact, twin = self.block.fact(first), self.block.fact(other)
        assert fact is not None
        if twin is None or fact.kind != twin.kind or self._moved(fact.labels) != twin.labels:
            raise self._differs(first, other)
        if fact.kind in _INDICES:
            return
        if fact.kind in ("mask", "gates", "slots"):
            same = fact.base is twin.base or (fact.base is not None and self._equal(fact.base, twin.base))
            numbered = (fact.expert, twin.expert) in ((0, self.expert), (None, None))
            if not same or not numbered or _metadata(first) != _metadata(other):
                raise self._differs(first, other)
            return
        if first in self.block.cuts and other in self.block.cuts:
            return self.compare(self.block.cuts[first], self.block.cuts[other])
        same_names = len(first.args) == len(other.args) and first.kwargs.keys() == other.kwargs.keys()
        if first.target != other.target or not same_names:
            raise self._differs(first, other)
        for index, (a, b) in enumerate(zip(arguments(first), arguments(other), strict=True)):
            self._argument((first, index), a, b, other)
        for key, value in first.kwargs.items():
            if not self._equal(value, other.kwargs[key]):
                raise self._differs(first, other)

    def _moved(self, labels: tuple[Label, ...]) -> tuple[Label, ...]:
        return tuple(
            f"{label[0]}{self.expert}{label[2:]}" if label is not None and label[:2] in ("R0", "S0") else label
            for label in labels
        )

    def _argument(self, place: tuple[Node, int], a: Any, b: Any, other: Node) -> None:
        if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
            for x, y in zip(a, b, strict=True):
                if isinstance(x, Node) and x in self.block.facts and isinstance(y, Node):
                    self.compare(x, y)
                elif not self._equal(x, y):
                    raise self._differs(place[0], other)
        elif isinstance(a, Node) and isinstance(b, Node):
            self._value(place, a, b, other)
        elif not self._equal(a, b):
            raise self._differs(place[0], other)

    def _value(self, place: tuple[Node, int], a: Node, b: Node, other: Node) -> None:
        if a in self.block.facts:
            self.compare(a, b)
        elif a in self.block.outputs and b in self.block.outputs and a.target == b.target:
            for index, (x, y) in enumerate(zip(a.args, b.args, strict=True)):
                self._argument((a, index), x, y, b)
        elif not self._equal(a, b):
            if not is_tensor(a) or not is_tensor(b):
                raise self._differs(place[0], other)
            if not shape_equal(a, b) or _metadata(a) != _metadata(b):
                shapes = f"{_describe(b)}, where expert 0 has {_describe(a)}"
                raise NotProvenError(f"expert {self.expert} has a parameter in {_spell(other)} of {shapes}", other)
            found = self.differing.setdefault(place, [a])
            found += [a] * (self.expert - len(found))
            found.append(b)

    def _equal(self, a: Any, b: Any) -> bool:
        """Whether two outside values are one and the same, however often they were written down."""
        if isinstance(a, list | tuple) and isinstance(b, list | tuple):
            return len(a) == len(b) and all(map(self._equal, a, b))
        if not isinstance(a, Node) or not isinstance(b, Node):
            return type(a) is type(b) and bool(a == b)
        if a is b or self.pairs.get(b) is a:
            return True
        if a.op != "call_function" or a.target != b.target or a.kwargs.keys() != b.kwargs.keys():
            return False
        if not is_tensor(a) and isinstance(a.meta.get("val"), torch.SymInt):
            return self._equal_sizes(a, b)
        is_random = torch.Tag.nondeterministic_seeded in getattr(a.target, "tags", ())
        same_arguments = len(a.args) == len(b.args) and all(map(self._equal, a.args, b.args))
        return not is_random and same_arguments and all(self._equal(v, b.kwargs[k]) for k, v in a.kwargs.items())

    def _equal_sizes(self, a: Node, b: Node) -> bool:
        """Sizes are equal, or each its own expert's number of rows."""
        labels_a, labels_b = self._size_label(a), self._size_label(b)
        if labels_a is not None or labels_b is not None:
            return labels_a is not None and labels_b is not None and self._moved((labels_a,)) == (labels_b,)
        return len(a.args) == len(b.args) and all(map(self._equal, a.args, b.args))

    def _size_label(self, size: Node) -> Label:
        if size.target is not aten.sym_size.int:
            return None
        source, axis = arguments(size)
        return labels_of(self.block, source)[axis] if source in self.block.facts else None

    def _differs(self, first: Node, other: Node) -> NotProvenError:
        return NotProvenError(f"expert {self.expert} does {_spell(other)} where expert 0 does {_spell(first)}", other)


def _metadata(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.dtype, value.device


def _describe(node: Node) -> str:
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _spell(node: Node) -> str:
    target = node.target
    name = target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else str(target)
    constants = [repr(a) for a in arguments(node) if isinstance(a, int | float)]
    return f"{name}(..., {', '.join(constants)})" if constants else name
