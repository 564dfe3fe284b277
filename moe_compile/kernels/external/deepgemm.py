"""DeepGEMM's grouped bf16 product, as opaque ops: `moe_deepgemm::dispatch`, `::pad`, `::grouped_gemm`, `::combine`.

    padded, layout, position, ends = dispatch(x, ids, E, A)      sort pairs, copy tokens to aligned places
    out[m] = padded[m] @ weight[layout[m]]                       for every m with layout[m] >= 0
    y[t] = sum_k weights[t, k] * out[position[t, k]]             combine

DeepGEMM wants each expert's rows to start at a multiple of its alignment A (128), so that no tile holds rows of two
experts. How many rows that takes depends on the routing; the tensors have room for any (M rows), and rows with layout
-1 are neither read nor written. So shapes depend on sizes alone, nothing is read on the host, and what was recorded as
a CUDA graph replays with any routing. Weights are passed as they are stored: (E, out, in) to the kernel's "nt" form,
(E, in, out) to "nn".

Quantised weights take `::quantised_gemm`, which rounds the rows to FP8 first.

Legend: M padded rows, N pairs, E experts, D model, I input and O output features.
"""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from moe_compile.errors import BlockInputError, KernelResultError
from moe_compile.kernels.external.loading import forget_kernel, load_kernel, require_result
from moe_compile.kernels.external.rows import combine_rows, pad_rows, padded_size, quantise_rows, sort_pairs
from moe_compile.kernels.quantised_linear import FP4_GROUP, FP8_BLOCK

NAME = "deepgemm"
_DISPATCH, _PAD, _GEMM, _COMBINE = (f"moe_deepgemm::{op}" for op in ("dispatch", "pad", "grouped_gemm", "combine"))
_QUANTISED_GEMM = "moe_deepgemm::quantised_gemm"
_REFERENCE = "CompositeExplicitAutograd"

# AOTAutograd's cache keys an op by its name and arguments; an edit has to make another key.
DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]

torch.library.define(
    _DISPATCH,
    "(Tensor x, Tensor ids, int num_experts, int alignment, ScalarType dtype, str digest)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    _PAD,
    "(Tensor rows, Tensor offsets, int alignment, ScalarType dtype, str digest) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    _GEMM, "(Tensor padded, Tensor weight, Tensor layout, Tensor ends, bool transposed, str digest) -> Tensor"
)
torch.library.define(_COMBINE, "(Tensor rows, Tensor weights, Tensor position, ScalarType dtype, str digest) -> Tensor")
torch.library.define(
    _QUANTISED_GEMM, "(Tensor padded, Tensor weight, Tensor scale, Tensor layout, Tensor ends, str digest) -> Tensor"
)


def alignment() -> int:
    """A, as the loaded kernel says.

    Raises:
        RequirementError, KernelLoadError: if the kernel cannot be loaded.
        KernelResultError: if it answers with anything but a positive number.
    """
    symbol = "get_mk_alignment_for_contiguous_layout"
    found = load_kernel(NAME).functions[symbol]()
    if not isinstance(found, int) or found <= 0 or found % 16:
        forget_kernel(NAME)
        raise KernelResultError(
            f"{symbol} of {NAME}", f"it returned {found!r}", "Use another build; a positive multiple of 16 is needed"
        )
    return found


