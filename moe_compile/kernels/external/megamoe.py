"""DeepGEMM's Mega MoE: a whole expert-parallel block in one kernel, as the opaque op `moe_megamoe::experts`.

    1. Round the tokens to FP8 and put them, their expert ids and routing weights into a symmetric buffer, which every
       rank of the process group sees.
    2. One kernel fetches each expert's rows over NVLink, runs both projections and the gate, and sends the results back
       while the next rows are multiplied.
    3. The sum over experts is part of it: nothing is reduced afterwards.

Ids are global: expert e lies on rank e // E. Weights are FP4 with UE8M0 scales, in an order of the kernel's own: they
are transformed once, at the first call, and again if they have changed. The buffer is allocated at the first call for a
shape, which all ranks of the group have to make, and again for more tokens; layers of one shape share it.

Legend: T tokens of this rank, K experts per token, E experts of this rank, D model, F expert size.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moe_compile.errors import BlockInputError
from moe_compile.kernels.external.loading import load_kernel, require_result
from moe_compile.kernels.quantised_linear import FP4_GROUP

NAME = "deepgemm_megamoe"
_EXPERTS = "moe_megamoe::experts"
DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]

torch.library.define(
    _EXPERTS,
    "(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor up_scale, Tensor down, Tensor down_scale, str group,"
    " float? limit, ScalarType dtype, str digest) -> Tensor",
)

Pair = tuple[Tensor, Tensor]

# Transformed weights, by the memory of the original ones; the references keep an address from meaning another weight.
_transformed: dict[tuple[int, ...], tuple[list[StorageWeakRef], tuple[int, ...], tuple[Pair, Pair]]] = {}
_buffers: dict[tuple[str, int, int, int, int], Any] = {}


def experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    *,
    group: str,
    limit: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Runs a whole experts block over a process group.

    Args:
        x_TD: tokens of this rank (T, D), floating.
        ids_TK: global expert ids (T, K); ids outside [0, E * ranks) contribute nothing.
        weights_TK: routing weights (T, K).
        up: (E, 2F, D / 2) int8, two FP4 values each, gate and up as halves.
        up_scale: (E, 2F, D / 32) float8_e8m0fnu.
        down: (E, D, F / 2) int8.
        down_scale: (E, D, F / 32) float8_e8m0fnu.
        group: name of the process group.
        limit: clamp of SwiGLU's parts, None without one.
        dtype: of the result.

    Returns:
        (T, D), summed over experts of all ranks.

    Raises:
        BlockInputError: if shapes or dtypes do not fit, or no process group has that name.
        RequirementError, KernelLoadError, KernelResultError: for a kernel that cannot be loaded or answers wrongly.
    """
    return torch.ops.moe_megamoe.experts(
        x_TD, ids_TK, weights_TK, up, up_scale, down, down_scale, group, limit, dtype, DIGEST
    )


def release_buffers() -> None:
    """Frees symmetric buffers and transformed weights. Call it on every rank, before process groups are destroyed."""
    for buffer in _buffers.values():
        buffer.destroy()
    _buffers.clear()
    _transformed.clear()


