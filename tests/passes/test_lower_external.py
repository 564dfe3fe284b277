"""`deepgemm` and `sonicmoe` from backend to numbers, on stand-ins that keep the real kernels' contract."""

import copy
import traceback
from dataclasses import replace

import pytest
import torch
from external_kernels import DEEP_GEMM, SONIC_MOE, import_package, write_package
from reference import assert_matches_reference, canonical, make_inputs, per_token, swiglu
from torch.nn import functional
from zoo import relative_error, standalone

import moe_compile
from moe_compile import decision
from moe_compile.auto import Ladder, Rung
from moe_compile.errors import FallbackWarning, RewriteError
from moe_compile.experts_backends import EXPERTS_BACKENDS
from moe_compile.external import loaded_kernels, register_loader
from moe_compile.passes.blocks import find_canonical_blocks, is_canonical
from moe_compile.passes.match_gate import match_gate
from moe_compile.passes.region import find_region

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def stand_ins(tmp_path, monkeypatch):
    """Both kernels from a loader, and both backends legal on this machine."""
    modules = {}
    for name, sources in (("deepgemm", DEEP_GEMM), ("sonicmoe", SONIC_MOE)):
        modules[name] = import_package(write_package(tmp_path / name, sources), f"stand_in_{name}")
        register_loader(name, lambda name=name: modules[name])
        monkeypatch.setitem(EXPERTS_BACKENDS, name, replace(EXPERTS_BACKENDS[name], reasons=lambda spec, situation: ()))
    yield modules
    for name in modules:
        register_loader(name, None)


class Watch:
    """A compiler that keeps the rewritten graph and runs it through AOTAutograd."""

    def __init__(self):
        self.graphs = []

    def __call__(self, gm, inputs):
        self.graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    def targets(self):
        return [str(node.target) for gm in self.graphs for node in gm.graph.nodes]


def compiled(experts, function=canonical, gate=swiglu):
    watch = Watch()

    def run(inputs):
        torch._check(inputs.weights.shape[0] == inputs.x.shape[0])
        return function(inputs, gate)

    torch._dynamo.reset()
    return torch.compile(run, backend=moe_compile.backend(experts, compiler=watch), fullgraph=True), watch


def interleaved_swiglu(hidden):
    return functional.silu(hidden[..., ::2]) * hidden[..., 1::2]


def geglu(hidden):
    gate, up = hidden.chunk(2, -1)
    return up * functional.gelu(gate, approximate="tanh")


def reglu(hidden):
    half = hidden.shape[-1] // 2
    return functional.relu(hidden[..., :half]) * hidden[..., half:]


def softmax_gate(hidden):
    gate, up = hidden.chunk(2, -1)
    return gate.softmax(-1) * up.tanh() + 0.5


def close_to_reference(output, inputs, gate=swiglu):
    with torch.no_grad():
        exact = per_token(inputs.to(torch.float64), gate)
        rounded = per_token(inputs.to(BF16), gate).double()
    budget = 2 * (rounded - exact).abs().max() + 2 * torch.finfo(BF16).eps * exact.abs().max()
    assert (output.double() - exact).abs().max() <= budget


@torch.no_grad()
@pytest.mark.parametrize("gate", [swiglu, softmax_gate])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_deepgemm_keeps_rows_padded_from_dispatch_to_combine(bias, transposed, gate, stand_ins):
    call, watch = compiled("deepgemm", gate=gate)
    for tokens in (7, 33, 1):
        inputs = make_inputs(tokens, dtype=BF16, bias=bias, transposed=transposed, sentinels=True, seed=tokens)
        close_to_reference(call(inputs), inputs, gate)
    targets = watch.targets()
    assert not any(is_canonical(node) for gm in watch.graphs for node in gm.graph.nodes)
    assert targets.count("moe_deepgemm.grouped_gemm.default") == 2 * len(watch.graphs)
    assert "moe_deepgemm.pad.default" not in targets
    assert len(watch.graphs) <= 3
    # The weights reach the kernel as the model stores them.
    assert {pointer for *_, pointer in stand_ins["deepgemm"].CALLS} >= {inputs.up.data_ptr(), inputs.down.data_ptr()}


