"""The ops around kernels of other projects: contracts by `opcheck`, padding by hand, and by random routings."""

import pytest
import torch
from external_kernels import DEEP_GEMM, SONIC_MOE, import_package, write_package
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import DEVICES
from torch.library import opcheck

from moe_compile.errors import BlockInputError
from moe_compile.external import register_loader
from moe_compile.kernels.external import deepgemm, sonicmoe
from moe_compile.kernels.external.rows import (
    combine_rows,
    pad_rows,
    padded_size,
    place_rows,
    sort_pairs,
    sum_expert_rows,
)

BF16 = torch.bfloat16
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")


@pytest.fixture
def stand_ins(tmp_path):
    for name, sources in (("deepgemm", DEEP_GEMM), ("sonicmoe", SONIC_MOE)):
        module = import_package(write_package(tmp_path / name, sources), f"stand_in_ops_{name}")
        register_loader(name, lambda module=module: module)
    yield
    for name in ("deepgemm", "sonicmoe"):
        register_loader(name, None)


def normal(*shape, grad=False):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16).requires_grad_(grad)


def ids(tokens, experts=4):
    return torch.randint(-1, experts + 1, (tokens, 2), generator=torch.Generator().manual_seed(tokens))


def test_deepgemm_ops_keep_their_contract(stand_ins):
    x, weight = normal(9, 16), normal(4, 24, 16)
    dispatch = (x, ids(9), 4, 16, BF16, deepgemm.DIGEST)
    # What stands in padding is uninitialised, so two runs may differ there.
    opcheck(torch.ops.moe_deepgemm.dispatch, dispatch, test_utils=CHECKS[:2])
    opcheck(
        torch.ops.moe_deepgemm.pad,
        (x, torch.tensor([2, 5, 5, 8], dtype=torch.int32), 16, BF16, deepgemm.DIGEST),
        test_utils=CHECKS[:2],
    )
    padded, layout, position, ends = deepgemm.dispatch(x, ids(9), 4, 16, BF16)
    padded = padded.nan_to_num(0)
    opcheck(
        torch.ops.moe_deepgemm.grouped_gemm,
        (padded, weight, layout, ends, False, deepgemm.DIGEST),
        test_utils=CHECKS[:2],
    )
    rows = normal(padded.shape[0], 24)
    opcheck(torch.ops.moe_deepgemm.combine, (rows, torch.rand(9, 2), position, torch.float32, deepgemm.DIGEST))


@pytest.mark.parametrize("transposed", [False, True])
def test_sonicmoe_ops_keep_their_contract(stand_ins, transposed):
    up, down = normal(4, 16, 48, grad=True), normal(4, 24, 16, grad=True)
    up_bias, down_bias = normal(4, 48, grad=True), normal(4, 16, grad=True)
    if not transposed:
        up, down = (w.detach().transpose(1, 2).contiguous().requires_grad_() for w in (up, down))
    kept = torch.randint(0, 4, (9, 2), generator=torch.Generator().manual_seed(0))
    weights = torch.rand(9, 2, requires_grad=True)
    block = (normal(9, 16, grad=True), kept, weights, up, up_bias, down, down_bias)
    layout = ("silu", not transposed, transposed)
    opcheck(torch.ops.moe_sonicmoe.experts, (*block, *layout, torch.float32, True, False, sonicmoe.DIGEST))
    ends = torch.tensor([2, 5, 5, 9], dtype=torch.int32)
    rows = normal(9, 16, grad=True)
    opcheck(torch.ops.moe_sonicmoe.linear, (rows, up, up_bias, ends, transposed, False, sonicmoe.DIGEST))


def test_what_does_not_fit_is_said(stand_ins):
    with pytest.raises(BlockInputError, match="bfloat16"):
        deepgemm.grouped_gemm(torch.ones(16, 8), torch.ones(2, 4, 8), *torch.zeros(2, 16, dtype=torch.int32), False)
    settings = {"gate": "silu", "concatenated": True, "transposed": True, "dtype": BF16}
    tensors = normal(3, 16), ids(3), torch.rand(3, 2), normal(4, 16, 48), None, normal(4, 24, 16), None
    with pytest.raises(BlockInputError, match="interleaved"):
        sonicmoe.experts(*tensors, **settings, training=False, tuned=False)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 40),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 70),
    alignment=st.sampled_from([16, 32, 128]),
    seed=st.integers(0, 99),
)
def test_every_pair_has_its_row_and_every_tile_one_expert(device, tokens, top_k, experts, alignment, seed):
    generator = torch.Generator().manual_seed(seed)
    routed = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator).to(device)
    x = torch.randn(tokens, 24, generator=generator).to(device)
    order, ends = sort_pairs(routed, experts)
    padded, layout, position, padded_ends = pad_rows(
        x, order, ends, top_k=top_k, alignment=alignment, dtype=torch.float32
    )
    assert padded.shape[0] == padded_size(tokens * top_k, experts, alignment)
    assert padded.shape[0] % alignment == 0
    flat = routed.reshape(-1)
    kept = (flat >= 0) & (flat < experts)
    assert torch.equal(position >= 0, kept)
    places = position[kept].long()
    assert places.unique().numel() == places.numel()
    assert torch.equal(layout[places].long(), flat[kept])
    assert torch.equal(padded[places], x.repeat_interleave(top_k, 0)[kept])
    assert (layout >= 0).sum() == kept.sum()
    for tile in layout.view(-1, alignment):
        assert len({expert for expert in tile.tolist() if expert >= 0}) <= 1
        assert tile[0] >= 0 or (tile < 0).all()
    counts = torch.bincount(flat[kept], minlength=experts)
    assert torch.equal(padded_ends.long(), ((counts + alignment - 1) // alignment * alignment).cumsum(0))

    sources, sorted_position, bounds = place_rows(order, ends, top_k)
    assert bounds.tolist() == [0, *counts.cumsum(0).tolist()]
    assert torch.equal(sorted_position >= 0, kept)
    assert torch.equal(sources[sorted_position[kept].long()].long(), kept.nonzero().squeeze(1) // top_k)

    weights = torch.rand(tokens, top_k, generator=generator).to(device)
    rows = padded.nan_to_num(0) if tokens else padded
    expected = x * (weights * kept.view(tokens, top_k)).sum(1, keepdim=True)
    torch.testing.assert_close(combine_rows(rows, weights, position, top_k, torch.float32), expected)
    sorted_rows = x[order.long() // top_k]
    expected = torch.zeros(experts, 24, device=device).index_add_(0, flat[kept], x.repeat_interleave(top_k, 0)[kept])
    torch.testing.assert_close(sum_expert_rows(sorted_rows, ends, torch.float32), expected)