@torch.library.impl(_EXPERTS, "CompositeExplicitAutograd")
def _experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    group: str,
    limit: float | None,
    dtype: torch.dtype,
    digest: str,
) -> Tensor:
    _check(x, ids, up, up_scale, down, down_scale)
    functions = load_kernel(NAME).functions
    ranks = _resolve(group)
    tokens, top_k, num_experts = ids.shape[0], ids.shape[1], up.shape[0] * ranks.size()
    first, second = _transform(up, up_scale, down, down_scale)
    buffer = _buffer(ranks, group, tokens, top_k, num_experts, x.shape[1], up.shape[1] // 2)
    cast, scales = functions["utils.per_token_cast_to_fp8"](
        x.bfloat16(), use_ue8m0=True, gran_k=FP4_GROUP, use_packed_ue8m0=True
    )
    require_result(NAME, "per_token_cast_to_fp8", cast, x.new_empty(x.shape, dtype=torch.float8_e4m3fn))
    buffer.x[:tokens].copy_(cast)
    buffer.x_sf[:tokens].copy_(scales)
    buffer.topk_idx[:tokens].copy_(torch.where((ids >= 0) & (ids < num_experts), ids, -1))
    buffer.topk_weights[:tokens].copy_(weights)
    out = x.new_empty(x.shape, dtype=torch.bfloat16)
    returned = functions["fp8_fp4_mega_moe"](out, first, second, buffer, activation_clamp=limit)
    return (out if returned is None else require_result(NAME, "fp8_fp4_mega_moe", returned, out)).to(dtype)


@torch.library.register_fake(_EXPERTS)
def _experts_fake(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    group: str,
    limit: float | None,
    dtype: torch.dtype,
    digest: str,
) -> Tensor:
    _check(x, ids, up, up_scale, down, down_scale)
    return x.new_empty(x.shape, dtype=dtype)


def _check(x: Tensor, ids: Tensor, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor) -> None:
    (experts_up, wide, half_in), (experts_down, size, half_inner) = up.shape, down.shape
    fits = (
        x.shape[0] == ids.shape[0]
        and x.shape[1] == size == 2 * half_in
        and experts_up == experts_down
        and wide == 4 * half_inner
        and tuple(up_scale.shape) == (experts_up, wide, size // FP4_GROUP)
        and tuple(down_scale.shape) == (experts_up, size, wide // 2 // FP4_GROUP)
    )
    fp4 = up.dtype == down.dtype == torch.int8
    ue8m0 = up_scale.dtype == down_scale.dtype == torch.float8_e8m0fnu
    if not (fits and fp4 and ue8m0):
        raise BlockInputError(
            _EXPERTS,
            f"got x {tuple(x.shape)}, up {tuple(up.shape)} {up.dtype} with scales {tuple(up_scale.shape)} "
            f"{up_scale.dtype}, down {tuple(down.shape)} {down.dtype} with scales {tuple(down_scale.shape)}",
            "Pass FP4 weights up (E, 2F, D / 2) and down (E, D, F / 2) in int8, with a UE8M0 scale per 32 values",
        )


def _resolve(group: str) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    try:
        return _resolve_process_group(group)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError) as error:
        raise BlockInputError(
            _EXPERTS, f"there is no process group {group!r}", "Pass the group_name of an initialised process group"
        ) from error


def _transform(up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor) -> tuple[Pair, Pair]:
    """Weights in the kernel's order, made once for as long as they do not change."""
    tensors = (up, up_scale, down, down_scale)
    key = tuple(value for t in tensors for value in (t.untyped_storage()._cdata, int(t.storage_offset())))
    versions = tuple(0 if t.is_inference() else t._version for t in tensors)
    known = _transformed.get(key)
    if known is not None and known[1] == versions and not any(reference.expired() for reference in known[0]):
        return known[2]
    functions = load_kernel(NAME).functions
    num_experts, wide, size = up.shape[0], up.shape[1], down.shape[1]
    arrange = functions["transform_sf_into_required_layout"]
    up_sf = arrange(up_scale.float(), wide, size, recipe=(1, FP4_GROUP), num_groups=num_experts)
    down_sf = arrange(down_scale.float(), size, wide // 2, recipe=(1, FP4_GROUP), num_groups=num_experts)
    first, second = functions["transform_weights_for_mega_moe"]((up.contiguous(), up_sf), (down.contiguous(), down_sf))
    for made, weight in ((first[0], up), (second[0], down)):
        require_result(NAME, "transform_weights_for_mega_moe", made, weight)
    for stale in [k for k, (references, *_) in _transformed.items() if any(r.expired() for r in references)]:
        del _transformed[stale]
    _transformed[key] = [StorageWeakRef(t.untyped_storage()) for t in tensors], versions, (first, second)
    return first, second


def _buffer(ranks: Any, group: str, tokens: int, top_k: int, num_experts: int, size: int, inner: int) -> Any:
    key = (group, size, top_k, num_experts, inner)
    buffer = _buffers.get(key)
    if buffer is not None and buffer.num_max_tokens_per_rank >= tokens:
        return buffer
    if buffer is not None:
        # No rank may still read it.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        torch.distributed.barrier(group=ranks)
        _buffers.pop(key).destroy()
    _buffers[key] = load_kernel(NAME).functions["get_symm_buffer_for_mega_moe"](
        ranks,
        num_experts=num_experts,
        # A few sizes in all, so that growing batches do not allocate at every step.
        num_max_tokens_per_rank=1 << max(0, math.ceil(math.log2(max(tokens, 1)))),
        num_topk=top_k,
        hidden=size,
        intermediate_hidden=inner,
    )
    return _buffers[key]
