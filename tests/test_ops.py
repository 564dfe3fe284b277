"""The canonical ops against a per-token reference, and against torch's own checks of custom ops."""

from dataclasses import replace

import pytest
import torch
from reference import DEVICES, assert_matches_reference, canonical, make_inputs, run_with_gradients

import moe_compile.ops  # noqa: F401  registers the ops
from moe_compile.errors import BlockInputError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ops = torch.ops.moe


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bias", "transposed"), [(False, False), (True, True)])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
def test_block_matches_the_reference(device, dtype, bias, transposed, num_tokens):
    inputs = make_inputs(
        num_tokens, dtype=dtype, bias=bias, transposed=transposed, sentinels=True, device=device, seed=num_tokens
    )
    assert_matches_reference(canonical, inputs)


@pytest.mark.parametrize("transposed", [False, True])
def test_square_weights_are_not_confused_with_their_transpose(transposed):
    inputs = make_inputs(9, hidden=16, intermediate=8, transposed=transposed)
    assert inputs.up.shape[1] == inputs.up.shape[2]
    assert_matches_reference(canonical, inputs)


def test_permuted_tokens_permute_the_output():
    inputs = make_inputs(33, sentinels=True)
    permutation = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    permuted = replace(
        inputs, x=inputs.x[permutation], ids=inputs.ids[permutation], weights=inputs.weights[permutation]
    )
    assert_same_up_to_rounding(canonical(permuted), canonical(inputs)[permutation])


def test_a_batch_can_be_split():
    inputs = make_inputs(33)
    parts = [
        replace(inputs, x=inputs.x[part], ids=inputs.ids[part], weights=inputs.weights[part])
        for part in (slice(0, 10), slice(10, 33))
    ]
    assert_same_up_to_rounding(torch.cat([canonical(part) for part in parts]), canonical(inputs))


def assert_same_up_to_rounding(actual, expected):
    """A product of fewer rows may sum in another order, which costs a few roundings of the largest value."""
    assert (actual - expected).abs().max() <= 8 * torch.finfo(expected.dtype).eps * expected.abs().max()


def test_empty_experts_get_a_gradient_of_exactly_zero():
    inputs = make_inputs(9, bias=True)
    inputs.ids = torch.full_like(inputs.ids, 2)  # one expert gets everything
    _, _, _, *weight_grads = assert_matches_reference(canonical, inputs)
    for grad in weight_grads:
        assert grad[[0, 1, 3]].abs().max() == 0
        assert grad[2].abs().max() > 0


@pytest.mark.parametrize("sentinel", [-1, 4, 1000])
def test_sentinels_contribute_nothing_and_get_nothing(sentinel):
    inputs = make_inputs(5, bias=True)
    inputs.ids[1] = sentinel
    inputs.ids[3, 0] = sentinel
    out, x_grad, routing_grad, *_ = assert_matches_reference(canonical, inputs)
    assert out[1].abs().max() == 0
    assert x_grad[1].abs().max() == 0
    assert routing_grad[1].abs().max() == 0
    assert routing_grad[3, 0] == 0
    assert routing_grad[3, 1] != 0


def test_combine_drops_what_a_gate_makes_of_sentinel_rows():
    inputs = make_inputs(5)
    inputs.ids[1] = -1
    rows, offsets, order = ops.dispatch(inputs.x, inputs.ids, 4)
    poisoned = torch.where(torch.arange(10).unsqueeze(1) < offsets[-1], rows, torch.nan)
    out = ops.combine(poisoned, inputs.weights, order, torch.float32, offsets)
    out.sum().backward()
    assert out[1].abs().max() == 0
    assert inputs.weights.grad[1].abs().max() == 0
    assert inputs.x.grad.isfinite().all()


