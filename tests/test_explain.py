"""`explain()`: what it finds, that it changes nothing, and that it works where compiling would not."""

import json
import random

import numpy
import pytest
import torch
from zoo import build, standalone

import moe_compile
from moe_compile.errors import OptionError, UnknownBackendError

EXPERTS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


@pytest.fixture(scope="module")
def qwen3():
    return build("qwen3_moe", torch.float32, "eager")


def explain(case, **kwargs):
    model, arguments = case
    with torch.no_grad():
        return moe_compile.explain(model, **arguments, **kwargs)


def test_blocks_are_listed_with_path_form_spec_and_choice(qwen3):
    explanation = explain(qwen3, backend="grouped_mm")
    assert [block.path for block in explanation.blocks] == EXPERTS
    block = explanation.blocks[0]
    assert block.form == "transformers.Qwen3MoeExperts"
    assert block.found == "captured"
    assert "modeling_qwen3_moe.py:" in block.source
    spec = block.spec
    assert (spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size) == (8, 2, 64, 48)
    assert (spec.gate.kind, spec.weight_dtype) == ("silu", torch.float32)
    assert block.tokens == 16
    assert block.chosen == "grouped_mm_fallback"
    assert block.reasons["grouped_mm"] == "grouped_mm compiles in bfloat16 only, the weight is float32"
    assert len(explanation.graphs) == 1
    assert explanation.graph_breaks == ()
    assert explanation.error is None


def test_native_grouped_mm_is_told_from_its_fallback():
    explanation = explain(build("qwen3_moe", torch.bfloat16, "eager"), backend="grouped_mm")
    assert {block.chosen for block in explanation.blocks} == {"grouped_mm"}


def test_every_layer_is_listed_although_layers_share_compiled_code(qwen3):
    explanation = explain(qwen3, backend="eager")
    assert [(block.path, block.chosen) for block in explanation.blocks] == [(path, "eager") for path in EXPERTS]
    assert any("modeling_qwen3_moe.py" in graph_break.source for graph_break in explanation.graph_breaks)


def test_a_rule_that_forbids_the_backend_is_a_reason_and_no_error(qwen3):
    explanation = explain(qwen3, backend="grouped_mm", mode="reduce-overhead")
    assert [block.chosen for block in explanation.blocks] == [None, None]
    assert all("CUDA graphs" in block.reasons["grouped_mm"] for block in explanation.blocks)
    assert "batched_mm" not in explanation.blocks[0].reasons


def test_a_backend_object_is_judged_by_its_own_policy_and_left_alone(qwen3):
    backend = moe_compile.backend({"": "grouped_mm", "model.layers.1.*": "batched_mm"}, on_reject="fallback")
    explanation = explain(qwen3, backend=backend, mode="reduce-overhead")
    assert [block.chosen for block in explanation.blocks] == ["batched_mm", "batched_mm"]
    assert not backend.graphs
    assert not backend.blocks


def test_it_prints_itself_and_becomes_json(qwen3):
    explanation = explain(qwen3, backend="grouped_mm")
    text = str(explanation)
    for expected in (*EXPERTS, "E=8 K=2 D=64 F=48 float32 silu", "grouped_mm_fallback", "2 experts blocks, 1 graphs"):
        assert expected in text
    data = json.loads(json.dumps(explanation.to_dict()))
    assert data["blocks"][0]["spec"]["weight_dtype"] == "torch.float32"