def weight_on_the_input(inputs, gate):
    rows, offsets, order = torch.ops.moe.dispatch(inputs.x, inputs.ids, inputs.up.shape[0], "")
    rows = rows * inputs.weights.reshape(-1)[order].unsqueeze(1)
    hidden = torch.ops.moe.grouped_linear(rows, inputs.up, inputs.up_bias, offsets, inputs.transposed)
    out = torch.ops.moe.grouped_linear(gate(hidden), inputs.down, inputs.down_bias, offsets, inputs.transposed)
    return torch.ops.moe.combine(out, torch.ones_like(inputs.weights), order, inputs.x.dtype, offsets)


def rows_counted(inputs, gate):
    def with_index(hidden):
        return gate(hidden) + 0 * torch.arange(hidden.shape[0], dtype=hidden.dtype).unsqueeze(1)

    return canonical(inputs, with_index)


@torch.no_grad()
@pytest.mark.parametrize("function", [weight_on_the_input, rows_counted])
def test_deepgemm_pads_each_projection_where_something_reads_the_rows(function):
    call, watch = compiled("deepgemm", function)
    inputs = make_inputs(9, dtype=BF16, bias=True, sentinels=True)
    output = call(inputs)
    assert watch.targets().count("moe_deepgemm.pad.default") == 2
    assert not any(is_canonical(node) for gm in watch.graphs for node in gm.graph.nodes)
    eager = function(inputs, swiglu)
    assert (output.float() - eager.float()).abs().max() <= 0.02 * eager.float().abs().max()


@torch.no_grad()
def test_deepgemm_has_one_shape_for_all_routings(stand_ins):
    call, _ = compiled("deepgemm")
    for expert in range(4):
        inputs = make_inputs(24, dtype=BF16)
        inputs.ids.fill_(expert)  # all others get no token
        close_to_reference(call(inputs), inputs)
    assert len({shapes[0] for *shapes, _ in stand_ins["deepgemm"].CALLS[::2]}) == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("gate", "transposed"),
    [
        (swiglu, False),
        (interleaved_swiglu, False),
        (interleaved_swiglu, True),
        (swiglu, True),
        (geglu, False),
        (reglu, False),
    ],
)
def test_sonicmoe_trains(gate, transposed, bias):
    call, watch = compiled("sonicmoe", gate=gate)
    for tokens, sentinels in ((12, False), (31, True)):
        inputs = make_inputs(tokens, dtype=BF16, bias=bias, transposed=transposed, sentinels=sentinels, seed=tokens)
        inputs.ids[inputs.ids == 2] = 1  # one expert without tokens
        results = assert_matches_reference(call, inputs, gate)
        for grad in results[3:]:
            assert grad[2].count_nonzero() == 0
    assert not any(is_canonical(node) for gm in watch.graphs for node in gm.graph.nodes)
    fused = gate is not swiglu or not transposed
    assert ("moe_sonicmoe.experts.default" in watch.targets()) == fused


@torch.no_grad()
def test_sonicmoe_keeps_nothing_for_a_backward_in_inference():
    call, watch = compiled("sonicmoe")
    inputs = make_inputs(5, dtype=BF16)
    close_to_reference(call(inputs), inputs)
    (node,) = [n for gm in watch.graphs for n in gm.graph.nodes if n.target is torch.ops.moe_sonicmoe.experts.default]
    assert node.meta["example_value"][1].shape[0] == 0


@torch.no_grad()
def test_no_tokens_at_all():
    for experts in ("deepgemm", "sonicmoe"):
        call, _ = compiled(experts)
        assert call(make_inputs(0, dtype=BF16)).shape == (0, 16)


