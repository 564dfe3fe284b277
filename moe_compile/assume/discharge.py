"""Justifies what a trace assumed: an expert without tokens must contribute nothing.

    trace, every expert occupied:      a0 ── index_add(rows of 0) ── index_add(rows of 1) ── index_add(rows of 2)
    trace, expert 1 taken as empty:    a0 ── index_add(rows of 0) ────────────────────────── index_add(rows of 2)

The recognisers prove the first graph to be an experts block for every routing, with or without tokens. What the module
really runs where an expert is empty is the second graph. Here the two are laid side by side: what the second one leaves
out must be without effect once the sizes that count the expert's rows are zero (writing no rows into a tensor gives
that tensor, joining no rows gives the others), and it must add nothing of its own. The experts are taken as empty in
four patterns, so that each is empty once beside an occupied and once beside an empty neighbour.
"""

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moe_compile.assume.presence import counted_experts, presence
from moe_compile.assume.trace import CannotAssumeError, Occupied, Traced
from moe_compile.passes.candidates import mutated_arguments, name_of, value_of
from moe_compile.passes.normalize import is_random

# Operations that write rows into their first argument: nothing happens where there are no rows.
_WRITES = frozenset(
    {
        "index_add",
        "index_copy",
        "index_put",
        "index_reduce",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "masked_scatter",
    }
)


def discharge(traced: Traced, num_experts: int, retrace: Callable[[Occupied], Traced]) -> None:
    """Shows that the assumptions of a trace lose nothing.

    Args:
        traced: the trace in which every expert has tokens.
        num_experts: E.
        retrace: traces the same module again, with some experts taken as empty.

    Raises:
        CannotAssumeError: if the module does something for an expert without tokens.
    """
    if not traced.assumptions:
        return
    for empty in _patterns(num_experts):
        source = traced.assumptions[0].source
        try:
            other = retrace(lambda expert, empty=empty: expert not in empty)  # type: ignore[misc]
        except CannotAssumeError as error:
            raise CannotAssumeError(
                f"an expert without tokens is treated apart: {error.reason}", error.source
            ) from error
        difference = _Comparison(traced.graph_module.graph, other.graph_module.graph, empty).difference()
        if difference is not None:
            raise CannotAssumeError(f"an expert without tokens is treated apart: {difference}", source)


def _patterns(num_experts: int) -> Iterator[frozenset[int]]:
    experts = range(num_experts)
    half = num_experts // 2
    for empty in (experts[::2], experts[1::2], experts[:half], experts[half:]):
        if 0 < len(empty) < num_experts:
            yield frozenset(empty)


