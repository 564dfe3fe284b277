"""The proof of one candidate: facts about its normal form, derived operator by operator.

    sort = aten.sort(view)            {ids, (N,)}  ->  getitem 0: ids (S,)    getitem 1: pair (S,)
    floor_divide(getitem_1, 2)        K is 2       ->  token (S,)
    index(hidden, [floor_divide])     T rows       ->  rows (S, None)

Each form contributes rules for the operators that it is spelled with; a rule sees one operator and the facts about its
operands, and answers with a fact, with None if the operator is not its business, or by raising `NotProvenError`. An
operator that reads something of the block and has no rule gets no fact: it stays where it is, and what it computes
counts as coming from outside. Whether the block can do without it shows at the end, when the output is put together.
"""

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from moe_compile.passes.facts import Fact, Label, Size, expression, is_tensor, is_tokens, same_size, shape_of, wide
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.normalize import NormalForm

aten = torch.ops.aten
# Buffers that take no more than shape and dtype from what they are made like.
FRESH = (
    aten.zeros_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.ones_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_ones.default,
)
# Kinds that are numbers of the router's, as good as values from outside where no rule knows better.
OPEN = ("ids", "gates", "onehot", None)
# What changes neither numbers nor their order, as long as there are as many.
UNMOVED = (
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.slice.Tensor,
    aten._to_copy.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
)
Rule = Callable[["Block", Node], Fact | tuple[Fact | None, ...] | None]


@dataclass(frozen=True)
class Projection:
    """A product of rows with the weight of the expert that each row belongs to.

    Attributes:
        rows: the left side.
        weight: the stacked weight; for a loop, one expert's, with `expert_axis` False.
        transposed: (in, out) instead of (out, in).
        bias: stacked bias, or one expert's; None without.
        expert_axis: `weight` and `bias` have a leading axis of experts.
        column: -1 if the result has a trailing axis of size one, 1 if it has one in the middle, 0 without.
    """

    rows: Node
    weight: Node
    transposed: bool
    bias: Node | None = None
    expert_axis: bool = True
    column: int = 0


