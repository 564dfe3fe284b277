"""Triton kernels of the `triton` experts backend. Importing this module imports triton; nothing else here does.

The algorithm:

1. `count_kernel`: each chunk of pairs counts its pairs per expert.
2. `scan_kernel` adds up what the chunks before each chunk counted; `place_kernel` writes each chunk's pairs where they
   belong in expert order. The sort is stable, and no value is read on the host.
3. `grouped_linear_kernel`: one program per block of rows of one expert and block of output features. Which expert
   follows from the row ends, which every program adds up for itself, so the grid depends on sizes alone. The rows are
   gathered from the tokens on the way in, or scattered to their pairs on the way out, instead of being copied.
4. Bias in the epilogue, accumulation in fp32.

Legend: N pairs (t*K+k), E experts, C pairs in a chunk. Ends are int32 (E,); order is int32 (N,), sorted position to
pair, where pairs whose id is no expert's come last. Bound by reading the weights of the experts that were hit up to
about N/E = 64 rows per expert, by the tensor cores beyond.
"""

import triton
import triton.language as tl


@triton.jit
def _bucket(ids, pairs, N, E: tl.constexpr):
    """The expert of each pair; E for one that belongs to none, -1 past the last pair."""
    id_C = tl.load(ids + pairs, mask=pairs < N, other=0)
    id_C = tl.where((id_C < 0) | (id_C >= E), E, id_C)
    return tl.where(pairs < N, id_C, -1).to(tl.int32)


@triton.jit
def count_kernel(ids, counts, N, E: tl.constexpr, E_POW2: tl.constexpr, C: tl.constexpr):
    chunk = tl.program_id(0)
    pairs = chunk * C + tl.arange(0, C)
    experts = tl.arange(0, E_POW2)
    hit_CE = _bucket(ids, pairs, N, E)[:, None] == experts[None, :]
    tl.store(counts + chunk * E_POW2 + experts, tl.sum(hit_CE.to(tl.int32), 0))


@triton.jit
def scan_kernel(counts, totals, NUM_CHUNKS, E_POW2: tl.constexpr, B: tl.constexpr, R: tl.constexpr):
    experts = tl.program_id(0) * B + tl.arange(0, B)
    running_B = tl.zeros([B], tl.int32)
    for first in range(0, NUM_CHUNKS, R):
        chunk = first + tl.arange(0, R)
        pointers = counts + chunk[:, None] * E_POW2 + experts[None, :]
        count_RB = tl.load(pointers, mask=chunk[:, None] < NUM_CHUNKS, other=0)
        before_RB = tl.cumsum(count_RB, 0) - count_RB + running_B[None, :]
        tl.store(pointers, before_RB, mask=chunk[:, None] < NUM_CHUNKS)
        running_B += tl.sum(count_RB, 0)
    tl.store(totals + experts, running_B)


@triton.jit
def place_kernel(ids, before, totals, order, ends, N, E: tl.constexpr, E_POW2: tl.constexpr, C: tl.constexpr):
    chunk = tl.program_id(0)
    experts = tl.arange(0, E_POW2)
    total_E = tl.load(totals + experts)
    end_E = tl.cumsum(total_E, 0)
    if chunk == 0:
        tl.store(ends + experts, end_E, mask=experts < E)
    first_E = end_E - total_E + tl.load(before + chunk * E_POW2 + experts)
    pairs = chunk * C + tl.arange(0, C)
    hit_CE = (_bucket(ids, pairs, N, E)[:, None] == experts[None, :]).to(tl.int32)
    rank_CE = tl.cumsum(hit_CE, 0) - 1
    position_C = tl.sum(hit_CE * (rank_CE + first_E[None, :]), 1)
    tl.store(order + position_C, pairs, mask=pairs < N)


@triton.jit
def grouped_linear_kernel(
    rows,
    order,
    ends,
    weight,
    bias,
    out,
    SIZE_IN,
    SIZE_OUT,
    TOP_K,
    stride_row,
    stride_e,
    stride_o,
    stride_i,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_I: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Which block of rows: count the blocks of every expert.
    experts = tl.arange(0, E_POW2)
    end_E = tl.load(ends + experts, mask=experts < E, other=0)
    start_E = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    blocks_E = (end_E - start_E + BM - 1) // BM
    blocks_E = tl.where(experts < E, blocks_E, 0)
    last_E = tl.cumsum(blocks_E, 0)
    num_m = tl.sum(blocks_E, 0)

    # GROUP row blocks share each block of weights while it is in L2.
    num_n = tl.cdiv(SIZE_OUT, BN)
    pid = tl.program_id(0)
    first_m = pid // (GROUP * num_n) * GROUP
    if first_m >= num_m:
        return
    size_m = tl.minimum(num_m - first_m, GROUP)
    in_group = pid % (GROUP * num_n)
    m = first_m + in_group % size_m
    n = in_group // size_m
    if n >= num_n:
        return

    expert = tl.sum((last_E <= m).to(tl.int32), 0)
    mine = experts == expert
    row = tl.sum(tl.where(mine, start_E + (m - last_E + blocks_E) * BM, 0), 0) + tl.arange(0, BM)
    inside = row < tl.sum(tl.where(mine, end_E, 0), 0)
    pair = row
    if GATHER or SCATTER:
        pair = tl.load(order + row, mask=inside, other=0)
    source = row
    if GATHER:
        source = pair // TOP_K
    column = n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row_ptrs = rows + source.to(tl.int64)[:, None] * stride_row + k[None, :]
    weight_ptrs = (
        weight
        + expert.to(tl.int64) * stride_e
        + column.to(tl.int64)[None, :] * stride_o
        + k.to(tl.int64)[:, None] * stride_i
    )
    kept = column < SIZE_OUT
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, SIZE_IN, BK):
        if EVEN_I:
            a = tl.load(row_ptrs, mask=inside[:, None], other=0.0)
            b = tl.load(weight_ptrs, mask=kept[None, :], other=0.0)
        else:
            a = tl.load(row_ptrs, mask=inside[:, None] & (k[None, :] < SIZE_IN - first), other=0.0)
            b = tl.load(weight_ptrs, mask=kept[None, :] & (k[:, None] < SIZE_IN - first), other=0.0)
        acc = tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)
        row_ptrs += BK
        weight_ptrs += BK * stride_i
    if HAS_BIAS:
        acc += tl.load(bias + expert.to(tl.int64) * SIZE_OUT + column, mask=kept, other=0.0).to(tl.float32)[None, :]
    target = row
    if SCATTER:
        target = pair
    out_ptrs = out + target.to(tl.int64)[:, None] * SIZE_OUT + column[None, :]
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=inside[:, None] & kept[None, :])
