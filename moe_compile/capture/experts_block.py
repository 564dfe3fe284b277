"""One experts block, spelled with the canonical ops: what captured classes are traced as."""

from collections.abc import Callable

import torch
from torch import Tensor

import moe_compile.kernels.quantised_linear
import moe_compile.ops  # noqa: F401  both register torch.ops.moe
from moe_compile.capture.plan import latest_tag


@torch._dynamo.assume_constant_result
def _planned_block() -> str:
    return latest_tag()


@torch._dynamo.assume_constant_result
def _ranks_of(process_group: str) -> int:
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    return _resolve_process_group(process_group).size()  # type: ignore[arg-type]


def _linear(
    rows: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    offsets_E: Tensor,
    transposed: bool,
    dtype: torch.dtype,
    process_group: str,
) -> Tensor:
    if scale is None:
        return torch.ops.moe.grouped_linear(rows, weight, bias, offsets_E, transposed)
    return torch.ops.moe.quantised_linear(rows, weight, scale, bias, offsets_E, transposed, dtype, process_group)


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
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    process_group: str = "",
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
        up_scale: scales of a quantised first projection, as `moe::quantised_linear` takes them; None without.
        down_scale: scales of a quantised second projection.
        process_group: name of the process group over which quantised experts are spread, "" where all are here.
        block: tag that finds the block's record again; None for the block planned last. It does not change numbers.

    Returns:
        (T, D) in the dtype of `x_TD`.
    """
    if block is None:
        block = _planned_block() if torch.compiler.is_dynamo_compiling() else ""
    device = x_TD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        up = up if up_scale is not None else up.to(dtype)
        down = down if down_scale is not None else down.to(dtype)
        up_bias = None if up_bias is None else up_bias.to(dtype)
        down_bias = None if down_bias is None else down_bias.to(dtype)
    num_experts = up.shape[0] * (_ranks_of(process_group) if process_group else 1)
    rows_ND, offsets_E, order_N = torch.ops.moe.dispatch(x_TD, ids_TK, num_experts, block)
    layout = offsets_E, transposed, x_TD.dtype, process_group
    hidden_NF = gate(_linear(rows_ND, up, up_scale, up_bias, *layout))
    out_ND = _linear(hidden_NF, down, down_scale, down_bias, *layout)
    if after is None:
        return torch.ops.moe.combine(out_ND, weights_TK, order_N, x_TD.dtype)
    return torch.ops.moe.combine(after(out_ND), weights_TK, order_N, x_TD.dtype, offsets_E)
