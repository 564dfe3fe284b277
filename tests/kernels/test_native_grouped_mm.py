"""The predicate over grouped_mm's preconditions against the kernel itself, around its limits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moe_compile.kernels.native_grouped_mm import GroupedMMCall, describe_call, native_reasons

SIZES = st.sampled_from([1, 2, 4, 7, 8, 9, 12, 16, 24])
FORMS = ["contiguous", "padded", "shifted", "expanded", "permuted", "strided"]


def _weight(form, experts, first, second, dtype, device="cpu"):
    """(E, first, second) with the strides that its name says."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    if form == "padded":
        return normal(experts, first, second + 8)[:, :, :second]
    if form == "shifted":
        return normal(experts * first * second + 1)[1:].view(experts, first, second)
    if form == "expanded":
        return normal(1, first, second).expand(experts, first, second)
    if form == "permuted":
        return normal(first, second, experts).permute(2, 0, 1)
    if form == "strided":
        return normal(experts, first, 2 * second)[:, :, ::2]
    return normal(experts, first, second)


def _runs(weight, transposed, num_rows, compiled, training):
    """Whether grouped_mm runs on this weight; asserts that it computes the right thing if it does."""
    view = weight if transposed else weight.mT
    experts, size_in, size_out = view.shape
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(num_rows, size_in, generator=generator).to(weight)
    grad = torch.randn(num_rows, size_out, generator=generator).to(weight)
    # The first expert may be empty; no rows past the end, where nothing is promised.
    ends = torch.linspace(0, num_rows, experts + 1, device=weight.device).int()[1:]
    function = torch.nn.functional.grouped_mm
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    leaf = weight.detach().requires_grad_(training)
    rows.requires_grad_(training)
    try:
        out = function(rows, leaf if transposed else leaf.mT, offs=ends)
        grads = torch.autograd.grad(out, (rows, leaf), grad) if training else ()
    except Exception as error:
        if not any(word in str(error) for word in ("stride", "BF16", "aligned")):
            raise
        return False

    rows64, leaf64 = rows.detach().double().requires_grad_(), leaf.detach().double().requires_grad_()
    view64 = leaf64 if transposed else leaf64.mT
    starts = [0, *ends.tolist()[:-1]]
    parts = [rows64[s:e] @ view64[i] for i, (s, e) in enumerate(zip(starts, ends.tolist(), strict=True))]
    exact = torch.cat(parts)
    exact_grads = torch.autograd.grad(exact, (rows64, leaf64), grad.double()) if training else ()
    for got, expected in zip((out, *grads), (exact, *exact_grads), strict=True):
        if expected.numel():
            # Sums of at most 24 products, accumulated in float32 or better and rounded once.
            eps = torch.finfo(weight.dtype).eps + 24 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(
                got.double(), expected, rtol=eps, atol=eps * expected.detach().abs().max().item()
            )
    return True


def _check(form, experts, first, second, dtype, transposed, num_rows, compiled, training, device="cpu"):
    torch._dynamo.reset()
    weight = _weight(form, experts, first, second, dtype, device)
    reasons = native_reasons(describe_call(weight, transposed=transposed, training=training, compiled=compiled))
    assert _runs(weight, transposed, num_rows, compiled, training) == (not reasons), reasons


ARGUMENTS = {
    "form": st.sampled_from(FORMS),
    "experts": st.sampled_from([1, 3]),
    "first": SIZES,
    "second": SIZES,
    "transposed": st.booleans(),
    "num_rows": st.sampled_from([0, 1, 5, 16]),
    "training": st.booleans(),
}
BOUNDED = {"derandomize": True, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=800, **BOUNDED)
@given(dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), **ARGUMENTS)
def test_predicate_is_the_kernel_in_eager(dtype, **arguments):
    _check(dtype=dtype, compiled=False, **arguments)


