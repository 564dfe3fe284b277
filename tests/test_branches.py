"""A choice at run time: one graph over all rungs of the ladder, with the numbers of the rung that applies."""

import pytest
import torch
from zoo import build, first_output, standalone

import moe_compile
from moe_compile import tables
from moe_compile.experts_backends import EXPERTS_BACKENDS
from moe_compile.kernels import switch
from moe_compile.tables import BlockSize, Measurement, Table

# The tiny models' blocks: batched_mm up to about 8 tokens, then grouped_mm, then batched_mm again.
TIMES = {
    2: {"batched_mm": 1.0, "grouped_mm": 4.0},
    8: {"batched_mm": 2.0, "grouped_mm": 4.0},
    12: {"batched_mm": 9.0, "grouped_mm": 5.0},
    32: {"batched_mm": 30.0, "grouped_mm": 9.0},
    64: {"batched_mm": 31.0, "grouped_mm": 90.0},
}
COUNTS = [4, 9, 12, 7, 33, 8, 10, 31, 64, 100, 13]

needs_branch_gradients = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="Inductor before torch 2.13 cannot differentiate a condition on a size"
)


@pytest.fixture(autouse=True)
def _table(_no_tables_of_the_users):
    name = tables.device_name("cpu")
    measurements = [
        Measurement(BlockSize(8, 2, 64, 48, dtype), training, False, TIMES)
        for dtype in ("float32", "bfloat16")
        for training in (False, True)
    ]
    table = Table(name, "cpu", None, "2026-12-01", {"torch": torch.__version__}, tuple(measurements))
    tables.write_table(table, tables.cache_file(name))


def backends_that_ran(function, *args):
    """Names of the backends whose code ran in a call, by the ops that only one of them has; and the call's result."""
    with torch.autograd.profiler.profile() as profile:
        result = function(*args)
    known = {"moe::grouped_mm_fallback": "grouped_mm", "aten::bmm": "batched_mm"}
    return {known[event.name] for event in profile.function_events if event.name in known}, result


def expected_name(tokens):
    from moe_compile.auto import find_ladder
    from moe_compile.rules import Situation
    from moe_compile.spec import ExpertsSpec

    spec = ExpertsSpec(
        num_experts=8, top_k=2, hidden_size=64, intermediate_size=48, weight_dtype=torch.float32, gated=True
    )
    return find_ladder(spec, Situation("cpu", device_name=tables.device_name("cpu"))).name_for(tokens)


def inputs_for(tokens, training=False):
    _, (hidden, ids, weights) = standalone("qwen3_moe", tokens=tokens)
    return hidden.requires_grad_(training), ids, weights.requires_grad_(training)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_one_graph_serves_every_token_count(mode):
    module, _ = standalone("qwen3_moe")
    backend = moe_compile.backend("auto", compiler="aot_eager")
    function = torch.compile(module, backend=backend, fullgraph=True, dynamic=True, mode=mode)
    with torch.no_grad():
        for tokens in COUNTS:
            inputs = inputs_for(tokens)
            torch.testing.assert_close(function(*inputs), module(*inputs), rtol=1e-4, atol=1e-5)
    if mode is None:
        assert len(backend.graphs) == 1
        (block,) = backend.blocks.values()
        assert block.chosen == "auto"
        assert [rung.name for rung in block.rungs] == ["batched_mm", "grouped_mm", "batched_mm"]
        assert {expected_name(tokens) for tokens in COUNTS} == {"batched_mm", "grouped_mm"}


def graph_of(module, mode=None):
    graphs = []
    backend = moe_compile.backend("auto", compiler=lambda gm, inputs: graphs.append(gm) or gm.forward)
    function = torch.compile(module, backend=backend, fullgraph=True, dynamic=True, mode=mode)
    with torch.no_grad():
        function(*inputs_for(5))
    (graph,) = graphs
    return graph, function


def targets(gm):
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_the_branch_that_runs_is_the_ladders():
    module, _ = standalone("qwen3_moe")
    ran = []

    def compiler(gm, inputs):
        def watched(*args):
            names, result = backends_that_ran(gm, *args)
            ran.append(names)
            return result

        return watched

    backend = moe_compile.backend("auto", compiler=compiler)
    function = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in COUNTS:
            function(*inputs_for(tokens))
            assert ran[-1] == {expected_name(tokens)}, tokens


def test_outside_cuda_graphs_it_is_a_condition():
    graph, _ = graph_of(standalone("qwen3_moe")[0])
    assert "cond" in targets(graph)
    assert not any("switch" in target for target in targets(graph))
    ops = {name for module in graph.modules() for name in targets(module)} if hasattr(graph, "graph") else set()
    assert not any(name.startswith(("moe.dispatch", "moe.grouped_linear", "moe.combine")) for name in ops)


def test_in_cuda_graph_modes_it_is_one_opaque_op_that_no_partition_splits(monkeypatch):
    """grouped_mm is not legal there; another backend that is takes its place in the ladder."""
    from dataclasses import replace

    record = replace(EXPERTS_BACKENDS["grouped_mm"], name="grouped_mm", reasons=lambda spec, situation: ())
    monkeypatch.setitem(EXPERTS_BACKENDS, "grouped_mm", record)
    module, _ = standalone("qwen3_moe")
    graph, function = graph_of(module, "reduce-overhead")
    assert "cond" not in targets(graph)
    assert targets(graph).count("moe.switch.default") == 1
    with torch.no_grad():
        for tokens in COUNTS:
            inputs = inputs_for(tokens)
            torch.testing.assert_close(function(*inputs), module(*inputs), rtol=1e-4, atol=1e-5)