def dispatch(x_TD: Tensor, ids_TK: Tensor, num_experts: int, align: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Sorts pairs by expert and copies each token to its pairs' aligned places.

    Args:
        x_TD: (T, D), floating.
        ids_TK: (T, K) int32 or int64; ids outside [0, E) are left out.
        num_experts: E.
        align: A.
        dtype: of the copies, the weights' dtype.

    Returns:
        padded (M, D), layout (M,) int32, position (N,) int32 and padded ends (E,) int32, as `rows.pad_rows` has them.
    """
    return torch.ops.moe_deepgemm.dispatch(x_TD, ids_TK, num_experts, align, dtype, DIGEST)


def pad(rows_ND: Tensor, offsets_E: Tensor, align: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Copies rows that are in expert order to aligned places; as `dispatch`, with position (N,) per row."""
    return torch.ops.moe_deepgemm.pad(rows_ND, offsets_E, align, dtype, DIGEST)


def grouped_gemm(padded_MI: Tensor, weight: Tensor, layout_M: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    """Multiplies each padded row by its expert's weight.

    Args:
        padded_MI: (M, I) bf16.
        weight: (E, O, I), or (E, I, O) when transposed; bf16, as stored.
        layout_M: (M,) int32.
        ends_E: (E,) int32, padded ends.
        transposed: layout of the weight.

    Returns:
        (M, O) bf16; rows with layout -1 are not written.
    """
    return torch.ops.moe_deepgemm.grouped_gemm(padded_MI, weight, layout_M, ends_E, transposed, DIGEST)


def quantised_gemm(padded_MI: Tensor, weight: Tensor, scale: Tensor, layout_M: Tensor, ends_E: Tensor) -> Tensor:
    """Rounds each padded row to FP8 and multiplies it by its expert's FP8 or FP4 weight.

    Args:
        padded_MI: (M, I), floating.
        weight: (E, O, I) float8_e4m3fn, or (E, O, I / 2) int8, two FP4 values each.
        scale: (E, O or O / 128, I / 128 or I / 32) float32 or float8_e8m0fnu.
        layout_M: (M,) int32.
        ends_E: (E,) int32, padded ends.

    Returns:
        (M, O) bf16; rows with layout -1 are not written.
    """
    return torch.ops.moe_deepgemm.quantised_gemm(padded_MI, weight, scale, layout_M, ends_E, DIGEST)


def combine(rows_MO: Tensor, weights_TK: Tensor, position_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums each token's padded rows by routing weight, in float32, with one cast at the end.

    Args:
        rows_MO: (M, O), contiguous.
        weights_TK: (T, K).
        position_N: (N,) int32, each pair's padded row; -1 adds nothing.
        dtype: of the result.

    Returns:
        (T, O).
    """
    return torch.ops.moe_deepgemm.combine(rows_MO, weights_TK, position_N, dtype, DIGEST)


@torch.library.impl(_DISPATCH, _REFERENCE)
def _dispatch(
    x: Tensor, ids: Tensor, num_experts: int, align: int, dtype: torch.dtype, digest: str
) -> tuple[Tensor, ...]:
    order, ends = sort_pairs(ids, num_experts)
    return pad_rows(x, order, ends, top_k=max(ids.shape[1], 1), alignment=align, dtype=dtype)


@torch.library.register_fake(_DISPATCH)
def _dispatch_fake(
    x: Tensor, ids: Tensor, num_experts: int, align: int, dtype: torch.dtype, digest: str
) -> tuple[Tensor, ...]:
    return _fake_padded(x, ids.shape[0] * ids.shape[1], num_experts, align, dtype)


@torch.library.impl(_PAD, _REFERENCE)
def _pad(rows: Tensor, offsets: Tensor, align: int, dtype: torch.dtype, digest: str) -> tuple[Tensor, ...]:
    order = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    return pad_rows(rows, order, offsets, top_k=1, alignment=align, dtype=dtype)


@torch.library.register_fake(_PAD)
def _pad_fake(rows: Tensor, offsets: Tensor, align: int, dtype: torch.dtype, digest: str) -> tuple[Tensor, ...]:
    return _fake_padded(rows, rows.shape[0], offsets.shape[0], align, dtype)


def _fake_padded(rows: Tensor, n: int, num_experts: int, align: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    m = padded_size(n, num_experts, align)
    lengths = (m, n, num_experts)
    return rows.new_empty(m, rows.shape[1], dtype=dtype), *(rows.new_empty(k, dtype=torch.int32) for k in lengths)


def _out_features(padded: Tensor, weight: Tensor, transposed: bool) -> int:
    size_in, size_out = (weight.shape[1], weight.shape[2]) if transposed else (weight.shape[2], weight.shape[1])
    if padded.shape[1] != size_in or not padded.dtype == weight.dtype == torch.bfloat16:
        raise BlockInputError(
            _GEMM,
            f"got rows {tuple(padded.shape)} {padded.dtype} and weight {tuple(weight.shape)} {weight.dtype}",
            "Pass bfloat16 rows (M, I) and weights (E, O, I), or (E, I, O) with transposed=True",
        )
    return size_out


@torch.library.impl(_GEMM, _REFERENCE)
def _grouped_gemm(
    padded: Tensor, weight: Tensor, layout: Tensor, ends: Tensor, transposed: bool, digest: str
) -> Tensor:
    out = padded.new_empty(padded.shape[0], _out_features(padded, weight, transposed))
    if padded.shape[0] == 0:
        return out
    symbol = f"m_grouped_bf16_gemm_{'nn' if transposed else 'nt'}_contiguous"
    function = load_kernel(NAME).functions[symbol]
    if padded.is_cuda and torch.cuda.get_device_capability(padded.device)[0] >= 10:
        returned = function(padded, weight, out, ends, use_psum_layout=True)
    else:
        returned = function(padded, weight, out, layout)
    # The kernel writes into its third argument; one that returns something has to return that.
    return out if returned is None else require_result(NAME, symbol, returned, out)


@torch.library.register_fake(_GEMM)
def _grouped_gemm_fake(
    padded: Tensor, weight: Tensor, layout: Tensor, ends: Tensor, transposed: bool, digest: str
) -> Tensor:
    return padded.new_empty(padded.shape[0], _out_features(padded, weight, transposed))


@torch.library.impl(_QUANTISED_GEMM, _REFERENCE)
def _quantised_gemm(padded: Tensor, weight: Tensor, scale: Tensor, layout: Tensor, ends: Tensor, digest: str) -> Tensor:
    out = _quantised_gemm_fake(padded, weight, scale, layout, ends, digest)
    if padded.shape[0] == 0:
        return out
    symbol = "m_grouped_fp8_fp4_gemm_nt_contiguous"
    function = load_kernel(NAME).functions[symbol]
    blackwell = padded.is_cuda and torch.cuda.get_device_capability(padded.device)[0] >= 10
    group = FP4_GROUP if weight.dtype == torch.int8 else FP8_BLOCK
    rows = quantise_rows(padded.contiguous(), layout, group, power_of_two=blackwell)
    # UE8M0 is exact as float32. SM90 reads that; on SM100 the kernel packs it again, exactly, as all are powers of two.
    weights = weight, scale.float().contiguous()
    per_row = {"recipe": (1, 1, group)} if scale.shape[1] == weight.shape[1] else {}
    if blackwell:
        returned = function(rows, weights, out, ends, use_psum_layout=True, **per_row)
    else:
        returned = function(rows, weights, out, layout, **per_row)
    return out if returned is None else require_result(NAME, symbol, returned, out)


@torch.library.register_fake(_QUANTISED_GEMM)
def _quantised_gemm_fake(
    padded: Tensor, weight: Tensor, scale: Tensor, layout: Tensor, ends: Tensor, digest: str
) -> Tensor:
    return padded.new_empty(padded.shape[0], weight.shape[1], dtype=torch.bfloat16)


@torch.library.impl(_COMBINE, _REFERENCE)
def _combine(rows: Tensor, weights: Tensor, position: Tensor, dtype: torch.dtype, digest: str) -> Tensor:
    return combine_rows(rows, weights, position, weights.shape[1], dtype)


@torch.library.register_fake(_COMBINE)
def _combine_fake(rows: Tensor, weights: Tensor, position: Tensor, dtype: torch.dtype, digest: str) -> Tensor:
    return rows.new_empty(weights.shape[0], rows.shape[1], dtype=dtype)