def test_the_model_runs_once_and_nothing_of_it_changes():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts, _ = standalone("qwen3_moe")
            self.register_buffer("calls", torch.zeros(()))
            self.norm = torch.nn.BatchNorm1d(64)

        def forward(self, hidden, ids, weights):
            self.calls += 1
            return self.norm(self.experts(hidden, ids, weights)) + torch.rand(())

    model = Counting().train()
    runs = []
    model.experts.register_forward_hook(torch._dynamo.disable(lambda *_: runs.append(1)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = standalone("qwen3_moe")[1]
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    explanation = moe_compile.explain(model, *inputs, backend="grouped_mm")
    assert torch.equal(torch.rand(()), expected)
    assert len(runs) == 1
    assert len(explanation.blocks) == 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_compiled_model_and_a_function_can_be_explained(qwen3):
    model, arguments = qwen3
    compiled = torch.compile(model, backend=moe_compile.backend("grouped_mm", compiler="aot_eager"))
    assert len(explain((compiled, arguments), backend="grouped_mm").blocks) == 2
    function = lambda **kwargs: model(**kwargs).logits.sum()  # noqa: E731
    explanation = explain((function, arguments), backend="grouped_mm")
    assert [block.path for block in explanation.blocks] == EXPERTS


def test_a_model_that_breaks_into_parts_is_explained_with_the_lines():
    def split(hidden, ids, weights):
        if hidden.sum() > 0:
            hidden = hidden + 1
        return module(hidden, ids, weights)

    module, inputs = standalone("qwen3_moe")
    explanation = moe_compile.explain(split, *inputs, backend="grouped_mm")
    assert len(explanation.blocks) == 1
    assert any("test_explain.py:" in graph_break.source for graph_break in explanation.graph_breaks)
    assert "graph break" in str(explanation)


def test_bad_arguments_are_refused_before_anything_runs(qwen3):
    with pytest.raises(UnknownBackendError):
        explain(qwen3, backend="nonsense")
    with pytest.raises(OptionError):
        explain(qwen3, backend="grouped_mm", mode="quick")


def test_what_the_model_itself_raises_is_raised():
    module, (hidden, ids, weights) = standalone("qwen3_moe")

    def broken(hidden):
        module(hidden, ids, weights)
        raise KeyError("the model's own")

    with pytest.raises(KeyError, match="the model's own"):
        moe_compile.explain(broken, hidden, backend="grouped_mm")


class Stateful(torch.nn.Module):
    """Replaces a buffer, multiplies by one that autograd saves, and draws random numbers in Python and NumPy."""

    def __init__(self):
        super().__init__()
        self.experts, _ = standalone("qwen3_moe")
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(64))

    def forward(self, hidden, ids, weights):
        self.calls = self.calls + 1
        return self.experts(hidden * self.mask, ids, weights) * (random.random() + numpy.random.rand())


def test_buffers_random_numbers_and_a_pending_backward_survive():
    model, (hidden, ids, weights) = Stateful(), standalone("qwen3_moe")[1]
    loss = model(hidden.requires_grad_(), ids, weights).sum()
    calls, drawn = model.calls, (random.getstate(), numpy.random.get_state()[2])
    explanation = moe_compile.explain(model, hidden, ids, weights, backend="grouped_mm")
    assert len(explanation.blocks) == 1
    assert model.calls is calls
    assert calls == 1
    assert (random.getstate(), numpy.random.get_state()[2]) == drawn
    loss.backward()


def test_reports_do_not_use_up_dynamos_limits_nor_drop_what_was_compiled():
    module, inputs = standalone("qwen3_moe")
    backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    compiled(*inputs)
    with torch._dynamo.config.patch(recompile_limit=3):
        for _ in range(4):
            for experts in ("eager", "grouped_mm"):
                assert len(moe_compile.explain(module, *inputs, backend=experts).blocks) == 1
        compiled(*inputs)
        assert len(backend.graphs) == 1
        other, others_inputs = standalone("qwen3_moe")
        fresh = moe_compile.backend("batched_mm", compiler="aot_eager")
        torch.compile(other, backend=fresh, fullgraph=True)(*others_inputs)
    assert len(fresh.graphs) == 1


def test_a_key_that_matches_nothing_is_why_the_model_does_not_compile(qwen3):
    explanation = explain(qwen3, backend={"": "grouped_mm", "model.layer.0.*": "eager"})
    assert "matches none" in explanation.error


def test_the_page_of_a_notebook_says_what_the_text_says(qwen3):
    explanation = explain(qwen3, backend="grouped_mm")
    coverage = explanation.coverage
    assert coverage.covered == 2 * 3 * 8 * 64 * 48 * 4  # layers, projections, E, D, F, bytes of float32
    assert str(coverage).startswith(
        "parameters: 589.8 kB in experts that are rewritten, 0 bytes in experts that are not"
    )
    assert str(coverage) in str(explanation)
    assert str(coverage) in explanation._repr_html_()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (10**12, "1.0 TB")]
)
def test_bytes_are_told_in_a_unit_that_shows_them(count, text):
    assert str(moe_compile.report.Coverage(count, 0, None)).startswith(f"parameters: {text} in experts")
