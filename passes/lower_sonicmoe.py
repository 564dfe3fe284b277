"""Lowers a canonical block to SonicMoE's fused forward and backward.

    dispatch -> grouped_linear -> gate -> grouped_linear -> combine    ->    moe_sonicmoe::experts(x, ids, ...)

The gate is part of the kernel, so it has to be one that the kernel implements, proven from the operators between the
projections (`match_gate`). Weights are passed as views of what the model stores. Where the halves of the first
projection are columns of what is stored (transposed and concatenated), the fused kernel would need a copy of them, and
the library's plain grouped product runs each projection instead.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule

from moe_compile.kernels.external import sonicmoe
from moe_compile.kernels.external.loading import load_kernel
from moe_compile.ops import drop_sentinel_rows
from moe_compile.passes.blocks import CanonicalBlock, Lowered, op_arguments
from moe_compile.passes.lower_with_kernel import lower_block, lower_linears
from moe_compile.passes.match_gate import Gate, match_gate
from moe_compile.passes.region import find_region


def lower_sonicmoe(gm: GraphModule, block: CanonicalBlock) -> Lowered:
    """Replaces a block's canonical ops in place; the caller lints and recompiles.

    Args:
        gm: the root graph module.
        block: a block of it.

    Returns:
        The outcome "sonicmoe".

    Raises:
        RequirementError, KernelLoadError: if SonicMoE cannot be loaded, which happens here at first.
        RewriteError: if the kernel does not compute what stands between and behind the projections.
    """
    load_kernel(sonicmoe.NAME)
    if op_arguments(block.linears[0])["transposed"] and _is_concatenated(gm, block):
        return _lower_linears(gm, block)
    return _lower_block(gm, block)


def _is_concatenated(gm: GraphModule, block: CanonicalBlock) -> bool:
    region = find_region(block)
    gate = region if isinstance(region, str) else match_gate(gm, region)
    return isinstance(gate, Gate) and gate.concatenated


def _is_static(tensor: Tensor) -> bool:
    """Whether the library may try tile sizes: it does so anew for every token count that it sees."""
    return isinstance(tensor.shape[0], int)


def _experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    gate: str,
    concatenated: bool,
    transposed: bool,
    dtype: torch.dtype,
    training: bool,
) -> Tensor:
    return sonicmoe.experts(
        x_TD.to(up.dtype),
        ids_TK,
        weights_TK,
        up,
        up_bias,
        down,
        down_bias,
        gate=gate,
        concatenated=concatenated,
        transposed=transposed,
        dtype=dtype,
        training=training,
        tuned=_is_static(x_TD),
    )


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets_E: Tensor, transposed: bool) -> Tensor:
    rows = drop_sentinel_rows(rows, offsets_E)  # for the derivative of `where`, which masks the gradient
    return sonicmoe.linear(rows, weight, bias, offsets_E, transposed, tuned=_is_static(rows))


_lower_block = lower_block(sonicmoe.NAME, _experts)
_lower_linears = lower_linears(sonicmoe.NAME, _linear)
