"""What is recognised, what is refused, and that a rewrite changes nothing but the spelling."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recognize_models import REFUSED, REWRITTEN, D, E, K
from torch import Tensor, nn
from torch.fx import GraphModule

import moe_compile
from moe_compile.passes.match import Match, Rejection
from moe_compile.passes.recognize import apply, recognize


class Recorder:
    """A Dynamo backend that recognises, rewrites and runs the graph as it is."""

    def __init__(self) -> None:
        self.matches: list[Match] = []
        self.rejections: list[Rejection] = []
        self.graphs: list[GraphModule] = []
        self.before: list[list[tuple[Any, ...]]] = []

    def __call__(self, gm: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.before.append(spelling(gm))
        matches, self.rejections = recognize(gm)
        assert self.before[-1] == spelling(gm), "recognising changed the graph"
        self.matches += matches
        apply(gm, [(match, f"block{i}") for i, match in enumerate(matches)])
        self.graphs.append(gm)
        return gm.forward


def spelling(gm: GraphModule) -> list[tuple[Any, ...]]:
    return [(node.name, node.op, node.target, str(node.args), str(node.kwargs)) for node in gm.graph.nodes]


def targets(gm: GraphModule) -> set[str]:
    return {str(node.target) for node in gm.graph.nodes}


def build(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype)


def compiled(model: nn.Module, x_TD: Tensor, dynamic: bool = False) -> tuple[Callable[..., Any], Recorder]:
    torch._dynamo.reset()
    recorder = Recorder()
    if dynamic:
        torch._dynamo.mark_dynamic(x_TD, 0)
    return torch.compile(model, backend=recorder, fullgraph=True), recorder


def run(function: Callable[..., Any], model: nn.Module, x_TD: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of the input and all parameters."""
    model.zero_grad()
    x_TD = x_TD.clone().requires_grad_()
    out = function(x_TD)
    out = out[0] if isinstance(out, tuple) else out
    probe = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    (out * probe).sum().backward()
    zero = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [out.detach(), x_TD.grad, *zero]  # type: ignore[list-item]


def assert_equal(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    """Within what the dtype of the products costs, relative to the largest entry or, where all cancels, to 0.1."""
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    for a, b in zip(actual, expected, strict=True):
        scale = float(b.abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(scale, 0.1))


def products_dtype(name: str) -> torch.dtype:
    """The sorted models multiply in bfloat16, as `grouped_mm` compiles in no other dtype."""
    return torch.bfloat16 if name.startswith("sorted") else torch.float32


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REWRITTEN)
def test_outputs_and_gradients(name: str, dtype: torch.dtype) -> None:
    model = build(REWRITTEN[name], dtype)
    x_TD = torch.randn(7, D, dtype=dtype)
    function, recorder = compiled(model, x_TD)
    actual = run(function, model, x_TD)
    assert [(r.reason, r.node) for r in recorder.rejections] == []
    assert len(recorder.matches) == 1
    assert "moe.dispatch.default" in targets(recorder.graphs[0])
    assert_equal(actual, run(model, model, x_TD), dtype if dtype is torch.bfloat16 else products_dtype(name))


@pytest.mark.parametrize("name", REWRITTEN)
def test_any_number_of_tokens(name: str) -> None:
    model = build(REWRITTEN[name])
    x_TD = torch.randn(7, D)
    function, recorder = compiled(model, x_TD, dynamic=True)
    function(x_TD)
    assert [(r.reason, r.node) for r in recorder.rejections] == []
    assert len(recorder.matches) == 1
    for tokens in (33, 2, 12):
        x_TD = torch.randn(tokens, D)
        assert_equal(run(function, model, x_TD), run(model, model, x_TD), products_dtype(name))
    assert len(recorder.graphs) <= 2, "once for inference, once for training"


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("name", ["sorted", "gathered", "loop", "loop, +=", "loop, stacked weights"])
def test_few_and_many_tokens(name: str, tokens: int) -> None:
    model = build(REWRITTEN[name])
    x_TD = torch.randn(tokens, D)
    function, recorder = compiled(model, x_TD)
    actual = run(function, model, x_TD)
    assert [(r.reason, r.node) for r in recorder.rejections] == []
    assert len(recorder.matches) == 1
    assert_equal(actual, run(model, model, x_TD), products_dtype(name))


@pytest.mark.parametrize("name", ["gathered", "loop", "loop, +=", "loop, stacked weights"])
def test_no_tokens(name: str) -> None:
    model = build(REWRITTEN[name])
    x_TD = torch.randn(0, D)
    function, recorder = compiled(model, x_TD)
    assert_equal(run(function, model, x_TD), run(model, model, x_TD), torch.float32)
    assert recorder.matches == []


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason_and_untouched(name: str) -> None:
    make, words = REFUSED[name]
    model = build(make)
    x_TD = torch.randn(9, D)
    function, recorder = compiled(model, x_TD)
    function(x_TD)
    assert recorder.matches == []
    (rejection,) = recorder.rejections
    assert words in rejection.reason
    names = [line[0] for line in recorder.before[0]]
    assert rejection.node in names
    assert rejection.source is not None
    assert rejection.source.startswith("recognize_models.py:")
    assert recorder.before[0] == spelling(recorder.graphs[0])