def test_the_opaque_op_holds_its_contract():
    branches = [lambda x, n: (x * 2,), lambda x, n: (x * 3,)]
    switch.register_branches("test", branches)
    x = torch.randn(5, 4)
    for tokens, factor in ((5, 2), (6, 3)):
        arguments = ([x], [7], tokens, [5], "test", 4, torch.float32)
        assert torch.equal(torch.ops.moe.switch(*arguments), x * factor)
    torch.library.opcheck(torch.ops.moe.switch.default, ([x], [7], 5, [5], "test", 4, torch.float32))


@needs_branch_gradients
def test_gradients_flow_through_the_branch_that_ran():
    module, _ = standalone("qwen3_moe")
    module.train()
    backend = moe_compile.backend("auto", compiler="aot_eager")
    function = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for tokens in COUNTS[:6]:
        results = []
        for call in (module, function):
            module.zero_grad()
            inputs = inputs_for(tokens, training=True)
            output = call(*inputs)
            (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
            gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
            results.append({"output": output, "hidden": inputs[0].grad, "weights": inputs[2].grad, **gradients})
        for name, reference in results[0].items():
            torch.testing.assert_close(results[1][name], reference, rtol=1e-4, atol=1e-5, msg=f"{name} at T={tokens}")
    assert len(backend.graphs) == 1
    assert next(iter(backend.blocks.values())).chosen == "auto"


def test_a_whole_model_compiles_once_for_every_length():
    model, _ = build("qwen3_moe", torch.float32, "eager")
    backend = moe_compile.backend("auto", compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    compilations = set()
    with torch.no_grad():
        for length in (5, 12, 90):
            ids = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(length))
            inputs = {"input_ids": ids, "use_cache": False}
            expected = first_output(model(**inputs))
            torch.testing.assert_close(first_output(compiled(**inputs)), expected, rtol=1e-4, atol=1e-4)
            compilations.add(len(backend.graphs))
    # Dynamo may call a backend twice for one compilation, when it finds that a float has to be a constant after all.
    assert len(compilations) == 1
    assert [block.chosen for block in backend.blocks.values()] == ["auto", "auto"]


def test_a_static_token_count_needs_no_branch():
    module, inputs = standalone("qwen3_moe", tokens=7)
    backend = moe_compile.backend("auto", compiler="aot_eager")
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    (block,) = backend.blocks.values()
    assert (block.chosen, block.rungs) == ("batched_mm", ())


def test_bounds_on_the_token_count_leave_out_rungs():
    module, _ = standalone("qwen3_moe")
    backend = moe_compile.backend("auto", compiler="aot_eager")
    function = torch.compile(module, backend=backend, fullgraph=True)
    hidden, ids, weights = inputs_for(20)
    for tensor in (hidden, ids, weights):
        torch._dynamo.mark_dynamic(tensor, 0, min=14, max=30)
    with torch.no_grad():
        function(hidden, ids, weights)
    (block,) = backend.blocks.values()
    assert block.chosen == "grouped_mm_fallback"


def test_a_block_that_something_else_reads_into_gets_one_backend():
    def block(x, ids, weights, up, down):
        rows, offsets, order = torch.ops.moe.dispatch(x, ids, 8)
        hidden = torch.ops.moe.grouped_linear(rows, up, None, offsets, False).relu()
        out = torch.ops.moe.grouped_linear(hidden, down, None, offsets, False)
        return torch.ops.moe.combine(out, weights, order, x.dtype), hidden.sum()

    hidden, ids, weights = inputs_for(9)
    backend = moe_compile.backend("auto", compiler="aot_eager")
    up, down = torch.randn(8, 48, 64), torch.randn(8, 64, 48)
    with torch.no_grad():
        result = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)(hidden, ids, weights, up, down)
        torch.testing.assert_close(result, block(hidden, ids, weights, up, down), rtol=1e-4, atol=1e-3)
    (found,) = backend.blocks.values()
    assert found.chosen in ("batched_mm", "grouped_mm_fallback")


@pytest.mark.inductor
@pytest.mark.parametrize("training", [False, pytest.param(True, marks=needs_branch_gradients)])
def test_inductor_keeps_it_one_graph(training):
    module, _ = standalone("qwen3_moe")
    backend = moe_compile.backend("auto")
    function = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    with torch.set_grad_enabled(training):
        for tokens in (4, 33, 7, 100):
            inputs = inputs_for(tokens, training)
            output = function(*inputs)
            torch.testing.assert_close(output, module(*inputs), rtol=1e-4, atol=1e-5)
            if training:
                output.sum().backward()
    assert len(backend.graphs) == 1


def test_an_exported_program_with_dynamic_tokens_chooses_too():
    module, inputs = standalone("qwen3_moe", tokens=9)
    module.config._experts_implementation = "grouped_mm"

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = module

        def forward(self, hidden, ids, weights):
            return self.experts(hidden, ids, weights) * 2

    count = torch.export.Dim("count", min=2, max=4096)
    program = torch.export.export(Wrapped(), inputs, dynamic_shapes=({0: count}, {0: count}, {0: count}), strict=False)
    rewritten = moe_compile.rewrite(program, "auto")
    for tokens in (3, 20, 90):
        inputs = inputs_for(tokens)
        with torch.no_grad():
            torch.testing.assert_close(rewritten.module()(*inputs), 2 * module(*inputs), rtol=1e-4, atol=1e-5)
