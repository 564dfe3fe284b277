"""The documented table, cell by cell, from the predicates; and what reaches Inductor."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch._inductor import list_mode_options
from zoo import standalone

import moe_compile
from moe_compile.decision import decide
from moe_compile.errors import MoeCompileError, RuleError
from moe_compile.experts_backends import EXPERTS_BACKENDS, all_reasons, legal_names
from moe_compile.modes import CompileSettings, resolve_settings
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec, GateSpec

WITHOUT_CUDA_GRAPHS = {None, "max-autotune-no-cudagraphs"}
MODES = [None, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


# Where a backend that takes some blocks alone is at home.
USUAL = {
    "sonicmoe": (ExpertsSpec(gate=GateSpec("silu")), Situation("cuda", (9, 0))),
    "deepgemm_megamoe": (
        ExpertsSpec(gate=GateSpec("silu"), quantisation="fp4", scale_format="ue8m0", process_group="ep"),
        Situation("cuda", (10, 0)),
    ),
}


@pytest.mark.parametrize(("mode", "dtype", "fullgraph"), list(itertools.product(MODES, DTYPES, [False, True])))
def test_the_documented_table(mode, dtype, fullgraph):
    legal = legal_names(ExpertsSpec(weight_dtype=dtype), Situation(settings=CompileSettings(mode), fullgraph=fullgraph))
    expected = {"batched_mm"}
    if mode in WITHOUT_CUDA_GRAPHS:
        expected.add("grouped_mm")
    if not fullgraph:
        expected.add("eager")
    assert set(legal) == expected


def test_records_agree_with_their_predicates():
    for name, record in EXPERTS_BACKENDS.items():
        assert record.name == name
        spec, usual = USUAL.get(name, (ExpertsSpec(), Situation("cuda", (9, 0), has_triton=True)))
        assert not record.reasons(spec, usual)
        in_cuda_graphs = replace(usual, settings=CompileSettings("reduce-overhead"))
        assert record.cuda_graph_safe == (not record.reasons(spec, in_cuda_graphs))
        assert record.has_backward == (not record.reasons(spec, replace(usual, training=True)))


@pytest.mark.parametrize("quantisation", ["fp8", "fp4"])
def test_quantised_weights_are_left_to_the_models_own_code(quantisation):
    spec = ExpertsSpec(weight_dtype=torch.int8, quantisation=quantisation)
    reasons = all_reasons(spec, Situation())
    assert quantisation in "".join(reasons["grouped_mm"])
    assert quantisation in "".join(reasons["batched_mm"])
    assert legal_names(spec, Situation()) == ["eager"]


def test_the_option_counts_as_a_cuda_graph_mode():
    option = "triton.cudagraphs"
    assert resolve_settings(None, {option: True}).cuda_graphs
    assert not resolve_settings(None, {option: False}).cuda_graphs
    with torch._inductor.config.patch("triton.cudagraphs", True):
        assert resolve_settings(None, None).cuda_graphs
        assert not resolve_settings(None, {option: False}).cuda_graphs


@pytest.mark.parametrize("mode", [None, "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("compiler", ["cudagraphs", torch._dynamo.lookup_backend("cudagraphs")])
def test_the_compiler_that_only_records_cuda_graphs_counts_as_using_them(mode, compiler):
    settings = resolve_settings(mode, None, compiler)
    assert settings.cuda_graphs
    situation = Situation(settings=settings)
    reasons = all_reasons(ExpertsSpec(weight_dtype=torch.bfloat16), situation)
    assert 'compiler="cudagraphs"' in reasons["grouped_mm"][0]
    assert not reasons["batched_mm"]


@pytest.mark.parametrize(
    ("settings", "config", "asked", "remedy"),
    [
        (CompileSettings("reduce-overhead"), False, "mode='reduce-overhead'", 'mode="max-autotune-no-cudagraphs"'),
        (
            CompileSettings(options={"triton.cudagraphs": True}),
            False,
            'options={"triton.cudagraphs": True}',
            'options={"triton.cudagraphs": False}',
        ),
        (CompileSettings(compiler="cudagraphs"), False, 'compiler="cudagraphs"', 'compiler="inductor"'),
        (
            CompileSettings("max-autotune-no-cudagraphs"),
            True,
            "torch._inductor.config.triton.cudagraphs",
            "torch._inductor.config.triton.cudagraphs = False",
        ),
    ],
)
def test_the_remedy_takes_back_what_asked_for_cuda_graphs(settings, config, asked, remedy):
    spec, situation = ExpertsSpec(weight_dtype=torch.bfloat16), Situation(settings=settings)
    with torch._inductor.config.patch("triton.cudagraphs", config), pytest.raises(RuleError) as caught:
        decide("grouped_mm", spec, situation, tokens=4, where="here", on_reject="error", warn=pytest.fail)
    assert f"which {asked} uses" in caught.value.found
    assert remedy in caught.value.remedy


def test_every_mode_of_inductor_has_a_rule():
    for mode in list_mode_options():
        settings = resolve_settings(mode, None)
        spec = ExpertsSpec(weight_dtype=torch.bfloat16)
        legal = legal_names(spec, Situation(settings=settings))
        assert "batched_mm" in legal
        assert ("grouped_mm" in legal) == (not list_mode_options(mode).get("triton.cudagraphs", False))


@pytest.mark.parametrize("asked", ["grouped_mm", "auto"])
def test_where_nothing_is_legal_the_error_says_how_to_go_on(asked):
    spec = ExpertsSpec(weight_dtype=torch.float8_e4m3fn, quantisation="fp8")
    situation = Situation(fullgraph=True)
    for policy in ("error", "fallback"):
        with pytest.raises(RuleError, match="fullgraph=False"):
            decide(asked, spec, situation, tokens=4, where="here", on_reject=policy, warn=pytest.fail)


def test_errors_can_be_pickled_and_say_all_three_parts():
    error = RuleError("asked", "found", "do this")
    assert str(error) == "asked: found. do this."
    function, arguments = error.__reduce__()
    assert str(function(*arguments)) == str(error)
    assert issubclass(RuleError, MoeCompileError)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"mode": "max-autotune-no-cudagraphs"}, list_mode_options("max-autotune-no-cudagraphs")),
        ({"options": {"epilogue_fusion": True}}, {"epilogue_fusion": True}),
    ],
)
def test_inductor_gets_exactly_the_options_of_the_mode(monkeypatch, settings, expected):
    received = []

    def compile_fx(gm, inputs, config_patches=None, **kwargs):
        received.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    module, inputs = standalone("qwen3_moe")
    backend = moe_compile.backend("grouped_mm")
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True, **settings)(*inputs)
    assert received == [expected]


OPTIONS = {"epilogue_fusion": True}


@pytest.mark.parametrize("settings", [{"mode": "reduce-overhead"}, {"options": OPTIONS}, {}])
def test_another_compiler_gets_mode_and_options_if_it_has_room_for_them(settings):
    received = []

    def by_name(gm, inputs, *, mode=None, options=None):
        received.append({"mode": mode, "options": options})
        return gm.forward

    def of_any_name(gm, inputs, **kwargs):
        received.append(kwargs)
        return gm.forward

    def without(gm, inputs):
        received.append({})
        return gm.forward

    module, inputs = standalone("qwen3_moe")
    for compiler in (by_name, of_any_name, without):
        torch._dynamo.reset()
        backend = moe_compile.backend("batched_mm", compiler=compiler)
        with torch.no_grad():
            torch.compile(module, backend=backend, **settings)(*inputs)
    assert received == [{"mode": None, "options": None, **settings}, settings, {}]
