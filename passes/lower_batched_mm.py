"""Lowers a canonical block to weight gather and `bmm`.

    rows, offsets, order = dispatch(x, ids, E)      ->   rows = each token K times in a row; ids, kept = clamp(ids)
    h = grouped_linear(rows, w, bias, offsets)      ->   h = where(kept, bmm(w[ids], rows) + bias[ids], 0)
    y = combine(h, weights, order)                  ->   y = (h * weights).view(T, K, O).sum(1)

Nothing is sorted: row t*K+k is pair (t, k), and the order is the identity. The shape of the gather and the product is
the one that Inductor fuses at T = 1 on CPU, so that the gathered weights never reach memory. Beyond that they do,
T*K matrices of them, hence the warning.
"""

import math
import warnings
from weakref import WeakSet

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moe_compile.errors import MemoryWarning, RuleError
from moe_compile.ops import weighted_sum
from moe_compile.passes.blocks import CanonicalBlock, Lowered, fake_value, needs_gradient, op_arguments
from moe_compile.passes.splice import replace_node, splice

WARN_BYTES = 1 << 30
_WARNED: WeakSet[GraphModule] = WeakSet()


def lower_batched_mm(gm: GraphModule, block: CanonicalBlock) -> Lowered:
    """Replaces a block's canonical ops in place; the caller lints and recompiles.

    Args:
        gm: the root graph module.
        block: a block of it.

    Returns:
        The outcome "batched_mm".

    Raises:
        RuleError: if the block's offsets are used in another way than by its own projections and combine:
            they describe sorted rows, which this lowering does not have.
    """
    _require_private_offsets(block)
    _warn_of_memory(gm, block)
    dispatch = op_arguments(block.dispatch)
    inputs = dispatch["x"], dispatch["ids"]
    rows, ids, kept = splice(gm, block.dispatch, _dispatch, inputs, num_experts=dispatch["num_experts"])
    for linear in block.linears:
        arguments = op_arguments(linear)
        tensors = arguments["rows"], arguments["weight"], arguments["bias"], ids, kept
        layout = {"transposed": arguments["transposed"], "training": needs_gradient(linear)}
        (product,) = splice(gm, linear, _linear, tensors, **layout)
        replace_node(linear, product)
    for combine in block.combines:
        arguments = op_arguments(combine)
        tensors = arguments["rows"], arguments["weights"], kept
        dropping = arguments["offsets"] is not None
        (summed,) = splice(gm, combine, _combine, tensors, dtype=arguments["dtype"], drop=dropping)
        replace_node(combine, summed)
    for node in block.rows:
        node.replace_all_uses_with(rows)
    for node in block.order:
        if node.users:
            (order,) = splice(gm, block.dispatch, _order, [ids])
            node.replace_all_uses_with(order)
    for node in (*block.rows, *block.offsets, *block.order, block.dispatch):
        node.graph.erase_node(node)
    return Lowered("batched_mm")


def _dispatch(x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, top_k = ids_TK.shape
    rows_ND = x_TD.unsqueeze(1).expand(num_tokens, top_k, x_TD.shape[1]).reshape(num_tokens * top_k, x_TD.shape[1])
    ids_N = ids_TK.reshape(num_tokens * top_k).long()
    kept_N1 = ((ids_N >= 0) & (ids_N < num_experts)).unsqueeze(1)
    return rows_ND, ids_N.clamp(0, num_experts - 1), kept_N1


def _order(ids_N: Tensor) -> Tensor:
    return torch.arange(ids_N.shape[0], device=ids_N.device)


def _linear(
    rows_NI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids_N: Tensor,
    kept_N1: Tensor,
    transposed: bool,
    training: bool,
) -> Tensor:
    rows_NI = rows_NI.to(weight.dtype)
    if training:  # a gate may make infinities of the zeros in a dropped row, and 0 * inf is no zero gradient
        rows_NI = torch.where(kept_N1, rows_NI, 0)
    chosen = weight[ids_N]
    if transposed:
        out_NO = torch.bmm(rows_NI.unsqueeze(1), chosen).squeeze(1)
    else:
        out_NO = torch.bmm(chosen, rows_NI.unsqueeze(-1)).squeeze(-1)
    if bias is not None:
        out_NO = out_NO + bias[ids_N]
    return torch.where(kept_N1, out_NO, 0)


def _combine(rows_NO: Tensor, weights_TK: Tensor, kept_N1: Tensor, dtype: torch.dtype, drop: bool) -> Tensor:
    if drop:
        rows_NO = torch.where(kept_N1, rows_NO, 0)
    return weighted_sum(rows_NO, weights_TK, None, dtype)


def _require_private_offsets(block: CanonicalBlock) -> None:
    known = {*block.linears, *block.combines}
    for offsets in block.offsets:
        for user in offsets.users:
            if user not in known:
                raise RuleError(
                    f"experts='batched_mm' for {block.tag or block.dispatch.name}",
                    f"{user.name} reads where each expert's rows end, but this backend does not sort rows by expert",
                    "Use experts='grouped_mm'",
                )


def _warn_of_memory(gm: GraphModule, block: CanonicalBlock) -> None:
    """Warns once per graph, by its first block that is large: the others of a model are mostly alike."""
    num_bytes = sum(_gathered_bytes(linear) for linear in block.linears)
    if num_bytes > WARN_BYTES and gm not in _WARNED:
        _WARNED.add(gm)
        warnings.warn(
            f"experts='batched_mm' copies {num_bytes} bytes of expert weights per call of "
            f"{block.tag or block.dispatch.name}, one matrix per token and expert; experts='grouped_mm' copies none.",
            MemoryWarning,
            stacklevel=2,
        )


def _gathered_bytes(linear: Node) -> int:
    """Bytes of one projection's gathered weights, at the token count that was traced; 0 where none is known."""
    arguments = op_arguments(linear)
    weight = fake_value(arguments["weight"])
    matrix = (fake_value(arguments["rows"]).shape[0], *weight.shape[1:])
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in matrix]
    return 0 if None in sizes else math.prod(sizes) * weight.dtype.itemsize
