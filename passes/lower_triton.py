"""Lowers a canonical block to the project's own Triton kernels.

    rows, offsets, order = dispatch(x, ids, E)    ->   order, ends = moe_triton::route(ids, E)
    h = grouped_linear(rows, w, bias, offsets)    ->   h = moe_triton::grouped_linear(x, ..., gather=K)
    ...                                                ...
    y = grouped_linear(h, w, bias, offsets)       ->   y = moe_triton::grouped_linear(h, ..., scatter=True)
    combine(y, weights, order)                    ->   (y * weights).view(T, K, O).sum(1)

The tokens are gathered by the first product and the rows written to their pairs by the last, so that neither a sorted
copy of the tokens nor an inverse permutation reaches memory. Where something else reads the rows, or stands between the
last product and the combine, they are gathered and kept in expert order as for `grouped_mm`. The gate stays with
Inductor. The kernels leave rows that belong to no expert unwritten; `where` masks them.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moe_compile.ops import drop_sentinel_rows, invert, weighted_sum
from moe_compile.passes.blocks import CanonicalBlock, Lowered, fake_value, op_arguments
from moe_compile.passes.splice import replace_node, splice


def lower_triton(gm: GraphModule, block: CanonicalBlock) -> Lowered:
    """Replaces a block's canonical ops in place; the caller lints and recompiles.

    Args:
        gm: the root graph module.
        block: a block of it.

    Returns:
        The outcome "triton".
    """
    dispatch = op_arguments(block.dispatch)
    x, ids = dispatch["x"], dispatch["ids"]
    top_k = fake_value(ids).shape[1]
    order, ends, kept = splice(gm, block.dispatch, _route, (x, ids), num_experts=dispatch["num_experts"])
    scattered: set[Node] = set()
    for linear in block.linears:
        arguments = op_arguments(linear)
        gathers = arguments["rows"] in block.rows
        scatters = bool(linear.users) and all(user in block.combines for user in linear.users)
        tensors = x if gathers else arguments["rows"], arguments["weight"], arguments["bias"], order, ends
        layout = {"transposed": arguments["transposed"], "top_k": top_k if gathers else 0, "scatter": scatters}
        (product,) = splice(gm, linear, _linear, tensors, **layout)
        replace_node(linear, product)
        if scatters:
            scattered.add(product)
    for combine in block.combines:
        arguments = op_arguments(combine)
        rows, weights, dtype = arguments["rows"], arguments["weights"], arguments["dtype"]
        if rows in scattered:
            (summed,) = splice(gm, combine, _combine_pairs, (rows, weights, kept), dtype=dtype)
        else:
            (summed,) = splice(gm, combine, _combine_sorted, (rows, weights, order, ends), dtype=dtype)
        replace_node(combine, summed)
    _replace_reads(gm, block, x, order, ends, top_k)
    if not kept.users:
        kept.graph.erase_node(kept)
    return Lowered("triton")


def _replace_reads(gm: GraphModule, block: CanonicalBlock, x: Node, order: Node, ends: Node, top_k: int) -> None:
    """Gives what else reads the dispatch's results the same values, and erases the dispatch."""
    for node in block.rows:
        if node.users:
            (rows,) = splice(gm, node, _gather, (x, order), top_k=top_k)
            node.replace_all_uses_with(rows)
    for node in block.order:
        if node.users:
            (wide,) = splice(gm, node, _wide, (order,))
            node.replace_all_uses_with(wide)
    for node in block.offsets:
        node.replace_all_uses_with(ends)
    for node in (*block.rows, *block.offsets, *block.order, block.dispatch):
        node.graph.erase_node(node)


def _route(x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    from moe_compile.kernels.triton_moe.ops import route  # imports triton

    order_N, ends_E = route(ids_TK, num_experts)
    return order_N, ends_E, (ids_TK >= 0) & (ids_TK < num_experts)


def _linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order_N: Tensor,
    ends_E: Tensor,
    transposed: bool,
    top_k: int,
    scatter: bool,
) -> Tensor:
    from moe_compile.kernels.triton_moe.ops import grouped_linear  # imports triton

    rows, bias = rows.to(weight.dtype), None if bias is None else bias.contiguous()
    if not statically_known_true(rows.stride(1) == 1):
        rows = rows.clone(memory_format=torch.contiguous_format)
    out = grouped_linear(rows, weight, bias, order_N, ends_E, transposed=transposed, gather=top_k, scatter=scatter)
    return out if scatter else drop_sentinel_rows(out, ends_E)


def _combine_pairs(rows_NO: Tensor, weights_TK: Tensor, kept_TK: Tensor, dtype: torch.dtype) -> Tensor:
    return weighted_sum(torch.where(kept_TK.reshape(rows_NO.shape[0], 1), rows_NO, 0), weights_TK, None, dtype)


def _combine_sorted(rows_NO: Tensor, weights_TK: Tensor, order_N: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    rows_NO = drop_sentinel_rows(rows_NO, ends_E)
    return weighted_sum(rows_NO, weights_TK, invert(order_N.long()), dtype)


def _gather(x_TD: Tensor, order_N: Tensor, top_k: int) -> Tensor:
    return x_TD[order_N.long() // top_k]


def _wide(order_N: Tensor) -> Tensor:
    return order_N.long()
