"""The sorted form: pairs in expert order, one grouped product per projection.

    sorted, perm = sort(ids.reshape(-1))                       rows, offsets, order = dispatch(x, ids, E)
    rows = x[perm // K]                                   ->   h = grouped_linear(rows, w_up, None, offsets, False)
    offsets = cumsum(histc(sorted, E, 0, E - 1))               a = gate(h)
    h = grouped_mm(rows, w_up.transpose(1, 2), offsets)        y = grouped_linear(a, w_down, None, offsets, False)
    y = grouped_mm(gate(h), w_down.transpose(1, 2), offsets)   out = combine(y, weights, order, dtype)
    y = y * weights.reshape(-1)[perm, None]
    out = y[inverse(perm)].view(T, K, D).sum(1)

transformers' `grouped_mm` experts and torchtitan's are of this form. What must hold: the offsets count the very ids
that the rows were sorted by, and the rows that are multiplied are in that order. Rows of sentinels come last, belong to
no expert, and may be zeroed wherever one likes.
"""

from typing import Any

import torch
from torch.fx import Node

from moe_compile.passes.block import (
    Block,
    Projection,
    Rule,
    arguments,
    aten,
    is_arange,
    is_constant_fill,
    rule,
)
from moe_compile.passes.facts import Fact, is_tensor, same_size, shape_of
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.rowwise import keeps_axes, reduced_axes

RULES: dict[Any, list[Rule]] = {}


@rule(RULES, aten.sort.default, aten.sort.stable)
def _sort(block: Block, node: Node) -> tuple[Fact | None, ...] | None:
    fact = block.fact(arguments(node)[0])
    named = dict(node.kwargs)
    dims = list(arguments(node)[1:])
    if node.target is aten.sort.stable and dims and isinstance(dims[0], bool | None):
        dims = dims[1:]
    dim = dims[0] if dims else named.get("dim", -1)
    descending = dims[1] if len(dims) > 1 else named.get("descending", False)
    if fact is None or fact.kind not in ("ids", "pair") or len(fact.labels) != 1 or dim not in (0, -1):
        return None
    if descending:
        raise NotProvenError(f"{node.name} puts the last expert first", node)
    if fact.kind == "ids" and fact.labels == ("N",):
        if fact.clamped:
            raise NotProvenError(f"{node.name} sorts sentinels among the last expert's rows", node)
        return Fact("ids", ("S",)), Fact("pair", ("S",))
    if fact.kind == "pair" and fact.labels == ("S",):
        return None, Fact("inverse", ("N",))
    return None


@rule(RULES, aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode)
def _token_of_pair(block: Block, node: Node) -> Fact | None:
    pair, divisor = arguments(node)[:2]
    fact = block.fact(pair)
    if fact is None or fact.kind != "pair":
        return None
    if node.kwargs.get("rounding_mode", "floor") not in ("floor", "trunc") or divisor != block.top_k:
        raise NotProvenError(f"{node.name} divides the order by {divisor}, with {block.top_k} experts per token", node)
    return Fact("token", fact.labels)