@dataclass
class Block:
    """What has been derived about one candidate.

    A value is one of three: known by a fact, unproven, or from outside, which is to say that it depends on nothing of
    the block but the expert ids themselves, as routing weights may.

    Attributes:
        form: the normal form under study.
        root: the placeholder of the expert ids.
        num_tokens: T.
        top_k: K.
        distinct: a token's ids are known to differ from each other.
        below: the ids are known to be smaller than this; None if nothing is known.
        dense: every expert may run on every token.
        facts: operator -> fact; operators without one come from outside.
        outputs: operators with several results -> a fact for each.
        projections: operator -> the product that it is.
        unproven: operators that read the block and got no fact, and all that depends on them.
        leaves: operators that pick rows of an outside value.
        tokens: values from outside that every expert reads whole.
        passed: operators that equal one of their operands on every row of a real expert, or in another order of rows.
        weighted: outputs that weigh and sum in one product -> the routing weight.
        fills: values put together of each expert's rows -> (expert, its rows) of those that have written so far.
        cuts: values that are one expert's part of all sorted rows -> those.
        lengths: label of an expert's part of the sorted rows -> the size that such a part was first seen with.
        kept: the matrix of marks that says which pairs remain, None if all do.
        counted: unbacked symbol -> the sum of ends of experts that it is; see `recognize_split`.
        num_experts: E, each with the operator that says so.
        needs_masking: operators that are right only if the rows of sentinels end up as zeros, each with what it does.
        failures: proofs that did not go through, in order.
    """

    form: NormalForm
    root: Node
    num_tokens: Size
    top_k: int
    distinct: bool
    below: Size | None
    dense: bool = False
    facts: dict[Node, Fact] = field(default_factory=dict)
    outputs: dict[Node, tuple[Fact | None, ...]] = field(default_factory=dict)
    projections: dict[Node, Projection] = field(default_factory=dict)
    unproven: set[Node] = field(default_factory=set)
    leaves: set[Node] = field(default_factory=set)
    tokens: set[Node] = field(default_factory=set)
    passed: dict[Node, Node] = field(default_factory=dict)
    weighted: dict[Node, Node] = field(default_factory=dict)
    fills: dict[Node, tuple[tuple[int, Node], ...]] = field(default_factory=dict)
    cuts: dict[Node, Node] = field(default_factory=dict)
    kept: Node | None = None
    lengths: dict[Label, Size] = field(default_factory=dict)
    counted: dict[Any, dict[int, int]] = field(default_factory=dict)
    num_experts: list[tuple[int, Node]] = field(default_factory=list)
    needs_masking: list[tuple[Node, str]] = field(default_factory=list)
    failures: list[NotProvenError] = field(default_factory=list)

    @property
    def pairs(self) -> Size:
        """N = T * K."""
        return self.num_tokens * self.top_k

    def derive(self, rules: dict[Any, list[Rule]], elementwise: Rule) -> None:
        """Runs the rules over the normal form, in order."""
        for node in self.form.graph.nodes:
            if node.op != "call_function" or node.target in FRESH or not self._touches(node):
                continue
            try:
                self._require_proven_operands(node)
                self._derive(node, rules, elementwise)
            except NotProvenError as failure:
                failure.node = failure.node or node
                self.failures.append(failure)
            if node not in self.facts and node not in self.outputs and not self._reads_ids_alone(node):
                self.unproven.add(node)

    def _touches(self, node: Node) -> bool:
        return any(o in self.facts or o in self.outputs or o in self.unproven for o in node.all_input_nodes)

    def _reads_ids_alone(self, node: Node) -> bool:
        """Whether an operator without a fact depends on nothing but ids and what is outside, or is a mere size."""
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | int | bool):
            return True
        return all(o not in self.unproven and self.kind(o) in OPEN for o in node.all_input_nodes)

    def _require_proven_operands(self, node: Node) -> None:
        unproven = [operand for operand in node.all_input_nodes if operand in self.unproven]
        if unproven and len(unproven) < len(node.all_input_nodes):
            raise NotProvenError(f"{node.name} uses {unproven[0].name}, which was not proven to keep rows apart", node)

    def fact(self, node: Any) -> Fact | None:
        """The fact about an argument, None for values from outside and anything that is no node."""
        return self.facts.get(node) if isinstance(node, Node) else None

    def kind(self, node: Any) -> str | None:
        """The kind of an argument's fact."""
        fact = self.fact(node)
        return None if fact is None else fact.kind

    def is_outside(self, node: Any) -> bool:
        """Whether an argument is a tensor about which no fact is known."""
        return is_tensor(node) and node not in self.facts and node not in self.unproven

    def is_open(self, node: Any) -> bool:
        """Whether an argument is a number, or a value that the router made or that comes from outside."""
        return not is_tensor(node) or (node not in self.unproven and self.kind(node) in OPEN)

    def keep(self, marks: Node) -> bool:
        """Notes that only the pairs in a matrix of marks remain; False if another one was noted."""
        self.kept = self.kept or marks
        return self.kept is marks or (self.kept.target, self.kept.args) == (marks.target, marks.args)

    def kept_rows(self, column: Node) -> Label:
        """The label of the rows that a column of marks keeps, None if it is no such column."""
        fact = self.facts[column]
        if fact.kind != "gates" or fact.expert is None or fact.base is None or fact.off != 0:
            return None
        is_matrix = self.kind(fact.base) == "gates" and self.facts[fact.base].off == 0
        return f"R{fact.expert}@" if is_matrix and self.keep(fact.base) else None

    def turns(self, node: Node, labels: list[Label], before: list[Size]) -> list[Label] | None:
        """The labels of a value that is repeated along a new axis, once for each expert; None for any other."""
        if not self.dense or not self.num_experts or "E" in labels or "ET" in labels:
            return None
        experts = self.num_experts[0][0]
        grown = [axis for axis, size in enumerate(shape_of(node)) if not same_size(size, before[axis])]
        if len(grown) != 1 or labels[grown[0]] is not None or not same_size(shape_of(node)[grown[0]], experts):
            return None
        return ["E" if axis == grown[0] else label for axis, label in enumerate(labels)]

    def is_token(self, node: Any) -> bool:
        """Whether an argument picks tokens; with one slot per token, pairs are tokens."""
        fact = self.fact(node)
        if fact is None or fact.kind not in ("token", "pair", "mask", "gates"):
            return False
        if fact.kind in ("mask", "gates"):
            return bool(node.meta["val"].dtype is torch.bool) and (
                is_tokens(wide(fact.labels)) or (self.top_k == 1 and fact.labels == ("N",))
            )
        return fact.kind == "token" or self.top_k == 1

    def runs_along_tokens(self, node: Node) -> bool:
        """Whether all axes of a value but the last run along all tokens."""
        *tokens, _ = shape_of(node)
        return bool(tokens) and same_size(math.prod(tokens), self.num_tokens)

    def is_leading(self, node: Node, size: Size, axis: int = 0) -> bool:
        """Whether an axis of a value has a size."""
        shape = shape_of(node)
        return len(shape) > axis and same_size(shape[axis], size)

    def expect_experts(self, number: Size, node: Node) -> None:
        """Notes that an operator makes sense for this number of experts alone.

        Raises:
            NotProvenError: if the number is symbolic, or another operator said otherwise.
        """
        value = expression(number)
        if not value.is_Integer:
            raise NotProvenError(f"the number of experts in {node.name} is not a constant", node)
        if self.num_experts and self.num_experts[0][0] != int(value):
            first, where = self.num_experts[0]
            raise NotProvenError(f"{node.name} counts {value} experts and {where.name} {first}", node)
        self.num_experts.append((int(value), node))

    def _derive(self, node: Node, rules: dict[Any, list[Rule]], elementwise: Rule) -> None:
        if node.target is operator.getitem and node.args[0] in self.outputs:
            found: Any = self.outputs[node.args[0]][int(node.args[1])]  # type: ignore[arg-type, index]
            if found is not None and node.args[0] in self.cuts:
                self.passed[node] = self.cuts[node] = self.cuts[node.args[0]]  # type: ignore[index]
        else:
            found = None
            for rule in rules.get(node.target, ()):
                found = rule(self, node)
                if found is not None:
                    break
            if found is None and is_tensor(node):
                found = elementwise(self, node)
        if isinstance(found, tuple):
            self.outputs[node] = found
        elif found is not None:
            self.facts[node] = found


