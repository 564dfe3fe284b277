"""Both lowerings, through `torch.compile` and `torch.export`, against the per-token reference."""

import operator
import warnings
from dataclasses import replace

import pytest
import torch
from reference import DEVICES, assert_matches_reference, canonical, make_inputs, run_with_gradients, swiglu
from torch._inductor.utils import run_and_get_code
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from moe_compile.errors import MemoryWarning, RuleError
from moe_compile.kernels.grouped_mm_fallback import DIGEST
from moe_compile.passes import lower_batched_mm as batched_module
from moe_compile.passes import splice as splice_module
from moe_compile.passes.blocks import fake_value, find_canonical_blocks, is_canonical, needs_gradient
from moe_compile.passes.lower_batched_mm import lower_batched_mm
from moe_compile.passes.lower_grouped_mm import lower_grouped_mm, predict_from_spec, predict_grouped_mm
from moe_compile.passes.splice import fake_device

LOWERINGS = [lower_batched_mm, lower_grouped_mm]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Backend:
    """Lowers every block, checks the graph, and runs it through AOTAutograd; remembers what it saw."""

    def __init__(self, lower, compiler="aot_eager"):
        self.lower, self.compiler = lower, compiler
        self.names: list[str] = []
        self.graphs: list[GraphModule] = []
        self.new_nodes: set[Node] = set()

    def __call__(self, gm, example_inputs):
        blocks = find_canonical_blocks(gm)
        if self.lower is lower_grouped_mm:
            predicted = list(map(predict_grouped_mm, blocks))
            described = [self.predict_from_spec(block) for block in blocks]
        shape_env = torch._guards.detect_fake_mode(example_inputs).shape_env
        guards = len(shape_env.guards)
        before = all_nodes(gm)
        names = [self.lower(gm, block).name for block in blocks]
        assert len(shape_env.guards) == guards, "lowering guards on a size"
        if self.lower is lower_grouped_mm:
            assert names == [outcome.name for outcome in predicted]
            assert described == predicted, "the spec alone predicts something else"
        check_graphs(gm, before)
        self.names += names
        self.graphs.append(gm)
        self.new_nodes |= all_nodes(gm) - before
        return torch._dynamo.lookup_backend(self.compiler)(gm, example_inputs)

    @staticmethod
    def predict_from_spec(block):
        device = fake_device(block.dispatch)
        capability = torch.cuda.get_device_capability() if device.type == "cuda" else None
        training = needs_gradient(block.linears[0])
        return predict_from_spec(block.spec(), device_type=device.type, capability=capability, training=training)


def all_nodes(gm: GraphModule) -> set[Node]:
    return {node for module in gm.modules() if isinstance(module, GraphModule) for node in module.graph.nodes}


