"""`register_experts`: classes that transformers does not know."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import moe_compile
from moe_compile.capture.registered import unregister_experts
from moe_compile.errors import OptionError
from moe_compile.spec import ExpertsSpec, GateSpec


class Stacked(nn.Module):
    """Stacked weights under names of its own, and a loop that Dynamo cannot trace whole."""

    def __init__(self, experts=4, hidden=16, inner=24, interleaved=False):
        super().__init__()
        self.wi = nn.Parameter(torch.randn(experts, hidden, 2 * inner) / 4)
        self.wo = nn.Parameter(torch.randn(experts, inner, hidden) / 4)
        self.interleaved = interleaved

    def forward(self, x, chosen, scores):
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, slot = torch.where(chosen == expert)
            rows = x[token] @ self.wi[expert]
            gate, up = (rows[:, ::2], rows[:, 1::2]) if self.interleaved else rows.chunk(2, -1)
            rows = (nn.functional.silu(gate) * up) @ self.wo[expert]
            out.index_add_(0, token, rows * scores[token, slot, None])
        return out


class Listed(nn.Module):
    """A whole block with its router, and experts in a ModuleList."""

    def __init__(self, experts=4, hidden=16):
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 24), nn.ReLU(), nn.Linear(24, hidden)) for _ in range(experts)
        )

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * scores[token, slot, None])
        return out


def listed(block, x):
    scores, chosen = block.router(x).softmax(-1).topk(2)
    up, down = ([expert[i] for expert in block.experts] for i in (0, 2))
    return moe_compile.experts_block(
        x, chosen, scores, gate=torch.relu, **{f"{n}{s}": torch.stack([getattr(m, a) for m in ms])
        for n, ms in (("up", up), ("down", down)) for s, a in (("", "weight"), ("_bias", "bias"))}
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _unregistered():
    yield
    unregister_experts(Stacked)
    unregister_experts(Listed)


def routed(tokens=9, experts=4, hidden=16):
    x = torch.randn(tokens, hidden)
    chosen = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)])
    return x, chosen, torch.rand(tokens, 2)


def compiled(module, experts="grouped_mm", **kwargs):
    backend = moe_compile.backend(experts, compiler="aot_eager")
    return torch.compile(module, backend=backend, **{"fullgraph": True, **kwargs}), backend


LAYOUT = ExpertsSpec(up="wi", down="wo", transposed=True, gate=GateSpec("silu"))


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_class_registered_by_its_layout(interleaved, experts):
    layout = ExpertsSpec(up="wi", down="wo", transposed=True, concatenated=not interleaved, gate=GateSpec("silu"))
    moe_compile.register_experts(Stacked, layout)
    module, inputs = Stacked(interleaved=interleaved), routed()
    function, backend = compiled(module, experts)
    torch.testing.assert_close(function(*inputs), module(*inputs), rtol=1e-5, atol=1e-5)
    (block,) = backend.blocks.values()
    assert block.form == "registered.Stacked"
    assert (block.spec.num_experts, block.spec.hidden_size, block.spec.intermediate_size) == (4, 16, 24)
    assert not block.spec.bias


def test_arguments_may_be_passed_by_the_names_of_the_class():
    moe_compile.register_experts(Stacked, LAYOUT)
    module, (x, chosen, scores) = Stacked(), routed()
    function, backend = compiled(module)
    actual = function(x, scores=scores, chosen=chosen)
    torch.testing.assert_close(actual, module(x, chosen, scores), rtol=1e-5, atol=1e-5)
    assert len(backend.blocks) == 1


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_a_class_registered_by_a_function(experts):
    moe_compile.register_experts(Listed, listed)
    module, (x, _, _) = Listed(), routed()
    function, backend = compiled(module, experts)
    expected = module(x)
    torch.testing.assert_close(function(x), expected, rtol=1e-5, atol=1e-5)
    (block,) = backend.blocks.values()
    assert block.chosen in ("grouped_mm_fallback", "batched_mm")
    function(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.experts.parameters())


def test_eager_runs_the_class_as_it_is():
    moe_compile.register_experts(Stacked, LAYOUT)
    module, inputs = Stacked(), routed()
    function, backend = compiled(module, "eager", fullgraph=False)
    assert torch.equal(function(*inputs), module(*inputs))
    assert {block.chosen for block in backend.blocks.values()} == {"eager"}


def test_other_backends_see_the_class_as_it_is():
    module, inputs = Stacked(), routed()
    counts = []
    for register in (False, True):
        if register:
            moe_compile.register_experts(Stacked, LAYOUT)
        torch._dynamo.reset()
        counter = CompileCounter()
        output = torch.compile(module, backend=counter)(*inputs)
        torch.testing.assert_close(output, module(*inputs))
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


def test_registering_again_replaces_and_unregistering_restores():
    forward = Stacked.forward
    moe_compile.register_experts(Stacked, ExpertsSpec(up="wi", down="missing", gate=GateSpec("silu")))
    moe_compile.register_experts(Stacked, LAYOUT)
    module, inputs = Stacked(), routed()
    torch.testing.assert_close(compiled(module)[0](*inputs), module(*inputs), rtol=1e-5, atol=1e-5)
    unregister_experts(Stacked)
    assert Stacked.forward is forward


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Stacked(), LAYOUT), "not a module class"),
        ((Stacked, "silu"), "neither an ExpertsSpec nor a function"),
        ((Stacked, ExpertsSpec(gate=GateSpec("sillu"))), "did you mean 'silu'"),
    ],
)
def test_bad_registrations_are_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        moe_compile.register_experts(*arguments)
    assert not hasattr(Stacked.forward, "_moe_compile_previous")


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(("field", "name"), [("up", "w1"), ("down", "w0"), ("up_bias", "bias")])
def test_a_layout_that_names_what_the_module_does_not_have_is_refused(field, name, fullgraph):
    layout = {"up": "wi", "down": "wo", "transposed": True, "gate": GateSpec("silu"), field: name}
    moe_compile.register_experts(Stacked, ExpertsSpec(**layout))
    backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
    with pytest.raises(OptionError, match=rf"{field}='{name}'.* for Stacked.*wi, wo"):
        torch.compile(Stacked(), backend=backend, fullgraph=fullgraph)(*routed())
