"""Every form of tests/forms.py through the backend: numbers, gradients, and what was made of it."""

import warnings

import pytest
import torch
from forms import FORMS, Form

import moe_compile

WHOLE = [form for form in FORMS.values() if form.traces_whole]
REWRITTEN = [form for form in WHOLE if form.expected == "rewrite" or form.name == "torchtitan_grouped_mm"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2}


def outputs(result) -> list[torch.Tensor]:
    """All tensors in a model's result."""
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def run(function, model: torch.nn.Module, x: torch.Tensor, gradients: bool) -> list[torch.Tensor]:
    """Outputs and, if asked for, the gradients of the input and of all parameters."""
    model.zero_grad()
    torch.manual_seed(3)
    if not gradients:
        with torch.no_grad():
            return outputs(function(x))
    x = x.clone().requires_grad_()
    found = outputs(function(x))
    out = found[0]
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [*(tensor.detach() for tensor in found), x.grad, *zeros]


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    for a, b in zip(actual, expected, strict=True):
        scale = max(float(b.abs().max()) if b.numel() else 0.0, 0.1) if b.is_floating_point() else 1.0
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", REWRITTEN, ids=lambda form: form.name)
def test_rewritten(form: Form, dtype: torch.dtype, experts: str) -> None:
    model, (x,) = form.build(dtype), form.inputs(7, dtype)
    backend = moe_compile.backend(experts, compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    gradients = not form.inference_only
    actual, expected = run(compiled, model, x, gradients), run(model, model, x, gradients)
    assert [block.found for block in backend.blocks.values()] == ["graph"] * form.blocks
    # torchtitan's experts multiply in bfloat16, whatever the model's dtype.
    rounds = dtype is torch.bfloat16 or form.name == "torchtitan_grouped_mm"
    assert_close(actual, expected, torch.bfloat16 if rounds else dtype)


@pytest.mark.parametrize("form", [f for f in WHOLE if f not in REWRITTEN], ids=lambda form: form.name)
def test_left_alone(form: Form) -> None:
    model, (x,) = form.build(), form.inputs()
    backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = run(torch.compile(model, backend=backend, fullgraph=True), model, x, False)
    assert backend.blocks == {}
    assert [form.words in rejection.reason for rejection in backend.rejected] == [True]
    assert_close(actual, run(model, model, x, False), torch.float32)