def check_graphs(gm: GraphModule, before: set[Node]) -> None:
    """No canonical op is left; what was put in their place is functional ATen, with a value on every node."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            module.graph.lint()
            module.recompile()
    new = all_nodes(gm) - before
    assert new
    for node in new:
        assert "example_value" in node.meta or "val" in node.meta
        assert node.users or node.target is _exit_autocast, "dead code, which exported programs run"
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable
            assert "detach" not in str(node.target)
        elif node.target not in (operator.getitem, _enter_autocast, _exit_autocast):
            assert isinstance(fake_value(node), torch.SymInt)  # arithmetic on sizes
    assert not any(map(is_canonical, all_nodes(gm)))


def compiled(backend, function=canonical):
    """`function` of `Inputs`, compiled with a dynamic token count from the first call on."""

    def tied(inputs):
        # In a model the routing is computed from x; as separate inputs their sizes would be symbols of their own.
        torch._check(inputs.weights.shape[0] == inputs.x.shape[0])
        return function(inputs)

    torch._dynamo.reset()
    program = torch.compile(tied, backend=backend, fullgraph=True)

    def call(inputs):
        if inputs.x.shape[0] > 1:
            for tensor in (inputs.x, inputs.ids, inputs.weights):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return program(inputs)

    return call


CASES = [
    *((BF16, bias, transposed) for bias in (False, True) for transposed in (False, True)),
    *((dtype, both, both) for dtype in (FP16, FP32) for both in (False, True)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lower", LOWERINGS)
@pytest.mark.parametrize(("dtype", "bias", "transposed"), CASES)
def test_values_and_gradients(device, lower, dtype, bias, transposed):
    backend = Backend(lower)
    call = compiled(backend)

    def inputs(num_tokens, sentinels):
        return make_inputs(
            num_tokens, dtype=dtype, bias=bias, transposed=transposed, sentinels=sentinels, device=device
        )

    for num_tokens, sentinels in ((33, True), (7, False), (7, True)):
        assert_matches_reference(call, inputs(num_tokens, sentinels))
    assert len(backend.graphs) == 1, "another token count made another graph"
    for num_tokens in (1, 0):
        assert_matches_reference(call, inputs(num_tokens, True))
    native = "grouped_mm" if dtype == BF16 else "grouped_mm_fallback"
    assert set(backend.names) == {"batched_mm" if lower is lower_batched_mm else native}


@pytest.mark.parametrize("lower", LOWERINGS)
def test_the_token_count_stays_symbolic(lower):
    backend = Backend(lower)
    compiled(backend)(make_inputs(33, dtype=BF16))
    (gm,) = backend.graphs
    result = gm.graph.output_node().args[0][0]
    size = result.meta["example_value"].shape[0]
    assert isinstance(size, torch.SymInt)
    assert size.node.expr.is_symbol


@pytest.fixture
def uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("lower", LOWERINGS)
def test_what_a_kernel_leaves_unwritten_is_never_read(lower, dtype, device):
    def scaled(inputs):  # the rows' own gradient, summed per row, reaches the routing weights
        rows, offsets, order = torch.ops.moe.dispatch(inputs.x, inputs.ids, 4, "")
        hidden = swiglu(torch.ops.moe.grouped_linear(rows, inputs.up, None, offsets, False))
        hidden = hidden * inputs.weights.reshape(-1)[order].unsqueeze(1)
        out = torch.ops.moe.grouped_linear(hidden, inputs.down, None, offsets, False)
        return torch.ops.moe.combine(out, torch.ones_like(inputs.weights), order, inputs.x.dtype)

    inputs = make_inputs(9, dtype=dtype, device=device)
    inputs.ids[4] = 4
    for function in (canonical, scaled):
        results = run_with_gradients(compiled(Backend(lower), function), inputs)
        assert all(result.isfinite().all() for result in results)
        assert all(result[4].abs().max() == 0 for result in results[:3])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lower", LOWERINGS)
def test_sentinels_and_empty_experts_are_exactly_zero(lower, device):
    inputs = make_inputs(9, dtype=BF16, bias=True, device=device)
    inputs.ids = torch.full_like(inputs.ids, 2)
    inputs.ids[4] = torch.tensor([-1, 2**32 + 2])  # the second is expert 2 to whoever drops the upper half
    out, x_grad, routing_grad, *weight_grads = assert_matches_reference(compiled(Backend(lower)), inputs)
    for result in (out[4], x_grad[4], routing_grad[4], *(grad[[0, 1, 3]] for grad in weight_grads)):
        assert result.abs().max() == 0


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("lower", LOWERINGS)
def test_what_a_gate_makes_of_dropped_rows_goes_nowhere(lower, dtype):
    def reciprocal(hidden):
        return (1 / hidden)[:, :24]  # infinite where a row is zero; a strided view

    inputs = make_inputs(9, dtype=dtype)
    inputs.ids[4] = 4
    results = run_with_gradients(compiled(Backend(lower), lambda i: canonical(i, reciprocal)), inputs)
    assert all(result.isfinite().all() for result in results)
    assert all(result[4].abs().max() == 0 for result in results[:3])


GATES = {
    "transposed_rows": lambda hidden: (hidden[:, :24].t().contiguous() * 2).t(),
    "transposed_gradient": lambda hidden: (torch.eye(24, 48, dtype=hidden.dtype) @ hidden.t().contiguous()).t(),
    "expanded_gradient": lambda hidden: hidden.sum(-1, keepdim=True).expand(*hidden.shape[:-1], 24),
    "interleaved": lambda hidden: torch.relu(hidden[..., ::2]) * hidden[..., 1::2],
    "strided_view": lambda hidden: hidden[..., ::2],
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_gates_of_any_layout_run_natively(gate):
    backend = Backend(lower_grouped_mm)
    inputs = make_inputs(9, dtype=BF16, sentinels=True)
    actual = run_with_gradients(compiled(backend, lambda i: canonical(i, gate)), inputs)
    assert backend.names == ["grouped_mm"]
    expected = run_with_gradients(lambda i: canonical(i, gate), inputs)
    for got, reference in zip(actual, expected, strict=True):
        eps = torch.finfo(BF16).eps
        torch.testing.assert_close(got, reference, rtol=2 * eps, atol=2 * eps * reference.abs().max().item())


@pytest.mark.parametrize("lower", LOWERINGS)
def test_routing_weights_on_the_input(lower):
    def on_input(inputs):
        rows, offsets, order = torch.ops.moe.dispatch(inputs.x, inputs.ids, 4, "")
        rows = rows * inputs.weights.reshape(-1)[order].unsqueeze(1)
        hidden = torch.ops.moe.grouped_linear(rows, inputs.up, None, offsets, False)
        out = torch.ops.moe.grouped_linear(swiglu(hidden), inputs.down, None, offsets, False)
        return torch.ops.moe.combine(out, torch.ones_like(inputs.weights), order, inputs.x.dtype)

    inputs = make_inputs(9, sentinels=True)
    actual = run_with_gradients(compiled(Backend(lower), on_input), inputs)
    expected = run_with_gradients(on_input, inputs)
    for got, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, reference)


def test_only_the_projection_that_does_not_fit_falls_back():
    def graph(inputs, training):
        backend = Backend(lower_grouped_mm)
        with torch.set_grad_enabled(training):
            compiled(backend)(inputs)
        code = backend.graphs[0].code
        assert DIGEST in code  # an argument of every fallback, for AOTAutograd's cache
        return backend.names[0], code.count("aten._grouped_mm"), code.count("moe.grouped_mm_fallback")

    # 20 features into the second projection: a stride that is no multiple of 16 bytes. The first one's 40 is one.
    inputs = make_inputs(9, dtype=BF16, intermediate=20)
    assert graph(inputs, training=True) == ("grouped_mm_fallback", 1, 1)
    # 12 features in and out: the first projection's rows, and the second's gradients, do not fit.
    inputs = make_inputs(9, dtype=BF16, hidden=12)
    assert graph(inputs, training=True) == ("grouped_mm_fallback", 0, 2)
    assert graph(inputs, training=False) == ("grouped_mm_fallback", 1, 1)


@pytest.mark.parametrize("lower", LOWERINGS)
def test_blocks_under_activation_checkpointing(lower):
    def checkpointed(inputs):
        return checkpoint(lambda x: canonical(replace(inputs, x=x)), inputs.x, use_reentrant=False)

    assert_matches_reference(compiled(Backend(lower), checkpointed), make_inputs(9, sentinels=True))


@pytest.mark.parametrize("ambient", [False, True])
@pytest.mark.parametrize("lower", LOWERINGS)
def test_autocast_does_not_reach_into_a_block(lower, ambient):
    def under_autocast(inputs):
        with torch.autocast("cpu", dtype=BF16):
            return canonical(inputs)

    inputs = make_inputs(9)
    call = compiled(Backend(lower), canonical if ambient else under_autocast)
    with torch.autocast("cpu", dtype=BF16, enabled=ambient):
        out = call(inputs)
    torch.testing.assert_close(out, canonical(inputs))  # to the precision of float32


@pytest.mark.parametrize("mixed", ["weights", "routing"])
@pytest.mark.parametrize("lower", LOWERINGS)
def test_mixed_dtypes_give_what_the_canonical_ops_give(lower, mixed):
    inputs = make_inputs(9)
    if mixed == "weights":
        inputs.up, inputs.down = (w.detach().to(BF16).requires_grad_() for w in (inputs.up, inputs.down))
    else:
        inputs = inputs.to(BF16)
        inputs.weights = inputs.weights.detach().float().requires_grad_()
    actual = run_with_gradients(compiled(Backend(lower)), inputs)
    expected = run_with_gradients(canonical, inputs)
    for got, reference in zip(actual, expected, strict=True):
        assert got.dtype == reference.dtype
        eps = torch.finfo(BF16).eps
        torch.testing.assert_close(got, reference, rtol=2 * eps, atol=2 * eps * reference.abs().max().item())


@pytest.mark.parametrize("lower", LOWERINGS)
def test_equal_blocks_are_traced_once(lower, monkeypatch):
    traced = []
    trace = splice_module._trace
    monkeypatch.setattr(splice_module, "_trace", lambda *a: traced.append(a[0].__name__) or trace(*a))

    def many(layers):
        def model(inputs):
            for _ in range(layers):
                inputs = replace(inputs, x=canonical(inputs))
            return inputs.x

        traced.clear()
        compiled(Backend(lower), model)(make_inputs(9))
        return len(traced)

    assert many(4) == many(2)


@pytest.mark.parametrize("lower", LOWERINGS)
def test_new_nodes_say_where_they_come_from(lower):
    class Experts(torch.nn.Module):
        def forward(self, inputs):
            return canonical(inputs)

    backend = Backend(lower)
    compiled(backend, Experts())(make_inputs(9))
    for node in backend.new_nodes:
        assert "torch.ops.moe." in node.meta["stack_trace"]
        assert any(kind is Experts for _, kind in node.meta["nn_module_stack"].values())


def test_batched_mm_warns_once_of_the_bytes_it_copies(monkeypatch):
    monkeypatch.setattr(batched_module, "WARN_BYTES", 1000)

    def two_layers(inputs):
        return canonical(replace(inputs, x=canonical(inputs)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(Backend(lower_batched_mm), two_layers)(make_inputs(9))
    messages = [str(warning.message) for warning in caught if warning.category is MemoryWarning]
    assert len(messages) == 1
    num_bytes = 9 * 2 * (48 * 16 + 16 * 24) * 4
    assert f"copies {num_bytes} bytes" in messages[0]


def test_batched_mm_refuses_a_reader_of_the_sorted_layout():
    def reads_offsets(inputs):
        rows, offsets, order = torch.ops.moe.dispatch(inputs.x, inputs.ids, 4, "layer.experts")
        hidden = swiglu(torch.ops.moe.grouped_linear(rows, inputs.up, None, offsets, False))
        out = torch.ops.moe.grouped_linear(hidden * offsets[-1], inputs.down, None, offsets, False)
        return torch.ops.moe.combine(out, inputs.weights, order, inputs.x.dtype)

    with pytest.raises(RuleError, match=r"'batched_mm' for layer.experts"):
        compiled(Backend(lower_batched_mm), reads_offsets)(make_inputs(9))
    out = compiled(Backend(lower_grouped_mm), reads_offsets)(make_inputs(9))
    torch.testing.assert_close(out, reads_offsets(make_inputs(9)))


class Exportable(torch.nn.Module):
    def __init__(self, inputs, autocast=False):
        super().__init__()
        self.inputs, self.autocast = replace(inputs, x=None, ids=None, weights=None), autocast
        for name in ("up", "down", "up_bias", "down_bias"):
            setattr(self, name, torch.nn.Parameter(getattr(inputs, name).detach()))

    def forward(self, x, ids, weights):
        parameters = {name: getattr(self, name) for name in ("up", "down", "up_bias", "down_bias")}
        with torch.autocast("cpu", dtype=BF16, enabled=self.autocast):
            return canonical(replace(self.inputs, x=x, ids=ids, weights=weights, **parameters))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("lower", LOWERINGS)
def test_exported_programs(lower, dtype, autocast):
    def example(num_tokens):
        inputs = make_inputs(num_tokens, dtype=dtype, bias=True, sentinels=True)
        return inputs.x.detach(), inputs.ids, inputs.weights.detach()

    module = Exportable(make_inputs(1, dtype=dtype, bias=True), autocast)
    dynamic = torch.export.Dim("tokens")
    program = torch.export.export(module, example(9), dynamic_shapes=[{0: dynamic}] * 3)
    blocks = find_canonical_blocks(program.graph_module)
    assert len(blocks) == 1
    before = all_nodes(program.graph_module)
    lower(program.graph_module, blocks[0])
    check_graphs(program.graph_module, before)
    lowered = program._update(program.graph_module, program.graph_signature)
    lowered.validate()
    reference = Exportable(make_inputs(1, dtype=dtype, bias=True))
    for runnable in (lowered.module(), lowered.run_decompositions().module()):
        for num_tokens in (0, 1, 7, 33):
            out, expected = runnable(*example(num_tokens)), reference(*example(num_tokens))
            eps = torch.finfo(dtype).eps
            scale = expected.abs().max().item() if num_tokens else 0
            torch.testing.assert_close(out, expected, rtol=2 * eps, atol=8 * eps * scale)


def test_an_exported_program_can_be_trained():
    inputs = make_inputs(9, dtype=BF16, bias=True, sentinels=True)
    for lower in LOWERINGS:
        program = torch.export.export(Exportable(inputs), (inputs.x, inputs.ids, inputs.weights))
        lower(program.graph_module, find_canonical_blocks(program.graph_module)[0])
        program.graph_module.recompile()
        runnable = program.module()

        def run(given, runnable=runnable):
            parameters = {name: getattr(given, name) for name in ("up", "down", "up_bias", "down_bias")}
            return torch.func.functional_call(runnable, parameters, (given.x, given.ids, given.weights))

        assert_matches_reference(run, inputs)


@pytest.mark.inductor
def test_inductor_fuses_the_weight_gather_of_one_token():
    backend = Backend(lower_batched_mm, "inductor")
    inputs = make_inputs(1, dtype=BF16)
    with torch.no_grad():
        out, (code,) = run_and_get_code(compiled(backend), inputs)
    assert "extern_kernels.bmm" not in code  # which would have to read the gathered weights from memory
    torch.testing.assert_close(out, canonical(inputs).detach(), rtol=0.02, atol=0.02 * out.abs().max().item())


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_inductor_trains_grouped_mm(dtype):
    inputs = make_inputs(9, dtype=dtype, bias=True, sentinels=True)
    assert_matches_reference(compiled(Backend(lower_grouped_mm, "inductor")), inputs)
