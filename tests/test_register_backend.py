"""Experts backends of one's own: the documentation's example, and what is checked."""

import re
from pathlib import Path

import pytest
import torch
from reference import canonical, make_inputs, per_token, swiglu
from zoo import standalone

import moe_compile
from moe_compile.errors import KernelResultError, MoeCompileError, RegistrationError, RuleError
from moe_compile.experts_backends import EXPERTS_BACKENDS
from moe_compile.modes import CompileSettings
from moe_compile.passes.blocks import Lowered
from moe_compile.passes.lower_with_kernel import lower_block, lower_linears
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec

PAGE = Path(__file__).parents[1] / "docs" / "writing-a-backend.md"


@pytest.fixture(autouse=True)
def _take_back():
    before = dict(EXPERTS_BACKENDS)
    yield
    EXPERTS_BACKENDS.clear()
    EXPERTS_BACKENDS.update(before)


def legal(spec, situation):
    return ()


def reference_linear(rows, weight, bias, ends, transposed):
    return torch.ops.moe.grouped_linear(rows, weight, bias, ends, transposed)


def loop(rows, weight, bias, ends, transposed):
    experts = torch.searchsorted(ends, torch.arange(rows.shape[0]), right=True).clamp(max=weight.shape[0] - 1)
    matrices = (weight if transposed else weight.transpose(1, 2))[experts]
    out = torch.bmm(rows.unsqueeze(1), matrices).squeeze(1)
    return out if bias is None else out + bias[experts]


def run(inputs):
    torch._dynamo.reset()
    backend = moe_compile.backend("mine", compiler="aot_eager")
    return torch.compile(lambda i: canonical(i, swiglu), backend=backend, fullgraph=True)(inputs)


