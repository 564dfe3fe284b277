"""The canonical ops: every experts block is first rewritten to these, then lowered to one experts backend.

    rows_ND, offsets_E, order_N = moe::dispatch(x_TD, ids_TK, num_experts)       gather into expert order
    h_NO                        = moe::grouped_linear(rows_ND, w, bias, offsets) each expert's rows by its weight
    ...                         the gate, a norm, ... stay ordinary nodes
    y_TD                        = moe::combine(rows_ND, weights_TK, order_N)     weigh and sum back per token

The implementations are the readable reference, on CPU and CUDA alike; they read the offsets on the host and are not
meant to be fast. After lowering no canonical op is left in a graph, unless the reference itself was asked for.

Two optional arguments go beyond the three lines above: `block` names the experts block that a dispatch belongs to
(it does not change numbers), and `offsets` lets `combine` drop what an operation between the last projection and the
combine made of the rows that belong to no expert (a softmax turns zeros into something else).
"""

import torch
from torch import Tensor

from moe_compile.errors import BlockInputError

NAMESPACE = "moe"

_DEFINITIONS = (
    'dispatch(Tensor x, Tensor ids, int num_experts, str block="") -> (Tensor, Tensor, Tensor)',
    "grouped_linear(Tensor rows, Tensor weight, Tensor? bias, Tensor offsets, bool transposed) -> Tensor",
    "grouped_linear_backward(Tensor grad, Tensor rows, Tensor weight, Tensor offsets, bool transposed, bool has_bias)"
    " -> (Tensor, Tensor, Tensor)",
    "combine(Tensor rows, Tensor weights, Tensor order, ScalarType dtype, Tensor? offsets=None) -> Tensor",
)
for _definition in _DEFINITIONS:
    torch.library.define(f"{NAMESPACE}::{_definition.split('(')[0]}", _definition[_definition.index("(") :])

_REFERENCE = "CompositeExplicitAutograd"


def _require(condition: bool, op: str, found: str, remedy: str) -> None:
    if not condition:
        raise BlockInputError(f"moe::{op}", found, remedy)


# dispatch ------------------------------------------------------------------------------------------------------------


