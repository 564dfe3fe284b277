"""The ops of the `triton` experts backend, `moe_triton::route` and `moe_triton::grouped_linear`.

Both are `triton_op`s: the compiler sees through them to the kernels, so that launches come from generated code. Launch
parameters follow from sizes alone. Nothing reads a value on the host: a graph can be recorded as a CUDA graph and
replayed with any routing.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from moe_compile.kernels.triton_moe import device
from moe_compile.kernels.triton_moe.tiles import choose_tiles

# What is compiled holds the ops' bodies, not their names: AOTAutograd's cache must see an edit as another key.
_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]

_SCAN_CHUNKS = 256
_SCAN_EXPERTS = 16


@triton_op("moe_triton::route", mutates_args={})
def _route(ids: Tensor, num_experts: int, digest: str) -> tuple[Tensor, Tensor]:
    ids_N = ids.reshape(-1)
    n, width = ids_N.shape[0], _power_of_two(num_experts + 1)  # one more for ids that are no expert's
    order_N = torch.empty(n, dtype=torch.int32, device=ids.device)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    if n == 0:
        return order_N, ends_E.zero_()
    chunk = max(16, 16384 // width)
    num_chunks = (n + chunk - 1) // chunk
    counts = torch.empty(num_chunks, width, dtype=torch.int32, device=ids.device)
    totals = torch.empty(width, dtype=torch.int32, device=ids.device)
    _launcher(device.count_kernel)[(num_chunks,)](ids_N, counts, n, num_experts, width, chunk)
    _launcher(device.scan_kernel)[(width // _SCAN_EXPERTS,)](
        counts, totals, num_chunks, width, _SCAN_EXPERTS, _SCAN_CHUNKS
    )
    _launcher(device.place_kernel)[(num_chunks,)](ids_N, counts, totals, order_N, ends_E, n, num_experts, width, chunk)
    return order_N, ends_E


@triton_op("moe_triton::grouped_linear", mutates_args={})
def _grouped_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    ends: Tensor,
    transposed: bool,
    gather: int,
    scatter: bool,
    digest: str,
) -> Tensor:
    n, num_experts = order.shape[0], weight.shape[0]
    size_in, size_out = rows.shape[1], weight.shape[2 if transposed else 1]
    out_NO = torch.empty(n, size_out, dtype=weight.dtype, device=rows.device)
    if n == 0:
        return out_NO
    stride_in, stride_out = (weight.stride(1), weight.stride(2)) if transposed else (weight.stride(2), weight.stride(1))
    tiles = choose_tiles(n, num_experts, weight.itemsize)
    # Each expert's last block of rows may be partly empty.
    num_m = (n + tiles.m - 1) // tiles.m + min(num_experts, n)
    _launcher(device.grouped_linear_kernel)[(num_m * ((size_out + tiles.n - 1) // tiles.n),)](
        rows,
        order,
        ends,
        weight,
        weight if bias is None else bias,
        out_NO,
        size_in,
        size_out,
        max(gather, 1),
        rows.stride(0),
        weight.stride(0),
        stride_out,
        stride_in,
        num_experts,
        _power_of_two(num_experts),
        gather > 0,
        scatter,
        bias is not None,
        size_in % tiles.k == 0,
        "tf32" if weight.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee",
        tiles.m,
        tiles.n,
        tiles.k,
        tiles.group,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out_NO


def _launcher(kernel: Any) -> Any:
    """What `kernel[grid](...)` is called on: seen by the compiler, unless Triton's interpreter runs it."""
    return wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel


def _power_of_two(value: int) -> int:
    return max(16, 1 << (value - 1).bit_length())


def route(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts pairs by expert, stably.

    Args:
        ids_TK: expert ids (T, K), int32 or int64; ids outside [0, E) are left out.
        num_experts: E.

    Returns:
        order (N,) int32, sorted position -> pair t*K+k, with the pairs that were left out last; and ends (E,) int32.
    """
    return _route(ids_TK, num_experts, DIGEST)


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order_N: Tensor,
    ends_E: Tensor,
    *,
    transposed: bool,
    gather: int = 0,
    scatter: bool = False,
) -> Tensor:
    """Multiplies each expert's rows by its weight, in fp32, and casts once to the weight's dtype.

    Args:
        rows: (N, I) in expert order, or the tokens (T, I) with `gather`; floating, contiguous in the last dimension.
        weight: (E, O, I), or (E, I, O) when transposed; any strides.
        bias: (E, O), contiguous, or None.
        order_N: (N,) int32, from `route`.
        ends_E: (E,) int32, from `route`.
        transposed: layout of the weight.
        gather: K, if the rows are to be taken from the tokens; 0 if they stand in expert order.
        scatter: write each row to its pair t*K+k instead of to its place in expert order.

    Returns:
        (N, O) in the weight's dtype. What belongs to no expert (rows past the last end, or pairs that were left out) is
        not written.
    """
    return _grouped_linear(rows, weight, bias, order_N, ends_E, transposed, gather, scatter, DIGEST)
