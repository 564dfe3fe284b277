"""Rules for what picks rows of outside values and sums them back: where an experts block begins and ends.

    rows = index(hidden, [token])              {token (S,)}          ->  rows (S, None)
    w = index(weights, [token, slot])          {(R3,), (R3,)}        ->  rows (R3,)
    out = sum(view, [1])                       {rows (T, K, None)}   ->  output (T, None)
    out = scatter_add(zeros, 0, token, rows)   {rows (S, None)}      ->  output (T, None)

An outside value is picked from along tokens, pairs, or tokens and slots, and must have exactly as many: a longer one
would be cut, which no canonical op does.
"""

from typing import Any

import torch
from torch.fx import Node

from moe_compile.passes.block import Block, Rule, arguments, aten, is_constant_fill, rule
from moe_compile.passes.facts import Fact, Label, is_tensor, is_tokens, same_size, shape_of, wide
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.rowwise import keeps_axes, labels_of, reduced_axes

RULES: dict[Any, list[Rule]] = {}


@rule(RULES, aten.index.Tensor)
def _pick(block: Block, node: Node) -> Fact | None:
    base, indices = arguments(node)
    at = [axis for axis, index in enumerate(indices) if index is not None]
    given = [block.fact(indices[axis]) for axis in at]
    if not is_tensor(base) or not at or any(fact is None for fact in given) or at != list(range(at[0], at[-1] + 1)):
        return None
    counts, row = picked_rows(block, [indices[axis] for axis in at])
    if row is None:
        return None
    shape, covered = shape_of(base), at[0] + len(counts)
    fact = block.fact(base)
    if fact is not None and fact.kind == "output":
        is_row = at[0] == 0 and is_tokens(wide(counts)) and fact.labels == (*counts, None)
        return Fact("read", (row, None), base=base) if is_row else None
    if fact is not None and fact.kind == "gates":
        return _picked_weights(block, node, at[0], counts, row)
    if fact is not None and (fact.kind not in ("rows", "ids") or fact.labels[at[0] : covered] != counts):
        raise NotProvenError(f"{node.name} reorders something that is not in the order of pairs", node)
    sizes = {"T": block.num_tokens, "K": block.top_k, "N": block.pairs}
    first = indices[at[0]]
    expected = shape_of(first) if _is_mask(block, first) else tuple(sizes[count or ""] for count in counts)
    if covered > len(shape) or not all(map(same_size, shape[at[0] : covered], expected)):
        raise NotProvenError(f"{node.name} picks from {tuple(shape)}, which has not one entry per token or pair", node)
    own = labels_of(block, base)
    labels: tuple[Label, ...] = (*own[: at[0]], row, *own[covered:])
    if fact is not None:
        block.passed[node] = base
        return Fact(fact.kind, labels, clamped=fact.clamped)
    block.leaves.add(node)
    return Fact("rows", labels)


def _is_mask(block: Block, index: Node) -> bool:
    return block.kind(index) in ("mask", "gates") and index.meta["val"].dtype is torch.bool


def picked_rows(block: Block, indices: list[Node]) -> tuple[tuple[Label, ...], Label]:
    """Which axes some index values run over, and which rows they pick; ((), None) if they are no such indices."""
    facts = [block.facts[index] for index in indices]
    kinds = tuple(fact.kind for fact in facts)
    first = facts[0]
    if len(facts) == 1 and _is_mask(block, indices[0]):
        labels = first.labels
        if first.kind == "gates":
            row = block.kept_rows(indices[0])
            return (labels, row) if row is not None and is_tokens(wide(labels)) else ((), None)
        if labels in (("N",), ("T", "K")) or is_tokens(wide(labels)):
            return labels, f"R{first.expert}"
        return (), None
    if len({fact.labels for fact in facts}) != 1 or len(first.labels) != 1:
        return (), None
    counts = {"token": "T", "slot": "K", "pair": "N"}
    counted = tuple(counts.get(kind, "") for kind in kinds)
    return (counted, first.labels[0]) if counted in (("T",), ("N",), ("T", "K"), ("K", "T")) else ((), None)


def _picked_weights(block: Block, node: Node, axis: int, counts: tuple[Label, ...], row: Label) -> Fact | None:
    """One expert's column of the weights at its tokens, or all of them at each sorted row's token."""
    base = arguments(node)[0]
    fact = block.facts[base]
    if axis != 0 or fact.off != 0 or row is None or not is_tokens(wide(counts)):
        return None
    if fact.expert is None:
        matches = fact.labels == (*counts, "E") and row == "S"
        return Fact("gates", ("S", "E"), base=base) if matches else None
    if row.partition("@")[0] != f"R{fact.expert}" or fact.labels[: len(counts)] != counts:
        raise NotProvenError(f"{node.name} picks expert {fact.expert}'s weights for the rows of another", node)
    block.leaves.add(node)
    return Fact("rows", (row, *fact.labels[len(counts) :]))


@rule(RULES, aten.gather.default)
def _weight_of_row(block: Block, node: Node) -> Fact | None:
    """Of all weights of a row's token, that of its own expert."""
    base, dim, index = arguments(node)[:3]
    fact, ids = block.fact(base), block.fact(index)
    if fact is None or fact.kind != "gates" or fact.labels != ("S", "E") or ids is None or ids.kind != "ids":
        return None
    if int(dim) % 2 != 1 or ids.labels != ("S", None) or not same_size(shape_of(node)[1], 1):
        return None
    block.leaves.add(node)
    return Fact("rows", ("S", None))