@settings(max_examples=120, **BOUNDED)
@given(**ARGUMENTS)
@example(form="contiguous", experts=3, first=16, second=16, transposed=True, num_rows=5, training=True)
@example(form="contiguous", experts=3, first=16, second=16, transposed=False, num_rows=0, training=True)
@example(form="contiguous", experts=1, first=8, second=24, transposed=False, num_rows=1, training=True)
@example(form="padded", experts=3, first=8, second=8, transposed=True, num_rows=16, training=True)
@example(form="padded", experts=3, first=16, second=16, transposed=False, num_rows=16, training=True)
@example(form="shifted", experts=3, first=16, second=8, transposed=False, num_rows=5, training=True)
@example(form="expanded", experts=3, first=8, second=16, transposed=False, num_rows=5, training=True)
@example(form="permuted", experts=3, first=8, second=8, transposed=False, num_rows=5, training=True)
@example(form="contiguous", experts=3, first=7, second=16, transposed=False, num_rows=5, training=False)
@example(form="contiguous", experts=3, first=7, second=16, transposed=False, num_rows=5, training=True)
@example(form="contiguous", experts=3, first=16, second=7, transposed=True, num_rows=5, training=False)
def test_predicate_is_the_kernel_when_compiled(**arguments):
    _check(dtype=torch.bfloat16, compiled=True, **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_fail_only_when_compiled(dtype):
    for compiled in (False, True):
        _check("contiguous", 3, 16, 16, dtype, False, 5, compiled, True)
    call = describe_call(_weight("contiguous", 3, 16, 16, dtype), transposed=False, training=True)
    assert "compiles in bfloat16 only" in native_reasons(call)[0]
    assert native_reasons(replace(call, compiled=False)) == ()


GOOD = GroupedMMCall(torch.bfloat16, (4, 16, 32), (512, 1, 16), training=True)
ON_CUDA = replace(GOOD, device_type="cuda", capability=(9, 0))


@pytest.mark.parametrize("call", [GOOD, ON_CUDA, replace(ON_CUDA, capability=(8, 0))])
def test_good_calls(call):
    assert native_reasons(call) == ()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (replace(GOOD, torch_version=(2, 10)), "on CPU needs torch 2.11"),
        (replace(GOOD, device_type="mps"), "no kernel for mps"),
        (replace(GOOD, dtype=torch.float64), "no float64 kernel"),
        (replace(ON_CUDA, capability=(7, 5)), "compute capability 8.0, this is sm_75"),
        (replace(ON_CUDA, hip=True), "ROCm"),
        (replace(ON_CUDA, torch_version=(2, 8)), "needs torch 2.9"),
        (replace(ON_CUDA, weight_offset=4), "starts 4 elements into its storage"),
        (replace(GOOD, weight_shape=(4, 1025, 512), weight_stride=(1025 * 512, 512, 1)), "rows' stride, 1025"),
        (replace(GOOD, weight_shape=(4, 512, 1025), weight_stride=(1025 * 512, 1, 512)), "stride of 1025"),
        (replace(GOOD, weight_stride=(288, 1, 18)), "the weight's stride, 18"),
        (replace(GOOD, weight_stride=(1024, 2, 32)), "neither"),
    ],
)
def test_each_precondition_is_named(call, reason):
    reasons = native_reasons(call)
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_cpu_takes_weights_at_any_address():
    assert native_reasons(replace(GOOD, weight_offset=1)) == ()


def test_inference_does_not_ask_for_what_only_the_backward_needs():
    call = replace(GOOD, weight_shape=(4, 512, 1025), weight_stride=(1025 * 512, 1, 512))
    assert native_reasons(call) != ()
    assert native_reasons(replace(call, training=False)) == ()


@pytest.mark.cuda
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("first", "second"), [(16, 16), (16, 24), (24, 7), (7, 24), (8, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_predicate_is_the_kernel_on_cuda(form, first, second, transposed, training):
    _check(form, 3, first, second, torch.bfloat16, transposed, 16, True, training, device="cuda")