def test_spec_and_place() -> None:
    model = nn.Sequential(build(REWRITTEN["loop, biases"]), build(REWRITTEN["gathered, transposed weights"]))
    x_TD = torch.randn(7, D)
    function, recorder = compiled(model, x_TD)
    function(x_TD)
    loop, gathered = recorder.matches
    assert (loop.form, loop.path, loop.num_tokens) == ("expert_loop", "0", 7)
    assert (gathered.form, gathered.path) == ("batched_mm", "1")
    assert loop.source is not None
    assert loop.source.startswith("recognize_models.py:")
    for spec in (loop.spec, gathered.spec):
        assert (spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size) == (E, K, D, D // 2)
        assert (spec.gated, spec.concatenated, spec.gate.kind, spec.bias) == (True, True, "silu", True)
        assert (spec.weight_dtype, spec.routing_weight) == (torch.float32, "output")
    assert (loop.spec.transposed, gathered.spec.transposed) == (False, True)
    assert (gathered.spec.up, gathered.spec.down) == ("up", "down")


def test_weight_on_the_input_stays_there() -> None:
    model = build(REWRITTEN["sorted, weight on the input"])
    function, recorder = compiled(model, torch.randn(7, D))
    function(torch.randn(7, D))
    assert recorder.matches[0].spec.routing_weight == "input"


def test_tag_and_metadata() -> None:
    model = build(REWRITTEN["loop"])
    function, recorder = compiled(model, torch.randn(7, D))
    function(torch.randn(7, D))
    (gm,) = recorder.graphs
    (dispatch,) = (n for n in gm.graph.nodes if n.target is torch.ops.moe.dispatch.default)
    assert dispatch.args[3] == "block0"
    for node in gm.graph.nodes:
        assert node.op == "output" or "example_value" in node.meta
    assert not any("where" in t or "_assert" in t or "index_add" in t for t in targets(gm))


def test_what_is_skipped_is_not_searched() -> None:
    model = nn.Sequential(build(REWRITTEN["loop"]), build(REWRITTEN["gathered"]))
    found: list[tuple[list[Match], list[Rejection]]] = []

    def backend(gm: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append(recognize(gm, lambda path: path == "0"))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(7, D))
    ((matches, rejections),) = found
    assert [match.path for match in matches] == ["1"]
    assert rejections == []


def test_one_refused_block_does_not_keep_the_other() -> None:
    model = nn.Sequential(build(REFUSED["loop, missing"][0]), build(REWRITTEN["loop"]))
    x_TD = torch.randn(7, D)
    function, recorder = compiled(model, x_TD)
    assert_equal(run(function, model, x_TD), run(model, model, x_TD), torch.float32)
    assert [match.path for match in recorder.matches] == ["1"]
    assert [rejection.path for rejection in recorder.rejections] == ["0"]


def test_inside_activation_checkpointing() -> None:
    inner = build(REWRITTEN["loop"])

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x_TD: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x_TD, use_reentrant=False)  # type: ignore[no-any-return]

    model, x_TD = Checkpointed(), torch.randn(7, D)
    torch._dynamo.reset()
    recorder = Recorder()
    function = torch.compile(model, backend=recorder, fullgraph=True)
    assert_equal(run(function, model, x_TD), run(model, model, x_TD), torch.float32)
    assert len(recorder.matches) == 1