@rule(RULES, aten.index_select.default)
def _select_rows(block: Block, node: Node) -> Fact | None:
    base, dim, index = arguments(node)
    fact = block.fact(index)
    if fact is None or fact.kind not in ("token", "pair") or not block.is_outside(base):
        return None
    size = block.num_tokens if fact.kind == "token" else block.pairs
    axis = int(dim) % len(shape_of(base))
    if not block.is_leading(base, size, axis):
        raise NotProvenError(f"{node.name} picks from a value that has not one entry per token or pair", node)
    block.leaves.add(node)
    labels: list[Label] = [None] * len(shape_of(base))
    labels[axis] = fact.labels[0]
    return Fact("rows", tuple(labels))


@rule(RULES, aten.gather.default)
def _gather_rows(block: Block, node: Node) -> Fact | None:
    base, dim, index = arguments(node)
    fact = block.fact(index)
    if fact is None or fact.kind not in ("token", "pair") or dim != 0 or not block.is_outside(base):
        return None
    size = block.num_tokens if fact.kind == "token" else block.pairs
    same_rest = all(map(same_size, shape_of(base)[1:], shape_of(node)[1:]))
    if not block.is_leading(base, size) or not same_rest or any(fact.labels[1:]):
        raise NotProvenError(f"{node.name} picks from a value that has not one entry per token or pair", node)
    block.leaves.add(node)
    return Fact("rows", fact.labels)


@rule(RULES, aten.sum.dim_IntList)
def _sum_over_slots(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "rows" or keeps_axes(node):
        return None
    axes = reduced_axes(node, len(fact.labels))
    slots = {"K"} if "K" in fact.labels else {None}
    if {fact.labels[axis] for axis in axes} != slots or len(axes) != 1:
        return None
    if slots == {None}:
        # With one slot per token, an axis of size one behind the tokens is the axis of slots.
        if block.top_k != 1 or fact.labels[0] != "N" or axes != {1} or not block.is_leading(arguments(node)[0], 1, 1):
            return None
        rest = fact.labels[2:]
    else:
        if fact.labels[:2] != ("T", "K"):
            raise NotProvenError(f"{node.name} sums over slots that are not beside their tokens", node)
        rest = fact.labels[2:]
    if len(rest) != 1 or rest[0] is not None:
        return None
    return Fact("output", ("T", None), parts=((-1, arguments(node)[0]),))


@rule(RULES, aten.bmm.default)
def _weighted_sum_over_slots(block: Block, node: Node) -> Fact | None:
    """(T, 1, K) @ (T, K, O) with routing weights on the left, or (T, O, K) @ (T, K, 1) with them on the right."""
    left, right = arguments(node)
    if labels_of(block, right) == ("T", "K", None) and _is_weights(block, left, (0, 2)):
        block.weighted[node] = left
        return Fact("output", ("T", None, None), parts=((-1, right),))
    if labels_of(block, left) == ("T", None, "K") and _is_weights(block, right, (0, 1)):
        block.weighted[node] = right
        return Fact("output", ("T", None, None), parts=((-1, left),))
    return None


def _is_weights(block: Block, node: Node, axes: tuple[int, int]) -> bool:
    """Whether an outside value has tokens and slots on two axes, and one entry on the third."""
    shape = shape_of(node)
    (other,) = {0, 1, 2} - set(axes)
    sizes = (block.num_tokens, block.top_k)
    return (
        block.is_outside(node)
        and all(same_size(shape[axis], size) for axis, size in zip(axes, sizes, strict=True))
        and same_size(shape[other], 1)
    )


@rule(RULES, aten.index_add.default)
def _add_sorted_rows(block: Block, node: Node) -> Fact | None:
    base, dim, index, rows = arguments(node)
    if dim != 0 or node.kwargs.get("alpha", 1) != 1 or not block.is_token(index):
        return None
    return _add_to_tokens(block, node, base, block.facts[index].labels[0], rows)


@rule(RULES, aten.scatter_add.default)
def _scatter_sorted_rows(block: Block, node: Node) -> Fact | None:
    base, dim, index, rows = arguments(node)
    if dim != 0 or not block.is_token(index) or any(block.facts[index].labels[1:]):
        return None
    if not all(map(same_size, shape_of(index), shape_of(rows))):
        raise NotProvenError(f"{node.name} adds fewer features than the rows have", node)
    return _add_to_tokens(block, node, base, block.facts[index].labels[0], rows)


def _add_to_tokens(block: Block, node: Node, base: Node, label: Label, rows: Node) -> Fact | None:
    if block.kind(rows) != "rows" or block.facts[rows].labels != (label, None) or label not in ("S", "N", "C"):
        return None
    if not block.is_outside(base) or len(shape_of(base)) != 2 or not block.is_leading(base, block.num_tokens):
        raise NotProvenError(f"{node.name} adds rows to a buffer that has not one entry per token", node)
    if not same_size(shape_of(base)[1], shape_of(rows)[1]):
        raise NotProvenError(f"{node.name} adds rows to a wider buffer", node)
    start = None if is_constant_fill(base, 0) else base
    return Fact("output", ("T", None), base=start, parts=((-1, rows),))