def test_int32_ids_give_the_same():
    inputs = make_inputs(9, sentinels=True)
    narrow = replace(inputs, ids=inputs.ids.int())
    for got, expected in zip(run_with_gradients(canonical, narrow), run_with_gradients(canonical, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_dispatch_sorts_stably_with_sentinels_last():
    x = torch.arange(3.0).unsqueeze(1)
    rows, offsets, order = ops.dispatch(x, torch.tensor([[1, 0], [9, 1], [-1, 0]]), 2)
    assert order.tolist() == [1, 5, 0, 3, 2, 4]
    assert offsets.tolist() == [2, 4]
    assert offsets.dtype == torch.int32
    assert rows.squeeze(1).tolist() == [0, 2, 0, 1, 1, 2]


def test_the_weighted_sum_runs_in_the_promoted_dtype():
    rows = torch.tensor([[1.0], [1.0]], dtype=torch.bfloat16)
    weights = torch.tensor([[1.0, 2.0**-12]])
    out = ops.combine(rows, weights, torch.tensor([0, 1]), torch.float32)
    assert out.item() == 1 + 2.0**-12  # bfloat16 weights, or a bfloat16 sum, would give 1


def test_rows_are_cast_to_the_weights_dtype():
    inputs = make_inputs(7)
    rows, offsets, _ = ops.dispatch(inputs.x, inputs.ids, 4)
    out = ops.grouped_linear(rows, inputs.up.bfloat16(), None, offsets, False)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert inputs.x.grad.dtype == torch.float32


def _samples():
    inputs = make_inputs(5, bias=True, sentinels=True)
    rows, offsets, order = (value.detach() for value in ops.dispatch(inputs.x, inputs.ids, 4))
    rows = rows.requires_grad_()
    grad = torch.randn(10, 48)
    yield "dispatch", (inputs.x, inputs.ids, 4, "block")
    yield "grouped_linear", (rows, inputs.up, inputs.up_bias, offsets, False)
    yield "grouped_linear", (rows, inputs.up.detach().mT.contiguous().requires_grad_(), None, offsets, True)
    yield "grouped_linear_backward", (grad, rows.detach(), inputs.up.detach(), offsets, False, True)
    yield "combine", (rows, inputs.weights, order, torch.float32, offsets)
    yield "combine", (rows, inputs.weights, order, torch.float32)


@pytest.mark.parametrize(("name", "arguments"), list(_samples()))
def test_opcheck(name, arguments):
    torch.library.opcheck(getattr(ops, name).default, arguments)


_INPUTS = make_inputs(3, bias=True)
_OFFSETS = torch.tensor([2, 3, 4, 6], dtype=torch.int32)
_ROWS = torch.zeros(6, 16)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("dispatch", (_INPUTS.x, _INPUTS.ids.flatten(), 4), r"ids \(6,\)"),
        ("dispatch", (_INPUTS.x, _INPUTS.ids.float(), 4), "torch.float32"),
        ("dispatch", (_INPUTS.x, _INPUTS.ids, 0), "num_experts is 0"),
        ("grouped_linear", (_ROWS, _INPUTS.up[0], None, _OFFSETS, False), r"weight \(48, 16\)"),
        ("grouped_linear", (_ROWS, _INPUTS.up, None, _OFFSETS, True), "transposed=True"),
        ("grouped_linear", (_ROWS, _INPUTS.up, None, _OFFSETS[:3], False), r"offsets \(3,\)"),
        ("grouped_linear", (_ROWS, _INPUTS.up, _INPUTS.down_bias, _OFFSETS, False), r"bias \(4, 16\)"),
        ("combine", (_ROWS, _INPUTS.weights[0], torch.arange(6), torch.float32), r"weights \(2,\)"),
    ],
)
def test_bad_inputs_name_what_was_found(name, arguments, message):
    with pytest.raises(BlockInputError, match=message):
        getattr(ops, name)(*arguments)


def test_token_counts_must_agree():
    with pytest.raises(RuntimeError, match="token counts differ"):
        ops.dispatch(_INPUTS.x, _INPUTS.ids[:2], 4)
    with pytest.raises(RuntimeError, match="6 rows, but an order of 4"):
        ops.combine(_ROWS, _INPUTS.weights, torch.arange(4), torch.float32)


def test_the_reference_ignores_autocast():
    rows, weight = torch.randn(4, 8, requires_grad=True), torch.randn(2, 6, 8, requires_grad=True)
    offsets = torch.tensor([1, 4], dtype=torch.int32)
    plain = torch.ops.moe.grouped_linear(rows, weight, None, offsets, False)
    with torch.autocast("cpu", torch.bfloat16):
        output = torch.ops.moe.grouped_linear(rows, weight, None, offsets, False)
        output.sum().backward()
    assert torch.equal(output, plain)
    expected = torch.stack([rows[:1].sum(0), rows[1:].sum(0)])
    torch.testing.assert_close(weight.grad, expected.unsqueeze(1).expand(2, 6, 8))
