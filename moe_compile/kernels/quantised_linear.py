"""`moe::quantised_linear`: a canonical projection whose weight is quantised, with its scales.

    out[start:end] = rows[start:end] @ dequantised(weight[e])^T        for every expert e

Two formats, as checkpoints store them: FP8 (e4m3) with one scale per 128x128 or 1x128 block, and FP4 (e2m1), two values
in an int8, the lower half first, with one scale per 32 values of a row. Scales are float32, or UE8M0, whose byte is the
exponent of a power of two. With a process group, the experts of all its ranks are meant and this rank holds an equal
share of them, in order; only a kernel that exchanges tokens runs that.

The implementation is the readable reference; kernels quantise the rows as well, and so agree with it to FP8's
precision.

Legend: N rows, E experts, I input and O output features.
"""

import torch
from torch import Tensor

from moe_compile.errors import BlockInputError
from moe_compile.ops import groups

_NAME = "moe::quantised_linear"
FP8_BLOCK, FP4_GROUP = 128, 32
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# The arguments that it shares with `moe::grouped_linear` have the same names; a bias and the other layout are refused.
torch.library.define(
    _NAME,
    "(Tensor rows, Tensor weight, Tensor scale, Tensor? bias, Tensor offsets, bool transposed, ScalarType dtype,"
    ' str group="") -> Tensor',
)


def quantisation_of(weight: Tensor) -> str | None:
    """ "fp8", "fp4" or None, by a weight's dtype."""
    return {torch.float8_e4m3fn: "fp8", torch.int8: "fp4"}.get(weight.dtype)


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """The values of a quantised weight.

    Args:
        weight: (..., O, I) float8_e4m3fn, or (..., O, I / 2) int8.
        scale: (..., O or O / 128, I / 128 or I / 32) float32 or float8_e8m0fnu, rounded up.

    Returns:
        (..., O, I) float32.
    """
    if weight.dtype == torch.int8:
        code = torch.stack((weight & 15, (weight >> 4) & 15), -1).flatten(-2)
        values = torch.tensor(FP4_VALUES, device=weight.device)[(code & 7).long()]
        values, width = torch.where(code > 7, -values, values), FP4_GROUP
    else:
        values, width = weight.float(), FP8_BLOCK
    height = 1 if scale.shape[-2] == values.shape[-2] else FP8_BLOCK
    spread = scale.float().repeat_interleave(height, -2).repeat_interleave(width, -1)
    return values * spread[..., : values.shape[-2], : values.shape[-1]]


def _check(
    rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, offsets: Tensor, transposed: bool, group: str
) -> None:
    fits = (
        rows.dim() == 2
        and weight.dim() == scale.dim() == 3
        and weight.shape[0] == scale.shape[0]
        and (weight.shape[0] == offsets.shape[0] or (group != "" and offsets.shape[0] % weight.shape[0] == 0))
        and rows.shape[1] == weight.shape[2] * (2 if weight.dtype == torch.int8 else 1)
    )
    known = quantisation_of(weight) is not None and scale.dtype in (torch.float32, torch.float8_e8m0fnu)
    if not fits or not known or bias is not None or transposed:
        raise BlockInputError(
            _NAME,
            f"got rows {tuple(rows.shape)}, weight {tuple(weight.shape)} {weight.dtype}, scale {tuple(scale.shape)} "
            f"{scale.dtype}, {'a' if bias is not None else 'no'} bias, transposed={transposed}",
            "Pass a float8_e4m3fn or packed int8 weight (E, O, I) with float32 or float8_e8m0fnu scales and no bias",
        )


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _quantised_linear(
    rows: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    transposed: bool,
    dtype: torch.dtype,
    group: str = "",
) -> Tensor:
    _check(rows, weight, scale, bias, offsets, transposed, group)
    if weight.shape[0] != offsets.shape[0]:
        raise BlockInputError(_NAME, f"the experts are spread over {group!r}", "Use deepgemm_megamoe")
    out = rows.new_zeros(rows.shape[0], weight.shape[1], dtype=dtype)
    for expert, (start, end) in enumerate(groups(offsets)):
        if start < end:
            out[start:end] = (rows[start:end].float() @ dequantise(weight[expert], scale[expert]).T).to(dtype)
    return out


@torch.library.register_fake(_NAME)
def _quantised_linear_fake(
    rows: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    transposed: bool,
    dtype: torch.dtype,
    group: str = "",
) -> Tensor:
    _check(rows, weight, scale, bias, offsets, transposed, group)
    return rows.new_empty(rows.shape[0], weight.shape[1], dtype=dtype)
