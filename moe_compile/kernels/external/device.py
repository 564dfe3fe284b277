"""Triton kernels around the grouped products of other projects. Importing this module imports triton.

The algorithm, for a product that wants each expert's rows to start at a multiple of A:

1. Pairs are in expert order already (`kernels/triton_moe`); from the experts' ends every program adds up for itself
   where the experts start once each is padded to a multiple of A.
2. `pad_kernel` copies each kept row from its token to its padded place. One program per block of rows and of columns;
   blocks without rows end at once, padding is never written.
3. Its first column of programs also writes each padded row's expert (-1 for padding), and each pair's padded row (-1
   for pairs that belong to no expert).
4. `place_kernel` is the same bookkeeping without padding, `combine_kernel` sums each token's rows by routing weight,
   `sum_rows_kernel` sums each expert's rows.

Legend: N pairs (t*K+k), E experts, M padded rows, D features. Bound by the bytes of the rows that are copied.
"""

import triton
import triton.language as tl


@triton.jit
def pad_kernel(
    rows,
    order,
    ends,
    padded,
    layout,
    position,
    padded_ends,
    N,
    M,
    D,
    TOP_K,
    stride_row,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    A: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    experts = tl.arange(0, E_POW2)
    end_E = tl.load(ends + experts, mask=experts < E, other=0)
    start_E = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    size_E = tl.where(experts < E, (end_E - start_E + A - 1) // A * A, 0)
    last_E = tl.cumsum(size_E, 0)
    block = tl.program_id(0)
    first = block * BM
    expert = tl.sum((last_E <= first).to(tl.int32), 0)
    mine = experts == expert
    start = tl.sum(tl.where(mine, start_E, 0), 0)
    end = tl.sum(tl.where(mine, end_E, 0), 0)
    begin = tl.sum(tl.where(mine, last_E - size_E, 0), 0)
    slot = first + tl.arange(0, BM)
    row = start + slot - begin
    inside = (row < end) & (expert < E)
    if tl.program_id(1) == 0:
        tl.store(layout + slot, tl.where(inside, expert, -1), mask=slot < M)
        pair = tl.load(order + row, mask=inside, other=0)
        tl.store(position + pair, slot, mask=inside)
        # What belongs to no expert stands at the end of the order.
        kept = tl.sum(tl.where(experts == E - 1, end_E, 0), 0)
        dropped = (slot >= kept) & (slot < N)
        pair = tl.load(order + slot, mask=dropped, other=0)
        tl.store(position + pair, -1, mask=dropped)
        if block == 0:
            tl.store(padded_ends + experts, last_E, mask=experts < E)
    if tl.sum(inside.to(tl.int32), 0) == 0:
        return
    source = tl.load(order + row, mask=inside, other=0) // TOP_K
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = inside[:, None] & (column < D)[None, :]
    values = tl.load(rows + source.to(tl.int64)[:, None] * stride_row + column[None, :], mask=mask, other=0.0)
    target = padded + slot.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(target, values.to(padded.dtype.element_ty), mask=mask)


@triton.jit
def place_kernel(
    order, ends, tokens, position, bounds, N, TOP_K, E: tl.constexpr, E_POW2: tl.constexpr, B: tl.constexpr
):
    kept = tl.load(ends + E - 1)
    row = tl.program_id(0) * B + tl.arange(0, B)
    pair = tl.load(order + row, mask=row < N, other=0)
    tl.store(tokens + row, pair // TOP_K, mask=row < N)
    tl.store(position + pair, tl.where(row < kept, row, -1), mask=row < N)
    if tl.program_id(0) == 0:
        experts = tl.arange(0, E_POW2)
        tl.store(bounds + experts + 1, tl.load(ends + experts, mask=experts < E, other=0), mask=experts < E)
        tl.store(bounds + experts, tl.zeros([E_POW2], tl.int32), mask=experts < 1)


@triton.jit
def combine_kernel(rows, weights, position, out, D, K: tl.constexpr, WEIGHTED: tl.constexpr, BD: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros([BD], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(position + token * K + k).to(tl.int64)
        mask = (column < D) & (row >= 0)
        value = tl.load(rows + row * D + column, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * K + k).to(tl.float32)
        total += tl.where(mask, value, 0.0)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=column < D)


@triton.jit
def sum_rows_kernel(rows, ends, out, D, BM: tl.constexpr, BD: tl.constexpr):
    expert = tl.program_id(0)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    end = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    total = tl.zeros([BD], tl.float32)
    for first in range(start, end, BM):
        row = first + tl.arange(0, BM)
        mask = (row < end)[:, None] & (column < D)[None, :]
        values = tl.load(rows + row.to(tl.int64)[:, None] * D + column[None, :], mask=mask, other=0.0)
        total += tl.sum(values.to(tl.float32), 0)
    tl.store(out + expert.to(tl.int64) * D + column, total.to(out.dtype.element_ty), mask=column < D)


@triton.jit
def quantise_kernel(rows, layout, out, scales, M, D, POW2: tl.constexpr, BM: tl.constexpr, G: tl.constexpr):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    kept = tl.load(layout + row, mask=row < M, other=-1) >= 0
    if tl.sum(kept.to(tl.int32), 0) == 0:
        return
    group = tl.program_id(1)
    column = group * G + tl.arange(0, G)
    offset = row.to(tl.int64)[:, None] * D + column[None, :]
    mask = kept[:, None] & (column < D)[None, :]
    value = tl.load(rows + offset, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1), 1e-4) / 448.0
    if POW2:
        scale = tl.exp2(tl.ceil(tl.log2(scale)))
    tl.store(out + offset, (value / scale[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(scales + row.to(tl.int64) * tl.cdiv(D, G) + group, scale, mask=kept)
