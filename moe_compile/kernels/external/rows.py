"""Bookkeeping of rows around other projects' grouped products: on CUDA by Triton, elsewhere by plain torch.

Called inside opaque ops only. Nothing here reads a value on the host.
"""

import itertools

import torch
from torch import Tensor


def sort_pairs(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts pairs by expert, stably.

    Args:
        ids_TK: expert ids (T, K), int32 or int64; ids outside [0, E) are left out.
        num_experts: E.

    Returns:
        order (N,) int32, sorted position -> pair t*K+k, with the pairs that were left out last; and ends (E,) int32.
    """
    if ids_TK.is_cuda:
        from moe_compile.kernels.triton_moe.ops import route  # imports triton

        return route(ids_TK, num_experts)
    ids_N = ids_TK.reshape(-1).long()
    outside_N = (ids_N < 0) | (ids_N >= num_experts)
    sorted_N, order_N = ids_N.masked_fill(outside_N, num_experts).sort(stable=True)
    ends_E = torch.searchsorted(sorted_N, torch.arange(num_experts, device=ids_TK.device), right=True)
    return order_N.int(), ends_E.int()


def padded_size(num_rows: int | torch.SymInt, num_experts: int, alignment: int) -> int | torch.SymInt:
    """Rows that are enough for any routing, once each expert's are padded to a multiple of the alignment."""
    hit = torch.sym_min(num_rows, num_experts)
    return (num_rows + hit * (alignment - 1)) // alignment * alignment


def pad_rows(
    rows: Tensor, order_N: Tensor, ends_E: Tensor, *, top_k: int, alignment: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copies rows into expert order, each expert's starting at a multiple of the alignment.

    Args:
        rows: (N / top_k, D): the tokens, or with `top_k` 1 rows that `order_N` indexes themselves.
        order_N: (N,) int32, sorted position -> pair.
        ends_E: (E,) int32.
        top_k: pairs per row.
        alignment: A.
        dtype: of the copies.

    Returns:
        padded (M, D), whose padding is not written; layout (M,) int32, each padded row's expert or -1; position (N,)
        int32, each pair's padded row or -1; padded ends (E,) int32.
    """
    n, num_experts, size = order_N.shape[0], ends_E.shape[0], rows.shape[1]
    m = int(padded_size(n, num_experts, alignment))
    padded = rows.new_empty(m, size, dtype=dtype)
    layout, position, padded_ends = (order_N.new_empty(length) for length in (m, n, num_experts))
    if n == 0:
        return padded, layout, position, padded_ends.zero_()
    if rows.is_cuda:
        from moe_compile.kernels.external import device

        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        block_m, block_d = min(alignment, 16), 1024
        device.pad_kernel[(m // block_m, (size + block_d - 1) // block_d)](
            rows, order_N, ends_E, padded, layout, position, padded_ends, n, m, size, top_k, rows.stride(0),
            num_experts, _power_of_two(num_experts), alignment, block_m, block_d, num_warps=8,
        )  # fmt: skip
        return padded, layout, position, padded_ends
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1)).long()
    size_E = (counts_E + alignment - 1) // alignment * alignment
    begin_E = size_E.cumsum(0) - size_E
    kept = int(ends_E[-1])
    expert_N = torch.repeat_interleave(torch.arange(num_experts, device=rows.device), counts_E)
    slot_N = torch.arange(kept, device=rows.device) + (begin_E - (ends_E - counts_E))[expert_N]
    pairs = order_N.long()
    padded[slot_N] = rows[pairs[:kept] // top_k].to(dtype)
    layout.fill_(-1)[slot_N] = expert_N.int()
    position.fill_(-1)[pairs[:kept]] = slot_N.int()
    return padded, layout, position, size_E.cumsum(0).int()


def place_rows(order_N: Tensor, ends_E: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows come from and go to, without padding.

    Returns:
        tokens (N,) int32 of the sorted rows; position (N,) int32, each pair's sorted row, -1 for pairs that belong to
        no expert; bounds (E + 1,) int32, starting with 0.
    """
    n, num_experts = order_N.shape[0], ends_E.shape[0]
    if order_N.is_cuda and n:
        from moe_compile.kernels.external import device

        tokens, position = torch.empty_like(order_N), torch.empty_like(order_N)
        bounds = ends_E.new_empty(num_experts + 1)
        device.place_kernel[((n + 1023) // 1024,)](
            order_N, ends_E, tokens, position, bounds, n, top_k, num_experts, _power_of_two(num_experts), 1024
        )
        return tokens, position, bounds
    index_N = torch.arange(n, device=order_N.device, dtype=torch.int32)
    position = torch.empty_like(order_N)
    position[order_N.long()] = torch.where(index_N < ends_E[-1], index_N, -1)
    return order_N // max(top_k, 1), position, torch.nn.functional.pad(ends_E, (1, 0))


def combine_rows(rows: Tensor, weights_TK: Tensor | None, position_N: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """Sums each token's rows by routing weight, in float32, with one cast at the end.

    Args:
        rows: (M, D), contiguous.
        weights_TK: (T, K); None sums the rows as they are.
        position_N: (N,) int32, each pair's row; -1 adds nothing.
        top_k: K.
        dtype: of the result.

    Returns:
        (T, D).
    """
    num_tokens, size = position_N.shape[0] // max(top_k, 1), rows.shape[1]
    if rows.is_cuda and position_N.shape[0]:
        from moe_compile.kernels.external import device

        out = rows.new_empty(num_tokens, size, dtype=dtype)
        weights = rows if weights_TK is None else weights_TK.contiguous()
        block = 1024
        device.combine_kernel[(num_tokens, (size + block - 1) // block)](
            rows, weights, position_N, out, size, top_k, weights_TK is not None, block
        )
        return out
    kept = (position_N >= 0).unsqueeze(1)
    picked = torch.where(kept, rows[position_N.clamp(min=0).long()].float(), 0) if rows.shape[0] else rows.float()
    picked = picked.view(num_tokens, top_k, size)
    return (picked if weights_TK is None else picked * weights_TK.float().unsqueeze(-1)).sum(1).to(dtype)


def sum_expert_rows(rows: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums each expert's rows, in float32: (N, D) and (E,) -> (E, D); zero for experts without rows."""
    num_experts, size = ends_E.shape[0], rows.shape[1]
    if rows.is_cuda:
        from moe_compile.kernels.external import device

        out = rows.new_empty(num_experts, size, dtype=dtype)
        block = 128
        device.sum_rows_kernel[(num_experts, (size + block - 1) // block)](rows, ends_E, out, size, 64, block)
        return out
    ends = [0, *ends_E.tolist()]
    return torch.stack([rows[a:b].float().sum(0) for a, b in itertools.pairwise(ends)]).to(dtype)


def quantise_rows(rows: Tensor, layout_M: Tensor, group: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Rounds rows to FP8 (e4m3), with one scale per row and group of features, which is what "dynamic" means.

    Args:
        rows: (M, D), contiguous.
        layout_M: (M,) int32; rows with -1 are not written.
        group: features that share a scale.
        power_of_two: round scales up to powers of two, which UE8M0 can store.

    Returns:
        (M, D) float8_e4m3fn and (M, D / group) float32.
    """
    m, size = rows.shape
    scales = rows.new_empty(m, (size + group - 1) // group, dtype=torch.float32)
    if rows.is_cuda and m:
        from moe_compile.kernels.external import device

        out = rows.new_empty(m, size, dtype=torch.float8_e4m3fn)
        device.quantise_kernel[((m + 15) // 16, scales.shape[1])](
            rows, layout_M, out, scales, m, size, power_of_two, 16, group
        )
        return out, scales
    values = torch.nn.functional.pad(rows.float(), (0, -size % group)).view(m, -1, group)
    scales = values.abs().amax(-1).clamp(min=1e-4) / 448
    scales = torch.exp2(torch.ceil(torch.log2(scales))) if power_of_two else scales
    quantised = (values / scales.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return quantised.view(m, -1)[:, :size].contiguous(), scales


def _power_of_two(value: int) -> int:
    return max(16, 1 << (value - 1).bit_length())