@rule(RULES, aten.remainder.Scalar)
def _slot_of_pair(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    return Fact("slot", fact.labels) if fact and fact.kind == "pair" and arguments(node)[1] == block.top_k else None


@rule(RULES, aten.ge.Scalar)
def _sentinels(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "ids" or fact.clamped:
        return None
    block.expect_experts(int(arguments(node)[1]), node)
    return Fact("sentinel", fact.labels)


@rule(RULES, aten.clamp.default)
def _clamp(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "ids":
        return None
    low, high = (*arguments(node)[1:], None, None)[:2]
    high = node.kwargs.get("max", high)
    low = node.kwargs.get("min", low)
    if low not in (None, 0) or not isinstance(high, int):
        raise NotProvenError(f"{node.name} presses the expert ids into {low}..{high}", node)
    block.expect_experts(high + 1, node)
    return Fact("ids", fact.labels, clamped=True)


@rule(RULES, aten.clamp_max.default)
def _clamp_max(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "ids":
        return None
    block.expect_experts(int(arguments(node)[1]) + 1, node)
    return Fact("ids", fact.labels, clamped=True)


@rule(RULES, aten.histc.default)
def _histogram(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "ids" or fact.clamped:
        return None
    given = dict(zip(("bins", "min", "max"), arguments(node)[1:], strict=False)) | node.kwargs
    bins, low, high = given.get("bins", 100), given.get("min", 0), given.get("max", 0)
    block.expect_experts(int(bins), node)
    if low != 0 or high not in (bins - 1, bins):
        raise NotProvenError(f"histc counts {bins} bins between {low} and {high}, which is not one per expert", node)
    # With max == bins, id E falls into the last bin; with min == max, the bins follow the data and count every id.
    return Fact("counts", ("E",), exact=high == bins - 1 and bins > 1)


@rule(RULES, aten.scatter.value)
def _mark_experts(block: Block, node: Node) -> Fact | None:
    base, dim, ids, value = arguments(node)
    fact = block.fact(ids)
    if fact is None or fact.kind != "ids" or fact.labels != ("T", "K") or dim not in (1, -1):
        return None
    if not is_constant_fill(base, 0) or value not in (1, True) or not block.is_leading(base, block.num_tokens):
        return None
    if not block.distinct:
        raise NotProvenError(f"{node.name} marks an expert once, however often a token names it", node)
    return Fact("onehot", ("T", "E"))


@rule(RULES, aten.sum.dim_IntList)
def _sum_of_onehot(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "onehot" or keeps_axes(node):
        return None
    axes = reduced_axes(node, len(fact.labels))
    if [label for axis, label in enumerate(fact.labels) if axis not in axes] != ["E"]:
        return None
    block.expect_experts(shape_of(node)[0], node)
    return Fact("counts", ("E",))


@rule(RULES, aten.cumsum.default)
def _offsets(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "counts" or arguments(node)[1] not in (0, -1):
        return None
    return Fact("offsets", ("E",), exact=fact.exact)


@rule(RULES, aten.index_put.default, aten.scatter.src)
def _scatter_to_pairs(block: Block, node: Node) -> Fact | None:
    if node.target is aten.scatter.src:
        base, dim, index, values = arguments(node)
        accumulates = False
        if dim != 0:
            return None
    else:
        base, indices, values = arguments(node)[:3]
        index = indices[0] if len(indices) == 1 else None
        accumulates = bool(arguments(node)[3]) if len(arguments(node)) > 3 else False
    if block.kind(index) != "pair" or block.facts[index].labels[0] not in ("S", "C") or not block.is_outside(base):
        return None
    if not block.is_leading(base, block.pairs) or (accumulates and not is_constant_fill(base, 0)):
        return None
    if is_arange(values, block.pairs) and block.facts[index].labels[0] == "S":
        return Fact("inverse", ("N",))
    fact = block.fact(values)
    if fact is None or fact.kind != "rows" or fact.labels[0] != block.facts[index].labels[0]:
        return None
    block.passed[node] = values
    return Fact("rows", ("N", *fact.labels[1:]))


@rule(RULES, aten.index.Tensor)
def _back_to_pairs(block: Block, node: Node) -> Fact | None:
    values, indices = arguments(node)
    fact = block.fact(values)
    if len(indices) != 1 or block.kind(indices[0]) != "inverse" or fact is None or fact.kind != "rows":
        return None
    if fact.labels[0] != "S":
        raise NotProvenError("index restores the order of rows that are in no expert order", node)
    block.passed[node] = values
    return Fact("rows", ("N", *fact.labels[1:]))


def _grouped_product(block: Block, node: Node) -> Fact | None:
    rows, weight, *rest = arguments(node)
    given = dict(zip(("offs", "bias", "out_dtype"), rest, strict=False)) | node.kwargs
    offsets = block.fact(given.get("offs"))
    if offsets is None or offsets.kind != "offsets":
        raise NotProvenError(f"{node.name} takes offsets that are not proven to count the expert ids", node)
    if block.kind(rows) != "rows" or block.facts[rows].labels != ("S", None):
        raise NotProvenError(f"{node.name} takes rows that are not proven to be in expert order", node)
    if given.get("bias") is not None or given.get("out_dtype") not in (None, weight.meta["val"].dtype):
        raise NotProvenError(f"{node.name} has a bias or an output dtype of its own", node)
    if not block.is_outside(weight) or len(shape_of(weight)) != 3:
        raise NotProvenError(f"{node.name} takes a weight that depends on the routing", node)
    experts = shape_of(weight)[0]
    block.expect_experts(experts, node)
    if not offsets.exact and (block.below is None or not same_size(block.below, experts)):
        block.needs_masking.append((node, "counts ids beyond the last expert as the last expert's"))
    stacked, transposed = untransposed(weight)
    block.projections[node] = Projection(rows, stacked, transposed)
    return Fact("rows", ("S", None))


rule(RULES, aten._grouped_mm.default)(_grouped_product)


def with_transformers(rules: dict[Any, list[Rule]]) -> dict[Any, list[Rule]]:
    """Adds transformers' own grouped product, which exists once transformers is imported."""
    namespace = torch.ops.transformers
    if hasattr(namespace, "grouped_mm_fallback"):
        return {**rules, namespace.grouped_mm_fallback.default: [_grouped_product]}
    return rules


def untransposed(weight: Node) -> tuple[Node, bool]:
    """The stacked weight behind a transposition of its last two axes.

    Returns:
        (weight, transposed): (E, out, in) and False, or (E, in, out) as it stands and True.
    """
    rank = len(shape_of(weight))
    last = {rank - 2, rank - 1}
    if weight.target is aten.t.default and is_tensor(arguments(weight)[0]):
        return arguments(weight)[0], False
    if weight.target is aten.transpose.int and {int(a) % rank for a in arguments(weight)[1:3]} == last:
        return arguments(weight)[0], False
    if weight.target is aten.permute.default and [int(a) % rank for a in arguments(weight)[1]] == [
        *range(rank - 2),
        rank - 1,
        rank - 2,
    ]:
        return arguments(weight)[0], False
    return weight, True
