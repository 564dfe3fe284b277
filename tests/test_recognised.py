"""Blocks that are recognised in the graph, through `backend()`, `rewrite()` and `explain()`."""

import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from zoo import build, first_output, relative_error, standalone

import moe_compile
from moe_compile.errors import (
    NoExpertsWarning,
    OptionError,
    RewriteError,
    RuleError,
    SelectionError,
    UnknownBackendError,
)

sys.path.insert(0, str(Path(__file__).parent / "passes"))
from recognize_models import REFUSED, REWRITTEN, D

FORMS = ["gathered", "loop", "loop, stacked weights", "loop, +="]


def block(name, seed=0):
    torch.manual_seed(seed)
    return REWRITTEN[name](), torch.randn(9, D)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", FORMS)
def test_a_block_is_lowered_with_all_gradients(name, experts):
    model, x = block(name)
    backend = moe_compile.backend(experts, compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def run(function):
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        output = function(inputs)
        output.square().sum().backward()
        return [output, inputs.grad, *(parameter.grad for parameter in model.parameters())]

    for actual, expected in zip(run(compiled), run(model), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    (found,) = backend.blocks.values()
    assert found.found == "graph"
    assert found.chosen in ("grouped_mm_fallback", "batched_mm")


def test_a_refused_block_stays_and_the_warning_says_why():
    name = next(iter(REFUSED))
    torch.manual_seed(0)
    model, x = REFUSED[name][0](), torch.randn(9, D)
    with pytest.warns(NoExpertsWarning, match="What looked like one"):
        output = torch.compile(model, backend=moe_compile.backend("grouped_mm", compiler="aot_eager"), fullgraph=True)(
            x
        )
    torch.testing.assert_close(output, model(x))


def test_rules_hold_for_recognised_blocks():
    model, x = block("gathered")
    backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
    with pytest.raises(RuleError, match="CUDA graphs"):
        torch.compile(model, backend=backend, mode="reduce-overhead", fullgraph=True)(x)


def test_a_recognised_block_follows_set_and_keeps_its_code_for_eager():
    model, x = block("gathered")
    backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for turn in range(10):
        backend.set(("grouped_mm", "batched_mm", "eager")[turn % 3])
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(backend.graphs) == 3
    backend.set("eager")
    assert [graph.blocks for graph in backend.graphs] == [1, 1, 0]


def test_explain_names_the_form():
    model, x = block("loop")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        explanation = moe_compile.explain(model, x, backend="batched_mm")
    assert [(item.form, item.found, item.chosen) for item in explanation.blocks] == [
        ("expert_loop", "graph", "batched_mm")
    ]


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("grouped_mm", torch.bfloat16), ("grouped_mm", torch.float32), ("batched_mm", torch.float32)],
)
def test_an_exported_model_is_rewritten(implementation, dtype, experts):
    model, arguments = build("qwen3_moe", dtype, implementation)
    with torch.no_grad():
        program = torch.export.export(model, (), arguments)
        code = program.graph_module.code
        rewritten = moe_compile.rewrite(program, experts)
        output = first_output(rewritten.module()(**arguments))
        assert relative_error(output, first_output(model(**arguments))) < 4 * torch.finfo(dtype).eps
    assert program.graph_module.code == code
    assert rewritten.graph_module.code != code
    assert "moe.dispatch" not in rewritten.graph_module.code
    assert type(rewritten) is type(program)


def test_a_graph_module_is_rewritten_and_the_original_left_alone():
    model, x = block("gathered")
    graphs = []
    torch.compile(model, backend=lambda gm, inputs: graphs.append((gm, inputs)) or gm.forward, fullgraph=True)(x)
    gm, inputs = graphs[0]
    code = gm.code
    rewritten = moe_compile.rewrite(gm, "grouped_mm")
    assert gm.code == code != rewritten.code
    torch.testing.assert_close(rewritten(*inputs)[0], gm(*inputs)[0], rtol=1e-5, atol=1e-5)


def test_what_cannot_be_rewritten_is_refused():
    with pytest.raises(RewriteError, match=r"torch\.export\.export"):
        moe_compile.rewrite(torch.nn.Linear(2, 2), "grouped_mm")
    with pytest.raises(RewriteError, match="symbolic_trace"):
        moe_compile.rewrite(torch.fx.symbolic_trace(torch.nn.Linear(2, 2)), "grouped_mm")
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    with pytest.warns(NoExpertsWarning):
        moe_compile.rewrite(program, "grouped_mm")


# Programs as the tracers of torch make them --------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_an_exported_block_whose_output_is_the_programs_is_run_saved_and_traced_again(experts, tmp_path):
    module, inputs = standalone("qwen3_moe")
    module.config._experts_implementation = "grouped_mm"
    tokens = torch.export.Dim("tokens", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=({0: tokens},) * 3, strict=False)
        rewritten = moe_compile.rewrite(program, experts)
        torch.export.save(rewritten, tmp_path / "block.pt2")
        more = tuple(torch.cat([value, value, value]) for value in inputs)
        for ready in (rewritten, rewritten.run_decompositions(), torch.export.load(tmp_path / "block.pt2")):
            torch.testing.assert_close(ready.module()(*more), module(*more), rtol=1e-5, atol=1e-5)
    assert all("_grouped_mm" not in str(node.target) for node in rewritten.graph.nodes)


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_what_make_fx_traces_is_rewritten(tracing_mode):
    model, x = block("gathered")
    parameters = dict(model.named_parameters())

    def call(parameters, x):
        return torch.func.functional_call(model, parameters, (x,))

    with torch.no_grad():
        traced = make_fx(call, tracing_mode=tracing_mode)(parameters, x)
        rewritten = moe_compile.rewrite(traced, "grouped_mm")
        torch.testing.assert_close(rewritten(parameters, x), model(x), rtol=1e-4, atol=1e-5)
    assert any("grouped_mm_fallback" in str(node.target) for node in rewritten.graph.nodes)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"experts": "nonsense"}, UnknownBackendError),
        ({"experts": {"": "grouped_mm", "layers.9.*": "eager"}}, SelectionError),
        ({"experts": "grouped_mm", "on_reject": "ignore"}, OptionError),
    ],
)
def test_bad_arguments_of_rewrite_are_refused(arguments, error):
    model, x = block("gathered")
    program = torch.export.export(model, (x,))
    with pytest.raises(error):
        moe_compile.rewrite(program, **arguments)