def arguments(node: Node) -> Any:
    """An operator's positional arguments; what each may be is the operator's business, so they are untyped."""
    return node.args


def rule(table: dict[Any, list[Rule]], *targets: Any) -> Callable[[Rule], Rule]:
    """Adds a rule for some operators to a table."""

    def add(function: Rule) -> Rule:
        for target in targets:
            table.setdefault(target, []).append(function)
        return function

    return add


def merge(tables: Iterable[dict[Any, list[Rule]]]) -> dict[Any, list[Rule]]:
    """All rules of several tables, in their order."""
    merged: dict[Any, list[Rule]] = {}
    for table in tables:
        for target, found in table.items():
            merged.setdefault(target, []).extend(found)
    return merged


def is_constant_fill(node: Any, value: float) -> bool:
    """Whether a value from outside is filled with one number, as `zeros` is."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if value == 0 and node.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
        return True
    if node.target in (aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default):
        return bool(node.args[-1] == value)
    if node.target in (*UNMOVED, aten.expand.default):
        return is_constant_fill(node.args[0], value)
    return False


def is_arange(node: Any, size: Size) -> bool:
    """Whether a value is 0, 1, ... size-1."""
    if not isinstance(node, Node):
        return False
    if node.target is aten.arange.default:
        return is_tensor(node) and same_size(shape_of(node)[0], size)
    if node.target is aten.arange.start_step:
        start, *rest = node.args
        step = rest[1] if len(rest) > 1 else 1
        return bool(start == 0 and step == 1) and same_size(shape_of(node)[0], size)
    if node.target is aten.arange.start:
        return bool(node.args[0] == 0) and same_size(shape_of(node)[0], size)
    if node.target in UNMOVED and same_size(node.meta["val"].numel(), size):
        return is_arange(node.args[0], size)
    return False


def is_uninitialised(node: Any) -> bool:
    """Whether a value from outside is memory that nothing was written to."""
    return isinstance(node, Node) and node.target in (
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.new_empty.default,
    )
