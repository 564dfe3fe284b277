"""The sorted form with a loop: rows in expert order, cut by the counts, each piece through its expert, joined again.

    order = argsort(ids.reshape(-1))                           rows, offsets, order = dispatch(x, ids, E)
    counts = bincount(ids.reshape(-1), minlength=E).tolist()
    pieces = x[order // K].split(counts)                  ->   h = grouped_linear(rows, w_up, None, offsets, False)
    y = cat([gate(p @ w_up[e].T) @ w_down[e].T ...])           y = grouped_linear(gate(h), w_down, None, ...)
    out.index_add_(0, order // K, y * weights[order])          out = combine(y, weights, order, dtype)

JetMoE, torchtitan's loop, FastMoE and DeepSeek's remote code are of this form; the pieces come from `split` or from
slices between sums of counts, and go back by `cat`, by assignment to the same slices, or by an addition each.

A piece is proven by its ends alone. With P_e the number of pairs of the experts before e, every count that the host
reads is P_{e+1} - P_e and every cumulated one P_{e+1}; sums of these are carried along as {e: coefficient}, and a slice
is expert e's if it begins at P_e and ends at P_{e+1}. All P_E rows of real experts are all N rows unless there are
sentinels, which `cat` then leaves out: what it returns meets N routing weights, so that no program works with both.
"""

from typing import Any

import torch
from torch.fx import Node

from moe_compile.passes.block import Block, Rule, arguments, aten, is_constant_fill, is_uninitialised, rule
from moe_compile.passes.facts import SIZES, Fact, Label, Size, expression, is_tensor, same_size, shape_of
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.rowwise import keeps_axes, reduced_axes, shape_equal

RULES: dict[Any, list[Rule]] = {}
_SORTED = ("rows", "token", "pair", "ids", "slot")


# Counts that the host reads ------------------------------------------------------------------------------------------