def _check_dispatch(x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> None:
    shapes = f"got x {tuple(x_TD.shape)} and ids {tuple(ids_TK.shape)}"
    _require(x_TD.dim() == 2 and ids_TK.dim() == 2, "dispatch", shapes, "Pass x as (T, D) and ids as (T, K)")
    torch._check(x_TD.shape[0] == ids_TK.shape[0], lambda: f"moe::dispatch: the token counts differ: {shapes}")
    _require(
        ids_TK.dtype in (torch.int32, torch.int64),
        "dispatch",
        f"expert ids have dtype {ids_TK.dtype}",
        "Pass int32 or int64",
    )
    _require(num_experts > 0, "dispatch", f"num_experts is {num_experts}", "Pass a positive number of experts")


@torch.library.impl(f"{NAMESPACE}::dispatch", _REFERENCE)
def _dispatch(x_TD: Tensor, ids_TK: Tensor, num_experts: int, block: str = "") -> tuple[Tensor, Tensor, Tensor]:
    _check_dispatch(x_TD, ids_TK, num_experts)
    ids_N = ids_TK.reshape(-1).long()
    sentinel_N = (ids_N < 0) | (ids_N >= num_experts)
    sorted_N, order_N = torch.sort(ids_N.masked_fill(sentinel_N, num_experts), stable=True)
    counts_E = torch.bincount(sorted_N, minlength=num_experts + 1)[:num_experts]
    rows_ND = x_TD[order_N // max(ids_TK.shape[1], 1)]
    return rows_ND, counts_E.cumsum(0).int(), order_N


@torch.library.register_fake(f"{NAMESPACE}::dispatch")
def _dispatch_fake(x_TD: Tensor, ids_TK: Tensor, num_experts: int, block: str = "") -> tuple[Tensor, Tensor, Tensor]:
    _check_dispatch(x_TD, ids_TK, num_experts)
    n = ids_TK.shape[0] * ids_TK.shape[1]
    return (
        x_TD.new_empty(n, x_TD.shape[1]),
        ids_TK.new_empty(num_experts, dtype=torch.int32),
        ids_TK.new_empty(n, dtype=torch.int64),
    )


def _dispatch_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x_TD, ids_TK, *_ = inputs
    ctx.save_for_backward(output[2])
    ctx.top_k, ctx.num_tokens = ids_TK.shape[1], x_TD.shape[0]
    ctx.mark_non_differentiable(output[1], output[2])


def _dispatch_backward(ctx, grad_ND, _offsets, _order):  # type: ignore[no-untyped-def]
    (order_N,) = ctx.saved_tensors
    grad_TD = grad_ND.new_zeros(ctx.num_tokens, grad_ND.shape[1])
    return grad_TD.index_add(0, order_N // max(ctx.top_k, 1), grad_ND), None, None, None


torch.library.register_autograd(f"{NAMESPACE}::dispatch", _dispatch_backward, setup_context=_dispatch_setup)


# grouped_linear ------------------------------------------------------------------------------------------------------


def _check_grouped_linear(rows_ND: Tensor, weight: Tensor, bias: Tensor | None, offsets_E: Tensor, transposed: bool):  # type: ignore[no-untyped-def]
    _require(
        rows_ND.dim() == 2 and weight.dim() == 3,
        "grouped_linear",
        f"got rows {tuple(rows_ND.shape)} and weight {tuple(weight.shape)}",
        "Pass rows as (N, D) and weight as (E, out, in), or (E, in, out) with transposed=True",
    )
    features, out = (weight.shape[1], weight.shape[2]) if transposed else (weight.shape[2], weight.shape[1])
    _require(
        rows_ND.shape[1] == features and offsets_E.shape == (weight.shape[0],),
        "grouped_linear",
        f"got rows {tuple(rows_ND.shape)}, weight {tuple(weight.shape)} (transposed={transposed}) and offsets "
        f"{tuple(offsets_E.shape)}",
        "Rows need the weight's input size and offsets one end per expert",
    )
    if bias is not None:
        _require(
            bias.shape == (weight.shape[0], out),
            "grouped_linear",
            f"got bias {tuple(bias.shape)} with {weight.shape[0]} experts of {out} outputs",
            "Pass bias as (E, out)",
        )
    return out


def groups(offsets_E: Tensor) -> list[tuple[int, int]]:
    """(start, end) of each expert's rows, from the ends (E,); reads them on the host, once."""
    ends = offsets_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _own_dtypes(tensor: Tensor) -> torch.autocast:
    """Keeps autocast out: an op's result has the dtype that its fake function promises."""
    return torch.autocast(tensor.device.type, enabled=False)


@torch.library.impl(f"{NAMESPACE}::grouped_linear", _REFERENCE)
def _grouped_linear(
    rows_ND: Tensor, weight: Tensor, bias: Tensor | None, offsets_E: Tensor, transposed: bool
) -> Tensor:
    out = _check_grouped_linear(rows_ND, weight, bias, offsets_E, transposed)
    rows_ND = rows_ND.to(weight.dtype)
    out_NO = rows_ND.new_zeros(rows_ND.shape[0], out)
    with _own_dtypes(rows_ND):
        for expert, (start, end) in enumerate(groups(offsets_E)):
            matrix = weight[expert] if transposed else weight[expert].T
            product = rows_ND[start:end] @ matrix
            out_NO[start:end] = product if bias is None else product + bias[expert]
    return out_NO


@torch.library.register_fake(f"{NAMESPACE}::grouped_linear")
def _grouped_linear_fake(
    rows_ND: Tensor, weight: Tensor, bias: Tensor | None, offsets_E: Tensor, transposed: bool
) -> Tensor:
    out = _check_grouped_linear(rows_ND, weight, bias, offsets_E, transposed)
    return rows_ND.new_empty(rows_ND.shape[0], out, dtype=weight.dtype)


@torch.library.impl(f"{NAMESPACE}::grouped_linear_backward", _REFERENCE)
def _grouped_linear_grads(
    grad_NO: Tensor, rows_ND: Tensor, weight: Tensor, offsets_E: Tensor, transposed: bool, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = rows_ND.to(weight.dtype)
    grad_rows = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    grad_bias = weight.new_zeros((weight.shape[0], grad_NO.shape[1]) if has_bias else (0,))
    with _own_dtypes(rows):
        for expert, (start, end) in enumerate(groups(offsets_E)):
            grad, part = grad_NO[start:end], rows[start:end]
            grad_rows[start:end] = grad @ (weight[expert].T if transposed else weight[expert])
            grad_weight[expert] = part.T @ grad if transposed else grad.T @ part
            if has_bias:
                grad_bias[expert] = grad.sum(0)
    return grad_rows.to(rows_ND.dtype), grad_weight, grad_bias


@torch.library.register_fake(f"{NAMESPACE}::grouped_linear_backward")
def _grouped_linear_grads_fake(
    grad_NO: Tensor, rows_ND: Tensor, weight: Tensor, offsets_E: Tensor, transposed: bool, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        rows_ND.new_empty(rows_ND.shape),
        weight.new_empty(weight.shape),
        weight.new_empty((weight.shape[0], grad_NO.shape[1]) if has_bias else (0,)),
    )


def _grouped_linear_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    rows_ND, weight, bias, offsets_E, transposed = inputs
    ctx.save_for_backward(rows_ND, weight, offsets_E)
    ctx.transposed, ctx.has_bias = transposed, bias is not None


def _grouped_linear_backward(ctx, grad_NO):  # type: ignore[no-untyped-def]
    rows_ND, weight, offsets_E = ctx.saved_tensors
    grad_rows, grad_weight, grad_bias = torch.ops.moe.grouped_linear_backward(
        grad_NO, rows_ND, weight, offsets_E, ctx.transposed, ctx.has_bias
    )
    return grad_rows, grad_weight, grad_bias if ctx.has_bias else None, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::grouped_linear", _grouped_linear_backward, setup_context=_grouped_linear_setup
)


# combine -------------------------------------------------------------------------------------------------------------


def _check_combine(rows_NO: Tensor, weights_TK: Tensor, order_N: Tensor) -> None:
    _require(
        rows_NO.dim() == 2 and weights_TK.dim() == 2 and order_N.dim() == 1,
        "combine",
        f"got rows {tuple(rows_NO.shape)}, weights {tuple(weights_TK.shape)}, order {tuple(order_N.shape)}",
        "Pass rows as (T*K, O), weights as (T, K) and order as (T*K,)",
    )
    torch._check(
        rows_NO.shape[0] == order_N.shape[0],
        lambda: f"moe::combine: {rows_NO.shape[0]} rows, but an order of {order_N.shape[0]}",
    )


def drop_sentinel_rows(rows_NO: Tensor, offsets_E: Tensor) -> Tensor:
    """Zeroes the rows past the last expert's end, and their gradient: what stands there may be uninitialised."""
    position_N = torch.arange(rows_NO.shape[0], device=rows_NO.device)
    return torch.where((position_N < offsets_E[-1]).unsqueeze(1), rows_NO, 0)


def weighted_sum(rows_NO: Tensor, weights_TK: Tensor, position_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sums each token's K rows by routing weight, in the promoted dtype, with one cast at the end.

    Args:
        rows_NO: (T*K, O).
        weights_TK: (T, K).
        position_N: (T*K,) int64, the row of pair t*K+k; None where rows already stand in that order.
        dtype: dtype of the result.

    Returns:
        (T, O).
    """
    num_tokens, top_k = weights_TK.shape
    picked = rows_NO if position_N is None else rows_NO[position_N]
    return (picked.view(num_tokens, top_k, rows_NO.shape[1]) * weights_TK.unsqueeze(-1)).sum(1).to(dtype)


def invert(order_N: Tensor) -> Tensor:
    """The inverse of a permutation (N,) int64."""
    position_N = torch.arange(order_N.shape[0], device=order_N.device)
    return torch.empty_like(order_N).scatter(0, order_N, position_N)


@torch.library.impl(f"{NAMESPACE}::combine", _REFERENCE)
def _combine(
    rows_NO: Tensor, weights_TK: Tensor, order_N: Tensor, dtype: torch.dtype, offsets_E: Tensor | None = None
) -> Tensor:
    _check_combine(rows_NO, weights_TK, order_N)
    if offsets_E is not None:
        rows_NO = drop_sentinel_rows(rows_NO, offsets_E)
    return weighted_sum(rows_NO, weights_TK, invert(order_N), dtype)


@torch.library.register_fake(f"{NAMESPACE}::combine")
def _combine_fake(
    rows_NO: Tensor, weights_TK: Tensor, order_N: Tensor, dtype: torch.dtype, offsets_E: Tensor | None = None
) -> Tensor:
    _check_combine(rows_NO, weights_TK, order_N)
    return rows_NO.new_empty(weights_TK.shape[0], rows_NO.shape[1], dtype=dtype)


def _combine_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    rows_NO, weights_TK, order_N, _, offsets_E = inputs
    ctx.save_for_backward(rows_NO, weights_TK, order_N, offsets_E)


def _combine_backward(ctx, grad_TO):  # type: ignore[no-untyped-def]
    rows_NO, weights_TK, order_N, offsets_E = ctx.saved_tensors
    promoted = torch.promote_types(rows_NO.dtype, weights_TK.dtype)
    if offsets_E is not None:
        rows_NO = drop_sentinel_rows(rows_NO, offsets_E)
    top_k = max(weights_TK.shape[1], 1)
    grad_NO = grad_TO.to(promoted)[order_N // top_k]
    grad_rows = grad_NO * weights_TK.reshape(-1)[order_N].unsqueeze(1)
    if offsets_E is not None:
        grad_rows = drop_sentinel_rows(grad_rows, offsets_E)
    grad_weights = (grad_NO * rows_NO).sum(1)[invert(order_N)].view(weights_TK.shape)
    return grad_rows.to(rows_NO.dtype), grad_weights.to(weights_TK.dtype), None, None, None


torch.library.register_autograd(f"{NAMESPACE}::combine", _combine_backward, setup_context=_combine_setup)