@pytest.mark.parametrize("name", ["gathered", "sorted", "loop", "loop, assignment"])
@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_program(name: str, decomposed: bool) -> None:
    model = build(REWRITTEN[name])
    x_TD = torch.randn(7, D)
    program = torch.export.export(model, (x_TD,), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    if decomposed:
        program = program.run_decompositions({})
    gm = program.graph_module
    matches, rejections = recognize(gm)
    assert [(r.reason, r.node) for r in rejections] == []
    apply(gm, [(match, "") for match in matches])
    assert "moe.dispatch.default" in targets(gm)
    torch.testing.assert_close(program.module()(x_TD), model(x_TD))


def test_intermediates_read_elsewhere_stay_alive() -> None:
    class Counting(REWRITTEN["loop"]):  # type: ignore[misc, valid-type]
        def forward(self, x_TD: Tensor) -> Any:
            weights_TK, ids_TK = self.route(x_TD)
            tokens = torch.stack([torch.where(ids_TK == e)[0].sum() for e in range(E)])
            return self.experts(x_TD, ids_TK, weights_TK), tokens

    model = build(Counting)
    x_TD = torch.randn(7, D)
    function, recorder = compiled(model, x_TD)
    expected, actual = model(x_TD), function(x_TD)
    assert len(recorder.matches) == 1
    torch.testing.assert_close(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


def test_equal_layers_are_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("moe_compile.passes.recognize")
    calls: list[Any] = []
    original = module.normalize
    monkeypatch.setattr(module, "normalize", lambda *given: calls.append(given) or original(*given))
    model = nn.Sequential(*[build(REWRITTEN["loop"]) for _ in range(6)])
    x_TD = torch.randn(7, D)
    function, recorder = compiled(model, x_TD)
    assert_equal(run(function, model, x_TD), run(model, model, x_TD), torch.float32)
    assert len(recorder.matches) == 6
    assert len(calls) <= 2, "the first layer reads the model's input, all others a sum"


def test_graphs_without_experts_say_nothing() -> None:
    model = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True, dropout=0.0)
    function, recorder = compiled(model, torch.randn(2, 5, D))
    function(torch.randn(2, 5, D))
    assert recorder.matches == []
    assert recorder.rejections == []


def test_exported_block_that_is_the_whole_program() -> None:
    class Bare(REWRITTEN["loop, +="]):  # type: ignore[misc, valid-type]
        def forward(self, x_TD: Tensor) -> Tensor:
            weights_TK, ids_TK = self.route(x_TD)
            return self.experts(x_TD, ids_TK, weights_TK)

    model = build(Bare)
    x_TD = torch.randn(7, D)
    program = torch.export.export(model, (x_TD,)).run_decompositions({})
    matches, _ = recognize(program.graph_module)
    apply(program.graph_module, [(match, "") for match in matches])
    assert len(matches) == 1
    program.validate()
    torch.testing.assert_close(program.module()(x_TD), model(x_TD))


@pytest.mark.parametrize("name", ["loop", "loop, biases", "gathered"])
def test_under_autocast(name: str) -> None:
    model = build(REWRITTEN[name])
    x_TD = torch.randn(7, D)
    function, recorder = compiled(model, x_TD)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = run(function, model, x_TD), run(model, model, x_TD)
    assert [(r.reason, r.node) for r in recorder.rejections] == []
    assert len(recorder.matches) == 1
    assert [a.dtype for a in actual] == [e.dtype for e in expected]
    assert_equal(actual, expected, torch.bfloat16)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["loop", "loop, stacked weights", "gathered"])
def test_inside_an_autocast_region_of_the_models_own(name: str, experts: str) -> None:
    class Cast(REWRITTEN[name]):  # type: ignore[misc, valid-type]
        def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out = super().experts(x_TD, ids_TK, weights_TK)
            return out.float()

    model = build(Cast)
    x_TD = torch.randn(7, D)
    backend = moe_compile.backend(experts, compiler="aot_eager")
    actual, expected = run(torch.compile(model, backend=backend, fullgraph=True), model, x_TD), run(model, model, x_TD)
    assert [block.found for block in backend.blocks.values()] == ["graph"]
    assert [a.dtype for a in actual] == [e.dtype for e in expected]
    assert_equal(actual, expected, torch.bfloat16)


@pytest.mark.parametrize(("block", "words"), [("loop", "grad mode"), ("gathered", "autocast")])
def test_contexts_that_the_graph_switches(block: str, words: str) -> None:
    class Switching(REWRITTEN[block]):  # type: ignore[misc, valid-type]
        def gate(self, h: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().gate(h)  # type: ignore[no-any-return]

        def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            if block == "gathered":
                return super().experts(x_TD, ids_TK, weights_TK)  # type: ignore[no-any-return]
            out = torch.zeros_like(x_TD)
            for e, layer in enumerate(self.layers):
                token, slot = torch.where(ids_TK == e)
                with torch.set_grad_enabled(e != 1):
                    y = layer(x_TD[token])
                out = out.index_add(0, token, y * weights_TK[token, slot, None])
            return out

    model = build(Switching)
    function, recorder = compiled(model, torch.randn(7, D))
    function(torch.randn(7, D))
    assert recorder.matches == []
    assert [words in rejection.reason for rejection in recorder.rejections] == [True]


def test_router_without_gradients_is_no_obstacle() -> None:
    class Frozen(REWRITTEN["loop"]):  # type: ignore[misc, valid-type]
        def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                weights_TK, ids_TK = super().route(x_TD)
            return weights_TK, ids_TK

    model = build(Frozen)
    x_TD = torch.randn(7, D)
    function, recorder = compiled(model, x_TD)
    assert_equal(run(function, model, x_TD), run(model, model, x_TD), torch.float32)
    assert len(recorder.matches) == 1