@rule(RULES, aten.bincount.default)
def _bincount(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "ids" or fact.clamped or len(fact.labels) != 1 or len(node.args) == 2:
        return None
    experts: Any = arguments(node)[2] if len(node.args) > 2 else node.kwargs.get("minlength", 0)
    if node.kwargs.get("weights") is not None or (len(node.args) > 2 and arguments(node)[1] is not None):
        return None
    block.expect_experts(experts, node)
    return Fact("counts", ("E",))


@rule(RULES, aten.sum.default, aten.sum.dim_IntList)
def _count_of_mask(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "mask":
        return None
    everything = node.target is aten.sum.default or reduced_axes(node, len(fact.labels)) == set(range(len(fact.labels)))
    whole = everything and not (node.target is aten.sum.dim_IntList and keeps_axes(node))
    return Fact("count", (), expert=fact.expert) if whole else None


@rule(RULES, aten.select.int)
def _one_count(block: Block, node: Node) -> Fact | None:
    source, _, number = arguments(node)
    fact = block.fact(source)
    if fact is None or fact.kind not in ("counts", "offsets") or not isinstance(number, int):
        return None
    if number < 0:
        number += int(expression(shape_of(source)[0])) if expression(shape_of(source)[0]).is_Integer else 0
    if number < 0 or not _counts_each(block, fact, source):
        return None
    return Fact("count" if fact.kind == "counts" else "end", (), expert=number)


@rule(RULES, aten.unbind.int)
def _all_counts(block: Block, node: Node) -> tuple[Fact | None, ...] | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind not in ("counts", "offsets") or not _counts_each(block, fact, arguments(node)[0]):
        return None
    kind: Any = "count" if fact.kind == "counts" else "end"
    return tuple(Fact(kind, (), expert=number) for number in range(len(node.meta["val"])))


def _counts_each(block: Block, fact: Fact, source: Node) -> bool:
    """Whether no id of a sentinel was counted as the last expert's."""
    return fact.exact or (block.below is not None and same_size(block.below, shape_of(source)[0]))


@rule(RULES, aten._local_scalar_dense.default)
def _read(block: Block, node: Node) -> Fact | None:
    """The host reads a count: from here on its symbol means P_{e+1} - P_e."""
    fact, value = block.fact(arguments(node)[0]), node.meta.get("val")
    if fact is None or fact.kind not in ("count", "end") or not isinstance(value, torch.SymInt):
        return None
    assert fact.expert is not None
    symbol = value.node.expr
    if symbol.is_Symbol:
        before = {fact.expert: -1} if fact.kind == "count" and fact.expert else {}
        block.counted.setdefault(symbol, {fact.expert + 1: 1} | before)
    return None


def position(block: Block, size: Any) -> int | None:
    """The expert before whose rows a position stands: e if the position is P_e, None if it is no such sum."""
    if isinstance(size, Node):
        size = size.meta["val"]
    if not isinstance(size, int | torch.SymInt):
        return None
    total: dict[int, int] = {}
    everything = expression(block.pairs)
    value = expression(size)
    if value == everything or (value.is_Integer and value > 2**62):
        return block.num_experts[0][0] if block.num_experts else None
    if value.is_Integer:
        return 0 if value == 0 else None
    for symbol, times in value.as_coefficients_dict().items():
        ends = block.counted.get(symbol)
        if ends is None:
            return None
        for expert, sign in ends.items():
            total[expert] = total.get(expert, 0) + sign * int(times)
    found = {expert: times for expert, times in total.items() if times}
    if not found:
        return None
    ((expert, times), *others) = found.items()
    return expert if times == 1 and not others else None


# Pieces --------------------------------------------------------------------------------------------------------------


def _piece(block: Block, start: int | None, end: int | None) -> Label:
    """The label of the sorted rows between two positions."""
    if start is None or end is None:
        return None
    if end == start + 1:
        return f"S{start}"
    everything = bool(block.num_experts) and end == block.num_experts[0][0]
    return "P" if start == 0 and everything else None


@rule(RULES, aten.split_with_sizes.default)
def _split(block: Block, node: Node) -> tuple[Fact | None, ...] | None:
    source, sizes = arguments(node)[:2]
    fact = _sorted_fact(block, source, arguments(node)[2] if len(node.args) > 2 else 0)
    if fact is None:
        return None
    total: Size = 0
    found: list[Fact] = []
    for size in sizes:
        start = position(block, total)
        total = total + (size.meta["val"] if isinstance(size, Node) else size)
        label = _piece(block, start, position(block, total))
        if label is None:
            raise NotProvenError(f"split cuts the sorted rows at {total}, which is no end of an expert's", node)
        found.append(_cut_fact(fact, label))
    block.cuts[node] = source
    return tuple(found)


@rule(RULES, aten.slice.Tensor)
def _slice(block: Block, node: Node) -> Fact | None:
    source, dim, start, end, step = _slice_arguments(node, 1)
    fact = _sorted_fact(block, source, dim)
    if fact is None or shape_equal(node, source):
        return None
    label = _piece(block, position(block, start or 0), position(block, end))
    if label is None or step != 1:
        raise NotProvenError("slice cuts the sorted rows at what is no end of an expert's", node)
    block.passed[node] = block.cuts[node] = source
    # Each slice has a size of its own; those of one expert are equal.
    _write_alike(node, expression(shape_of(node)[0]), expression(block.lengths.setdefault(label, shape_of(node)[0])))
    return _cut_fact(fact, label)


def _slice_arguments(node: Node, tensors: int) -> Any:
    """The tensors and dim, start, end and step of a slice, defaults filled in."""
    given = list(arguments(node))
    return (*given, *(0, 0, 2**63 - 1, 1)[len(given) - tensors :])


def _sorted_fact(block: Block, source: Any, dim: int) -> Fact | None:
    fact = block.fact(source)
    is_sorted = fact is not None and fact.kind in _SORTED and bool(fact.labels) and fact.labels[0] in ("S", "P")
    return fact if is_sorted and dim % len(shape_of(source)) == 0 else None


def _cut_fact(fact: Fact, label: Label) -> Fact:
    expert = int(label[1:]) if label is not None and label != "P" else None
    return Fact(fact.kind, (label, *fact.labels[1:]), expert=expert, clamped=fact.clamped)


# Put together --------------------------------------------------------------------------------------------------------


@rule(RULES, aten.cat.default)
def _join(block: Block, node: Node) -> Fact | None:
    operands = list(arguments(node)[0])
    facts = [block.fact(operand) for operand in operands]
    first = facts[0]
    dim = arguments(node)[1] if len(node.args) > 1 else 0
    if first is None or first.kind not in ("rows", "token", "pair", "slot") or dim % len(first.labels) != 0:
        return None
    label = first.labels[0]
    if label in ("S", "P") and operands[0] in block.fills:
        return _padded(block, node, operands, first)
    if label is None or label[0] not in "SR" or label == "S":
        return None
    parts: list[tuple[int, Node]] = []
    for operand, fact in zip(operands, facts, strict=True):
        expected = (f"{label[0]}{len(parts)}{label[2:] if label[-1] == chr(39) else ''}", *first.labels[1:])
        if fact is None or fact.kind != first.kind or fact.labels != expected:
            raise NotProvenError(f"cat joins other rows than expert {len(parts)}'s at place {len(parts)}", node)
        parts.append((len(parts), operand))
    experts = block.num_experts[0][0] if block.num_experts else None
    if label[0] == "S" and experts not in (None, len(parts)):
        raise NotProvenError(f"cat joins the rows of {len(parts)} experts out of {experts}", node)
    block.expect_experts(len(parts), node)
    # Of masks, the pieces are in the order of a stable sort, which the sort of the same ids need not be.
    joined = "S" if label[0] == "S" else "C"
    learn_size(block, node)
    if first.kind != "rows":
        return Fact(first.kind, (joined,))
    block.fills[node] = tuple(parts)
    return Fact("rows", (joined, *first.labels[1:]))


def _padded(block: Block, node: Node, operands: list[Node], first: Fact) -> Fact | None:
    """Rows of no expert behind those of all, as zeros."""
    if not all(is_constant_fill(operand, 0) and operand not in block.facts for operand in operands[1:]):
        raise NotProvenError("cat puts other rows behind those of all experts than zeros", node)
    learn_size(block, node)
    block.passed[node] = operands[0]
    return first


def learn_size(block: Block, node: Node) -> None:
    """All experts' rows are all rows: writes the sum of their numbers as N from here on."""
    total, pairs = expression(shape_of(node)[0]), expression(block.pairs)
    symbol = next((s for s in sorted(total.free_symbols - pairs.free_symbols, key=str) if total.coeff(s) == 1), None)
    if total == pairs or symbol is None:
        return
    _write_alike(node, symbol, pairs - total + symbol)


def _write_alike(node: Node, symbol: Any, meaning: Any) -> None:
    """Writes an unbacked size as another that equals it, from a node on."""
    if symbol == meaning or not symbol.is_Symbol:
        return
    at = node
    while at.op != "output":
        if is_tensor(at) and any(symbol in _symbols(size) for size in shape_of(at)):
            at.meta[SIZES] = tuple(_plain(expression(size).xreplace({symbol: meaning})) for size in shape_of(at))
        at = at.next


def _symbols(size: Size) -> Any:
    return () if isinstance(size, int) else expression(size).free_symbols


def _plain(size: Any) -> Any:
    size = size.expand().doit() if hasattr(size, "expand") else size
    return int(size) if size.is_Integer else size


@rule(RULES, aten.slice_scatter.default)
def _assigned(block: Block, node: Node) -> Fact | None:
    """`out[start:end] = y`: rows in expert order, once every expert has written."""
    base, rows, dim, start, end, step = _slice_arguments(node, 2)
    fact = block.fact(rows)
    if fact is None or fact.kind != "rows" or not (fact.labels[0] or "").startswith("S") or dim != 0:
        return None
    label = _piece(block, position(block, start or 0), position(block, end))
    fits = len(shape_of(base)) == len(fact.labels) and same_size(shape_of(base)[0], block.pairs)
    if label is None or label != fact.labels[0] or label == "P" or step != 1 or not fits:
        raise NotProvenError(f"{node.name} writes rows to other places than their own expert's", node)
    expert = int(label[1:])
    if base not in block.fills and not (is_uninitialised(base) or is_constant_fill(base, 0)):
        raise NotProvenError(f"{node.name} writes into a buffer that holds other values", node)
    earlier = block.fills.get(base, ())
    if any(expert == number for number, _ in earlier):
        raise NotProvenError(f"{node.name} takes expert {expert} a second time", node)
    block.fills[node] = (*earlier, (expert, rows))
    return Fact("rows", ("S", *fact.labels[1:]))
