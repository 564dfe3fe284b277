"""The fallback of grouped_mm against a loop over rows in float64."""

import pytest
import torch
from reference import DEVICES

from moe_compile.errors import BlockInputError
from moe_compile.kernels.grouped_mm_fallback import DIGEST, grouped_mm_fallback

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _operands(ends, dtype=torch.float32, view=False, rows=12, device="cpu"):
    """rows (N, 5), weight (E, 5, 7), possibly as a view of (E, 7, 5), offsets (E,)."""
    generator = torch.Generator().manual_seed(len(ends))
    stored = torch.randn(len(ends), *((7, 5) if view else (5, 7)), generator=generator).to(device, dtype)
    stored.requires_grad_()
    x = torch.randn(rows, 5, generator=generator).to(device, dtype).requires_grad_()
    return x, stored, stored.mT if view else stored, torch.tensor(ends, dtype=torch.int32, device=device)


def _row_by_row(rows, weight, offsets):
    """float64, one row at a time; zero past the end."""
    unused = rows.sum() * 0 + weight.sum() * 0  # so that both have a gradient
    experts = torch.searchsorted(offsets.long(), torch.arange(len(rows), device=rows.device), right=True).tolist()
    zero = torch.zeros(weight.shape[2], dtype=torch.float64, device=rows.device)
    products = [row @ weight[e] if e < len(weight) else zero for row, e in zip(rows, experts, strict=True)]
    return torch.stack(products) + unused


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("ends", [[3, 3, 9, 12], [2, 4, 6], [0, 0], [12], [0, 12, 12]])
def test_values_and_gradients(device, dtype, view, ends):
    rows, stored, weight, offsets = _operands(ends, dtype, view, device=device)
    out = grouped_mm_fallback(rows, weight, offsets)
    grads = torch.autograd.grad(out, (rows, stored), torch.ones_like(out))

    rows64, stored64 = (tensor.detach().double().requires_grad_() for tensor in (rows, stored))
    exact = _row_by_row(rows64, stored64.mT if view else stored64, offsets)
    exact_grads = torch.autograd.grad(exact, (rows64, stored64), torch.ones_like(exact))

    for got, expected in zip((out.detach(), *grads), (exact.detach(), *exact_grads), strict=True):
        # At most 12 products a sum, accumulated in float32 or better: one rounding of the result, and the sum's own.
        eps = torch.finfo(dtype).eps + 12 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(got.double(), expected, rtol=eps, atol=eps * expected.abs().max().item())

    used = {expert for expert in range(len(ends)) if ends[expert] > ([0, *ends])[expert]}
    for expert in set(range(len(ends))) - used:
        assert grads[1][expert].abs().max() == 0
    assert out[ends[-1] :].abs().sum() == 0
    assert grads[0][ends[-1] :].abs().sum() == 0


def test_nan_in_rows_past_the_end_goes_nowhere():
    rows, stored, weight, offsets = _operands([2, 4])
    with torch.no_grad():
        rows[4:] = torch.nan
    out = grouped_mm_fallback(rows, weight, offsets)
    (grad,) = torch.autograd.grad(out, stored, torch.ones_like(out))
    assert out.isfinite().all()
    assert grad.isfinite().all()


def test_no_rows():
    rows, stored, weight, offsets = _operands([0, 0], rows=0)
    out = grouped_mm_fallback(rows, weight, offsets)
    out.sum().backward()
    assert out.shape == (0, 7)
    assert stored.grad.abs().max() == 0


@pytest.mark.parametrize("view", [False, True])
def test_the_weights_gradient_has_the_weights_layout(view):
    rows, _, weight, offsets = _operands([3, 12], view=view)
    weight = weight.detach().requires_grad_()
    grouped_mm_fallback(rows, weight, offsets).sum().backward()
    assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize("frozen", ["rows", "weight"])
def test_no_gradient_is_computed_for_what_is_frozen(frozen):
    rows, weight, _, offsets = _operands([3, 12])
    (rows if frozen == "rows" else weight).requires_grad_(False)
    out = grouped_mm_fallback(rows, weight, offsets)
    with torch.profiler.profile() as profile:
        out.sum().backward()
    products = sum(event.count for event in profile.key_averages() if event.key == "aten::mm")
    assert products == 2  # one per expert, not two


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_opcheck(view, offsets_dtype):
    rows, _, weight, offsets = _operands([3, 3, 9], view=view)
    arguments = rows, weight.detach().requires_grad_(), offsets.to(offsets_dtype), DIGEST
    torch.library.opcheck(torch.ops.moe.grouped_mm_fallback.default, arguments)
    for needs in ((True, True), (True, False), (False, True)):
        plain = torch.ones(12, 7), rows.detach(), weight.detach(), offsets, *needs
        torch.library.opcheck(torch.ops.moe.grouped_mm_fallback_backward.default, plain)


def test_a_stale_digest_is_harmless():
    rows, _, weight, offsets = _operands([3, 12])
    stale = torch.ops.moe.grouped_mm_fallback(rows, weight, offsets, "of another version")
    torch.testing.assert_close(stale, grouped_mm_fallback(rows, weight, offsets), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows, weight, offsets: (rows[:, :4], weight, offsets), r"rows \(12, 4\)"),
        (lambda rows, weight, offsets: (rows, weight, offsets[:1]), r"offsets \(1,\)"),
        (lambda rows, weight, offsets: (rows, weight.half(), offsets), "weight torch.float16"),
        (lambda rows, weight, offsets: (rows, weight, offsets.float()), "offsets torch.float32"),
    ],
)
def test_bad_inputs_name_what_was_found(change, message):
    rows, _, weight, offsets = _operands([3, 12])
    with pytest.raises(BlockInputError, match=message):
        grouped_mm_fallback(*change(rows, weight, offsets))