def test_sonicmoe_refuses_a_gate_that_it_does_not_compute():
    call, _ = compiled("sonicmoe", gate=softmax_gate)
    with pytest.raises(RewriteError, match="sonicmoe runs the whole block in one kernel, and the gate"):
        call(make_inputs(4, dtype=BF16))


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (swiglu, ("silu", True)),
        (interleaved_swiglu, ("silu", False)),
        (geglu, ("gelu_tanh", True)),
        (reglu, ("relu", True)),
        (lambda h: h.chunk(2, -1)[0] * functional.silu(h.chunk(2, -1)[1]), "no activation of one half"),
        (lambda h: functional.silu(h[:, :24]) * functional.silu(h[:, 24:]), "no activation of one half"),
        (lambda h: functional.silu(h[:, :24].float()).to(h.dtype) * h[:, 24:], "no activation of one half"),
        (lambda h: functional.silu(h[:, :24].clamp(max=1)) * h[:, 24:], "no activation of one half"),
        (lambda h: functional.silu(h[:, :24]) * h[:, 24:] + 1, "not in a product"),
        (lambda h: functional.silu(h[:, 24:]) * h[:, :24], "no activation of one half"),
        (lambda h: functional.silu(h[:, 1::2]) * h[:, ::2], "no activation of one half"),
        (lambda h: functional.silu(h[:, ::2]) * h[:, 24:], "no activation of one half"),
        (lambda h: functional.silu(h[:, :24]) * h[:, :24], "no activation of one half"),
    ],
)
def test_gates_are_read_off_their_operators(gate, expected):
    found = []

    def look(gm, inputs):
        region = find_region(find_canonical_blocks(gm)[0])
        found.append(match_gate(gm, region))
        return gm.forward

    inputs = make_inputs(4, dtype=BF16)
    torch.compile(lambda i: canonical(i, gate), backend=look, fullgraph=True)(inputs)
    if isinstance(expected, str):
        assert expected in found[0]
    else:
        assert (found[0].kind, found[0].concatenated) == expected


@torch.no_grad()
def test_reports_say_what_was_loaded(stand_ins):
    frames = []

    def loader():
        frames.extend(frame.name for frame in traceback.extract_stack())
        return stand_ins["deepgemm"]

    register_loader("deepgemm", loader)
    compiled("grouped_mm")[0](make_inputs(3, dtype=BF16))
    call, _ = compiled("deepgemm")
    assert frames == []
    call(make_inputs(3, dtype=BF16))
    assert "call_user_compiler" in frames, "it is loaded once the graph has been traced"
    (kernel,) = [kernel for kernel in loaded_kernels() if kernel.name == "deepgemm"]
    assert kernel.source == "registered loader"
    assert kernel.origin.endswith("deepgemm/__init__.py")


@torch.no_grad()
@pytest.mark.parametrize(
    ("experts", "policy", "broken"), [("deepgemm", "fallback", lambda: 1 / 0), ("auto", "error", lambda: object())]
)
def test_the_next_backend_runs_where_a_kernel_cannot_be_loaded(experts, policy, broken, monkeypatch):
    register_loader("deepgemm", broken)
    ladder = Ladder((Rung("deepgemm", 0, None),), "made up")
    monkeypatch.setattr(decision, "find_ladder", lambda spec, situation: ladder)
    module, inputs = standalone("qwen3_moe", BF16)
    backend = moe_compile.backend(experts, compiler="aot_eager", on_reject=policy)
    torch._dynamo.reset()
    with pytest.warns(FallbackWarning, match="'deepgemm': loading deepgemm .* grouped_mm runs instead"):
        output = torch.compile(module, backend=backend, fullgraph=True)(*inputs)
    assert relative_error(output.float(), module(*inputs).float()) < 0.01
    (block,) = backend.blocks.values()
    assert block.chosen.startswith("grouped_mm")
    assert "loading deepgemm" in block.reasons["deepgemm"]


@torch.no_grad()
@pytest.mark.parametrize("experts", ["deepgemm", "sonicmoe"])
def test_whole_models_and_explain(experts):
    module, inputs = standalone("qwen3_moe", BF16)
    report = moe_compile.explain(module, *inputs, backend=experts)
    assert {block.chosen for block in report.blocks} == {experts}
    assert [kernel.name for kernel in report.kernels] == [experts]
    assert "registered loader" in str(report)
    output = torch.compile(module, backend=moe_compile.backend(experts, compiler="aot_eager"), fullgraph=True)(*inputs)
    exact = copy.deepcopy(module).float()(inputs[0].float(), inputs[1], inputs[2].float())
    own = relative_error(module(*inputs).float(), exact)
    assert relative_error(output.float(), exact) <= 1.5 * own + torch.finfo(BF16).eps