class _Comparison:
    """Lays a graph in which some experts are empty beside the graph in which none is."""

    def __init__(self, full: Graph, thinned: Graph, empty: frozenset[int]) -> None:
        self.full = _live(full)
        self.thinned = _live(thinned)
        self.empty = empty
        self.twins: dict[Node, Node] = {}
        self.left_out: set[Node] = set()
        self.zero = {symbol: 0 for symbol, expert in counted_experts(full).items() if expert in empty}
        self.symbols: dict[sympy.Symbol, Any] = {}
        for node in self.full:
            if name_of(node) == "slice" and len(node.args) == 4 and self._size(node.args[2], {}) == self._end(node):
                self.zero |= dict.fromkeys(_fresh(node)[:1], 0)

    def difference(self) -> str | None:
        """What the thinned graph does that the full one does not once the experts are empty; None if nothing."""
        position = 0
        for node in self.thinned:
            start = position
            while position < len(self.full) and not self._alike(node, self.full[position]):
                self.left_out.add(self.full[position])
                position += 1
            if position == len(self.full):
                return f"`{node.format_node()}`"
            harm = next((n for n in self.full[start:position] if not self._is_harmless(n)), None)
            if harm is not None:
                return f"`{harm.format_node()}` is left out"
            self.twins[node] = self.full[position]
            self._learn_symbols(node, self.full[position])
            position += 1
        return None

    def _alike(self, node: Node, other: Node) -> bool:
        if node.op != other.op or (node.target != other.target and node.op not in ("placeholder", "get_attr")):
            return False
        if node.op == "get_attr":
            return bool(torch.equal(_constant(node), _constant(other)))
        return self._same(node.args, other.args, name_of(node)) and self._same(node.kwargs, other.kwargs, "")

    def _same(self, value: Any, other: Any, joins: str) -> bool:
        if isinstance(value, list | tuple) and isinstance(other, list | tuple):
            if joins == "cat" and len(value) < len(other):
                other = [item for item in other if not (item in self.left_out and self._is_void(item))]
            return len(value) == len(other) and all(self._same(a, b, joins) for a, b in zip(value, other, strict=True))
        if isinstance(value, dict) and isinstance(other, dict):
            return value.keys() == other.keys() and all(self._same(value[k], other[k], "") for k in value)
        if isinstance(value_of_any(value), torch.SymInt) or isinstance(value_of_any(other), torch.SymInt):
            return bool(self._size(value, self.symbols) == self._size(other, {}))
        if isinstance(value, Node) and isinstance(other, Node):
            return self.twins.get(value) is self._behind(other)
        return type(value) is type(other) and bool(value == other)

    def _size(self, value: Any, names: dict[sympy.Symbol, Any]) -> Any:
        """A size in the full graph's symbols, with the counts of the empty experts put to zero."""
        number = value_of_any(value)
        expression = number.node.expr if isinstance(number, torch.SymInt) else sympy.sympify(number)
        return sympy.expand(expression.xreplace(names).xreplace(self.zero))

    def _end(self, node: Node) -> Any:
        """Where a slice ends; None where that is no number."""
        return None if node.args[3] is None else self._size(node.args[3], {})

    def _behind(self, node: Node) -> Node:
        """What a node of the full graph is, where what was left out has written no rows into it."""
        while node in self.left_out and self._writes_nothing(node):
            node = node.args[0]  # type: ignore[assignment]
        return node

    def _is_harmless(self, node: Node) -> bool:
        """Whether leaving a node out can be seen only through its result."""
        if is_random(node):
            return False
        written = mutated_arguments(node)
        return all(self._writes_nothing(node) or self._is_void(w) or w in self.left_out for w in written)

    def _writes_nothing(self, node: Node) -> bool:
        if name_of(node).rstrip("_") not in _WRITES:
            return False
        found: list[Node] = []
        map_arg(node.args[1:], found.append)
        return any(self._is_void(index) for index in found)

    def _is_void(self, node: Any) -> bool:
        """Whether a tensor has no rows, or a mask picks none, with the experts empty."""
        value = value_of(node) if isinstance(node, Node) else None
        if not isinstance(value, Tensor):
            return False
        if any(isinstance(size, torch.SymInt) and self._size(size, {}) == 0 for size in value.shape):
            return True
        about = presence(node) if value.dtype is torch.bool else None
        return about is not None and about.expert in self.empty and not about.inverted

    def _learn_symbols(self, node: Node, other: Node) -> None:
        for symbol, real in zip(_fresh(node), _fresh(other), strict=False):
            self.symbols.setdefault(symbol, real)


def value_of_any(value: Any) -> Any:
    """A number, or the number that a node holds."""
    return value_of(value) if isinstance(value, Node) else value


def _live(graph: Graph) -> list[Node]:
    """The nodes that something comes of."""
    graph.eliminate_dead_code()
    return list(graph.nodes)


def _constant(node: Node) -> Tensor:
    module = node.graph.owning_module
    assert module is not None
    return getattr(module, str(node.target))  # type: ignore[no-any-return]


def _fresh(node: Node) -> list[sympy.Symbol]:
    value = value_of(node)
    values = value if isinstance(value, tuple | list) else [value]
    sizes = [
        size for v in values for size in (v.shape if isinstance(v, Tensor) else [v]) if isinstance(size, torch.SymInt)
    ]
    return [size.node.expr for size in sizes if isinstance(size.node.expr, sympy.Symbol)]