def close(output, inputs):
    torch.testing.assert_close(output, per_token(inputs), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_documentations_example():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = [line for line in example.splitlines() if line.strip()]
    assert len(code) < 30
    exec(compile(example, str(PAGE), "exec"), {"__name__": "example"})
    for transposed in (False, True):
        inputs = make_inputs(11, bias=True, sentinels=True, transposed=transposed)
        close(run(inputs), inputs)
    module, inputs = standalone("qwen3_moe")
    backend = moe_compile.backend("mine", compiler="aot_eager")
    torch._dynamo.reset()
    output = torch.compile(module, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(output, module(*inputs), rtol=1e-4, atol=1e-4)
    assert {block.chosen for block in backend.blocks.values()} == {"mine"}
    torch._dynamo.reset()
    again = torch.compile(module, backend=moe_compile.backend("mine", compiler="aot_eager"))
    with torch.enable_grad(), pytest.raises(RuleError, match="without a backward"):
        again(*inputs)
    moe_compile.unregister_backend("mine")
    with pytest.raises(MoeCompileError, match="no such experts backend"):
        moe_compile.backend("mine")


def test_one_with_a_backward_trains():
    moe_compile.register_backend("mine", legal, lower_linears("mine", loop), has_backward=True)
    inputs = make_inputs(9, bias=True, sentinels=True)
    (gradient,) = torch.autograd.grad(run(inputs).sum(), inputs.up)
    (expected,) = torch.autograd.grad(per_token(inputs).sum(), inputs.up)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


def whole(x, ids, weights, up, up_bias, down, down_bias, gate, concatenated, transposed, dtype, training):
    assert (gate, concatenated, up_bias, down_bias) == ("silu", True, None, None)
    kept = (ids >= 0) & (ids < up.shape[0])
    known = ids.clamp(0, up.shape[0] - 1)
    pair = "eio" if transposed else "eoi"
    hidden = torch.einsum(f"ti,tk{pair.replace('e', '')}->tko", x, up[known])
    gated = torch.nn.functional.silu(hidden.chunk(2, -1)[0]) * hidden.chunk(2, -1)[1]
    out = torch.einsum(f"tki,tk{pair.replace('e', '')}->tko", gated, down[known])
    return (out * (weights * kept).unsqueeze(-1)).sum(1).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("transposed", [False, True])
def test_one_for_a_whole_block(transposed):
    moe_compile.register_backend("mine", legal, lower_block("mine", whole))
    inputs = make_inputs(6, sentinels=True, transposed=transposed)
    close(run(inputs), inputs)


def test_modes_and_training_follow_from_the_record():
    record = moe_compile.register_backend("mine", legal, lower_linears("mine", loop))
    in_graphs = Situation(settings=CompileSettings("reduce-overhead"))
    assert "not safe in CUDA graphs" in record.reasons(ExpertsSpec(), in_graphs)[0]
    assert "without a backward" in record.reasons(ExpertsSpec(), Situation(training=True))[0]
    assert record.reasons(ExpertsSpec(), Situation()) == ()
    moe_compile.unregister_backend("mine")
    able = moe_compile.register_backend(
        "mine", legal, lower_linears("mine", loop), has_backward=True, cuda_graph_safe=True
    )
    assert able.reasons(ExpertsSpec(), Situation(training=True)) == able.reasons(ExpertsSpec(), in_graphs) == ()


@pytest.mark.parametrize("name", ["grouped_mm", "eager", "auto", "deepgemm", "sonicmoe", "mine", "", "a b", 3])
def test_names_that_clash_or_are_none(name):
    moe_compile.register_backend("mine", legal, lower_linears("mine", loop))
    before = dict(EXPERTS_BACKENDS)
    with pytest.raises(RegistrationError):
        moe_compile.register_backend(name, legal, lower_linears("mine", loop))
    assert before == EXPERTS_BACKENDS


@pytest.mark.parametrize(("reasons", "lower"), [(None, loop), ("legal", loop), (legal, None)])
def test_what_cannot_be_called(reasons, lower):
    with pytest.raises(RegistrationError, match="cannot be called"):
        moe_compile.register_backend("mine", reasons, lower)
    assert "mine" not in EXPERTS_BACKENDS


@pytest.mark.parametrize("name", ["grouped_mm", "unheard_of"])
def test_only_what_was_registered_is_taken_back(name):
    with pytest.raises(RegistrationError, match="nothing was registered"):
        moe_compile.unregister_backend(name)
    assert "grouped_mm" in EXPERTS_BACKENDS


@torch.no_grad()
@pytest.mark.parametrize("answer", [None, "not here", (1,), True])
def test_bad_predicates(answer):
    moe_compile.register_backend("mine", lambda spec, situation: answer, lower_linears("mine", loop))
    with pytest.raises(RegistrationError, match="predicate returned"):
        run(make_inputs(3))


@torch.no_grad()
def test_a_predicate_that_raises():
    moe_compile.register_backend("mine", lambda spec, situation: 1 / 0, lower_linears("mine", loop))
    with pytest.raises(RegistrationError, match="'mine': its predicate raised ZeroDivisionError"):
        run(make_inputs(3))


@torch.no_grad()
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda *given: loop(*given).double(), "torch.float64"),
        (lambda *given: loop(*given)[:, :-1], r"returns \(6, 47\)"),
        (lambda *given: loop(*given).sum(0), "needs"),
        (lambda *given: loop(*given)[:-1], "needs"),
    ],
)
def test_kernels_that_return_something_else(bad, words):
    moe_compile.register_backend("mine", legal, lower_linears("mine", bad))
    with pytest.raises((KernelResultError, RegistrationError), match=words):
        run(make_inputs(3))
    # The next attempt, with a repaired kernel, works.
    moe_compile.unregister_backend("mine")
    moe_compile.register_backend("mine", legal, lower_linears("mine", loop))
    inputs = make_inputs(3)
    close(run(inputs), inputs)


@torch.no_grad()
@pytest.mark.parametrize(
    ("lower", "words"),
    [
        (lambda gm, block: Lowered("mine"), "left canonical ops"),
        (lambda gm, block: None, "returned None"),
        (lambda gm, block: 1 / 0, "raised ZeroDivisionError"),
        (lower_linears("mine", reference_linear), "left canonical ops"),
    ],
)
def test_bad_lowerings(lower, words):
    moe_compile.register_backend("mine", legal, lower)
    with pytest.raises(MoeCompileError, match=words):
        run(make_inputs(3))
