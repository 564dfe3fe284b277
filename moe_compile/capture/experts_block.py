"""One experts block, spelled with the canonical ops: what captured classes are traced as."""

from collections.abc import Callable

import torch
from torch import Tensor

import moe_compile.ops  # noqa: F401  registers torch.ops.moe
from moe_compile.capture.plan import latest_tag


@torch._dynamo.assume_constant_result
def _planned_block() -> str:
    return latest_tag()


def experts_block(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    up: Tensor,
    gate: Callable[[Tensor], Tensor],
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    after: Callable[[Tensor], Tensor] | None = None,
    transposed: bool = False,
    block: str | None = None,
) -> Tensor:
    """Runs every token through its experts and sums their outputs by routing weight.

    Under autocast the projections run in the autocast dtype, as `torch.nn.functional.linear` would.

    Args:
        x_TD: hidden states (T, D).
        ids_TK: expert ids (T, K), int32 or int64; ids outside [0, E) contribute nothing.
        weights_TK: routing weights (T, K), floating.
        up: first projection (E, O, D), or (E, D, O) when transposed; O is 2F where gate and up are fused.
        gate: maps rows (N, O) to (N, F), each row on its own.
        down: second projection (E, D, F), or (E, F, D) when transposed.
        up_bias: (E, O).
        down_bias: (E, D).
        after: maps each expert's output rows (N, D) to (N, D) before they are weighed, each row on its own.
        transposed: layout of both projections.
        block: tag that finds the block's record again; None for the block planned last. It does not change numbers.

    Returns:
        (T, D) in the dtype of `x_TD`.
    """
    if block is None:
        block = _planned_block() if torch.compiler.is_dynamo_compiling() else ""
    device = x_TD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        up, down = up.to(dtype), down.to(dtype)
        up_bias = None if up_bias is None else up_bias.to(dtype)
        down_bias = None if down_bias is None else down_bias.to(dtype)
    rows_ND, offsets_E, order_N = torch.ops.moe.dispatch(x_TD, ids_TK, up.shape[0], block)
    hidden_NF = gate(torch.ops.moe.grouped_linear(rows_ND, up, up_bias, offsets_E, transposed))
    out_ND = torch.ops.moe.grouped_linear(hidden_NF, down, down_bias, offsets_E, transposed)
    if after is None:
        return torch.ops.moe.combine(out_ND, weights_TK, order_N, x_TD.dtype)
    return torch.ops.moe.combine(after(out_ND), weights_TK, order_N, x_TD.dtype, offsets_E)
