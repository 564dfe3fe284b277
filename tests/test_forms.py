"""Every form of tests/forms.py: what is made of it, and that numbers and gradients stay."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import FORMS, Form

import moe_compile
from moe_compile.assume.trace import trace_assuming
from moe_compile.backend import situation_of
from moe_compile.modes import CompileSettings
from moe_compile.rewriter import Rewriter
from moe_compile.selection import Selection

WHOLE = [form for form in FORMS.values() if form.traces_whole]
OPTIONAL = ("torchtitan_grouped_mm",)
REWRITTEN = [form for form in FORMS.values() if form.expected == "rewrite" or form.name in OPTIONAL]
# These read a single count of a tensor that is as long as the data says.
DYNAMO_ONLY = ("fastmoe_repeat_bmm",)
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
        scale = max(float(b.detach().abs().max()) if b.numel() else 0.0, 0.1) if b.is_floating_point() else 1.0
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


def assert_as_exact(actual: list[torch.Tensor], eager: list[torch.Tensor], oracle: list[torch.Tensor]) -> None:
    """In bfloat16: as near to a run in float32 as the module's own code is, twice its error at most."""
    for a, e, o in zip(actual, eager, oracle, strict=True):
        if not a.is_floating_point():
            assert torch.equal(a, e)
            continue
        allowed = 2 * (e.float() - o).abs().max() + 8 * torch.finfo(a.dtype).eps * o.abs().max()
        assert a.dtype == e.dtype
        assert (a.float() - o).abs().max() <= allowed


def precision(form: Form, dtype: torch.dtype) -> torch.dtype:
    """torchtitan's grouped experts multiply in bfloat16, whatever the model's dtype."""
    return torch.bfloat16 if form.name == "torchtitan_grouped_mm" else dtype


def number_of_experts(model: torch.nn.Module) -> int:
    """From whatever the form keeps its experts in."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList | torch.nn.ModuleDict)]
    if lists:
        return len(lists[0])
    experts = getattr(model, "experts", None)
    return experts if isinstance(experts, int) else next(p for p in model.parameters() if p.dim() == 3).shape[0]


def rewritten_under_assumptions(
    model: torch.nn.Module, x: torch.Tensor, experts: str
) -> tuple[Callable[[torch.Tensor], Any], Rewriter]:
    """A model traced for any number of tokens, with its experts rewritten, as a function of its input."""
    number = 4 if hasattr(model, "w1") and model.w1.dim() == 2 else number_of_experts(model)
    traced = trace_assuming(model, (x,), {}, number)
    graph = traced.graph_module
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    situation = situation_of(inputs, CompileSettings(), fullgraph=False)
    rewriter = Rewriter(Selection.of(experts), "error", situation, pytest.fail)
    rewriter.rewrite(graph)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return lambda x: graph([state[name] for name in traced.state], [x]), rewriter


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [f for f in REWRITTEN if f.name not in DYNAMO_ONLY], ids=lambda form: form.name)
def test_rewritten_for_any_number_of_tokens(form: Form, dtype: torch.dtype, experts: str) -> None:
    if form.name == "sparse_dispatcher" and dtype is torch.bfloat16:
        pytest.skip("its own code adds float32 rows to a buffer of the model's dtype")
    model = form.build(dtype)
    rewritten, rewriter = rewritten_under_assumptions(model, *form.inputs(dtype=dtype), experts)
    assert [block.found for block in rewriter.blocks.values()] == ["graph"] * form.blocks
    for tokens in (7, 1, 33):
        (x,) = form.inputs(tokens, dtype)
        actual = run(rewritten, model, x, not form.inference_only)
        expected = run(model, model, x, not form.inference_only)
        if dtype is torch.bfloat16:
            oracle = copy.deepcopy(model).float()
            assert_as_exact(actual, expected, run(oracle, oracle, x.float(), not form.inference_only))
        else:
            assert_close(actual, expected, precision(form, dtype))


@pytest.mark.parametrize("form", [f for f in REWRITTEN if f.traces_whole], ids=lambda form: form.name)
def test_rewritten_in_dynamos_graph(form: Form) -> None:
    model, (x,) = form.build(), form.inputs(7)
    backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
    actual = run(torch.compile(model, backend=backend, fullgraph=True), model, x, True)
    assert [block.found for block in backend.blocks.values()] == ["graph"] * form.blocks
    assert_close(actual, run(model, model, x, True), precision(form, torch.float32))


@pytest.mark.parametrize("form", [f for f in WHOLE if f not in REWRITTEN], ids=lambda form: form.name)
def test_left_alone_with_a_reason(form: Form) -> None:
    model, (x,) = form.build(), form.inputs()
    backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = run(torch.compile(model, backend=backend, fullgraph=True), model, x, False)
    assert backend.blocks == {}
    assert [form.words in rejection.reason for rejection in backend.rejected] == [True]
    assert_close(actual, run(model, model, x, False), torch.float32)


@pytest.mark.parametrize(
    "name", ["jetmoe_parallel_linear", "gpt_oss_dense_bmm", "torchtitan_for_loop", "gpt_fast_gather_einsum"]
)
def test_exported(name: str) -> None:
    form = FORMS[name]
    model, (x,) = form.build(), form.inputs(7)
    program = torch.export.export(model, (x,))
    rewritten = moe_compile.rewrite(program, "batched_mm")
    assert_close(outputs(rewritten.module()(x)), outputs(model(x)), torch.float32)
