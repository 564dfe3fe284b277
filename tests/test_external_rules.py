"""The predicates of experts backends with other projects' kernels, cell by cell, on described blocks and machines."""

from dataclasses import replace

import pytest
import torch
from external_kernels import BLACKWELL, HOPPER
from zoo import standalone

import moe_compile
from moe_compile.decision import decide
from moe_compile.errors import RequirementError, RuleError, ScaleFormatError
from moe_compile.experts_backends import EXPERTS_BACKENDS
from moe_compile.external_rules import deepgemm_reasons, megamoe_reasons, sonicmoe_reasons
from moe_compile.modes import CompileSettings
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec, GateSpec

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SM90, SM100 = Situation("cuda", (9, 0)), Situation("cuda", (10, 0))
BLOCK = ExpertsSpec(
    num_experts=8, top_k=2, hidden_size=512, intermediate_size=256, weight_dtype=BF16, gate=GateSpec("silu")
)
MODES = [None, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def reasons(predicate, spec, situation):
    return "; ".join(predicate(spec, situation))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_both_run_in_every_mode(mode, fullgraph, dynamic):
    for situation in (SM90, SM100):
        situation = replace(situation, settings=CompileSettings(mode), fullgraph=fullgraph, dynamic_tokens=dynamic)
        assert deepgemm_reasons(BLOCK, situation) == ()
        assert sonicmoe_reasons(BLOCK, situation) == ()
    assert sonicmoe_reasons(BLOCK, replace(SM90, settings=CompileSettings(mode), training=True)) == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_dtype": torch.float16}, "bfloat16 weights, these are torch.float16"),
        ({"weight_dtype": torch.float32}, "bfloat16 weights, these are torch.float32"),
        ({"hidden_size": 520}, "hidden size that is a multiple of 64, not 520"),
        ({"intermediate_size": 100}, "needs an intermediate size that is a multiple of 64, not 100"),
    ],
)
def test_deepgemm_names_what_it_does_not_take(changes, words):
    assert words in reasons(deepgemm_reasons, replace(BLOCK, **changes), SM90)


@pytest.mark.parametrize(
    "changes",
    [
        {"gate": GateSpec("custom")},
        {"gated": False},
        {"transposed": True},
        {"concatenated": False},
        {"up_bias": "b"},
        {"post_expert_norm": True},
        {"routing_weight": "input"},
    ],
)
def test_deepgemm_takes_whatever_stands_between_its_products(changes):
    assert deepgemm_reasons(replace(BLOCK, **changes), SM90) == ()


def test_deepgemm_says_why_it_does_not_train():
    assert "k_grouped_bf16_gemm_tn_contiguous" in reasons(deepgemm_reasons, BLOCK, replace(SM90, training=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gate": GateSpec("custom")}, "silu, gelu, gelu_tanh, relu, this gate is custom"),
        ({"gate": GateSpec("swiglu_clamped", limit=7.0)}, "this gate is swiglu_clamped"),
        ({"gated": False, "gate": GateSpec("relu2")}, "gated first projection"),
        ({"weight_dtype": torch.float16}, "bfloat16 weights"),
        ({"quantisation": "fp8"}, "bfloat16 weights, these are fp8"),
        ({"post_expert_norm": True}, "norm after the experts"),
        ({"routing_weight": "input"}, "here it is on the input"),
        ({"intermediate_size": 100}, "multiple of 8, not 100"),
    ],
)
def test_sonicmoe_names_what_it_does_not_take(changes, words):
    assert words in reasons(sonicmoe_reasons, replace(BLOCK, **changes), SM90)


@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("concatenated", [False, True])
def test_sonicmoe_takes_its_gates_in_every_layout(gate, transposed, concatenated):
    spec = replace(BLOCK, gate=GateSpec(gate), transposed=transposed, concatenated=concatenated, up_bias="b")
    assert sonicmoe_reasons(spec, replace(SM90, training=True)) == ()


@pytest.mark.parametrize("name", ["deepgemm", "sonicmoe"])
@pytest.mark.parametrize(
    ("situation", "words"),
    [
        (Situation("cpu"), "needs a CUDA device, the block is on cpu"),
        (Situation("mps"), "needs a CUDA device, the block is on mps"),
        (Situation("cuda", (8, 0)), "this device's is 8.0"),
        (Situation("cuda", None), "this device's is unknown"),
        (replace(SM90, environment=replace(HOPPER, distributions={})), "`kernels`"),
    ],
)
def test_what_is_missing_is_an_import_error(name, situation, words):
    assert words in "; ".join(EXPERTS_BACKENDS[name].reasons(BLOCK, situation))
    with pytest.raises(ImportError, match="grouped_mm") as caught:
        decide(name, BLOCK, situation, tokens=8, where="m", on_reject="error", warn=print)
    assert isinstance(caught.value, RequirementError)
    assert isinstance(caught.value, RuleError)
    warned = []
    decision = decide(name, BLOCK, situation, tokens=8, where="m", on_reject="fallback", warn=warned.append)
    assert decision.name == "grouped_mm"
    assert words in warned[0]


def test_a_whole_machine_has_nothing_against_it():
    assert deepgemm_reasons(BLOCK, replace(SM90, environment=HOPPER)) == ()
    assert sonicmoe_reasons(BLOCK, replace(SM90, environment=HOPPER)) == ()
    assert deepgemm_reasons(BLOCK, replace(SM100, environment=BLACKWELL)) == ()


@torch.no_grad()
@pytest.mark.parametrize("experts", ["deepgemm", "sonicmoe"])
def test_on_this_machine_the_compile_says_so_before_anything_is_loaded(experts):
    module, inputs = standalone("qwen3_moe", BF16)
    backend = moe_compile.backend(experts, compiler="aot_eager")
    with pytest.raises(ImportError, match=f"{experts} needs a CUDA device"):
        torch.compile(module, backend=backend, fullgraph=True)(*inputs)


FP8_BLOCK = replace(
    BLOCK,
    weight_dtype=FP8,
    quantisation="fp8",
    scale_format="float32",
    activation_scheme="dynamic",
    block_size=(128, 128),
)
FP4_BLOCK = replace(FP8_BLOCK, weight_dtype=torch.int8, quantisation="fp4", scale_format="ue8m0", block_size=(1, 32))


@pytest.mark.parametrize(
    ("spec", "situation"),
    [
        (FP8_BLOCK, SM90),  # SM90 reads float32 scales as they are
        (replace(FP8_BLOCK, scale_format="ue8m0"), SM90),
        (replace(FP8_BLOCK, scale_format="ue8m0"), SM100),
        (replace(FP8_BLOCK, scale_format="ue8m0", block_size=(1, 128)), SM100),
        (FP4_BLOCK, SM100),
    ],
)
def test_quantised_blocks_that_deepgemm_takes(spec, situation):
    assert deepgemm_reasons(spec, situation) == ()


@pytest.mark.parametrize(
    ("spec", "situation", "words"),
    [
        (replace(FP8_BLOCK, activation_scheme="static"), SM90, "dynamic), this checkpoint's scales are static"),
        (FP4_BLOCK, SM90, "no FP4 kernel before SM100"),
        (FP8_BLOCK, SM100, 'scale_fmt="ue8m0"'),
        (replace(FP4_BLOCK, scale_format="float32"), SM100, 'scale_fmt="ue8m0"'),
        (replace(FP8_BLOCK, block_size=(64, 64)), SM90, "(128, 128)"),
        (replace(FP8_BLOCK, block_size=(1, 128)), SM90, "per row"),
        (replace(FP8_BLOCK, up_bias="b"), SM90, "no bias"),
        (replace(FP8_BLOCK, transposed=True), SM90, "transposed"),
        (replace(FP8_BLOCK, hidden_size=576), SM90, "hidden size that is a multiple of 128, not 576"),
        (replace(FP8_BLOCK, quantisation="int4"), SM90, "these are int4"),
        (replace(FP4_BLOCK, process_group="ep"), SM100, "spread over a process group"),
    ],
)
def test_quantised_blocks_that_deepgemm_refuses(spec, situation, words):
    assert words in reasons(deepgemm_reasons, spec, situation)


MEGAMOE = replace(FP4_BLOCK, process_group="ep")


def test_megamoe_takes_its_block_alone():
    assert megamoe_reasons(MEGAMOE, SM100) == ()
    assert megamoe_reasons(replace(MEGAMOE, gate=GateSpec("swiglu_clamped", limit=7.0)), SM100) == ()
    assert megamoe_reasons(MEGAMOE, replace(SM100, environment=BLACKWELL)) == ()


@pytest.mark.parametrize(
    ("changes", "situation", "words"),
    [
        ({}, SM90, "SM100"),
        ({}, Situation("cpu"), "CUDA device"),
        ({}, replace(SM100, environment=replace(BLACKWELL, toolkit=HOPPER.toolkit)), "nvcc 12.9"),
        ({}, replace(SM100, training=True), "no backward"),
        ({}, replace(SM100, settings=CompileSettings("reduce-overhead")), "CUDA graphs"),
        ({"quantisation": "fp8", "weight_dtype": FP8}, SM100, "takes FP4 weights, these are fp8"),
        ({"quantisation": None, "weight_dtype": BF16}, SM100, "takes FP4 weights, these are torch.bfloat16"),
        ({"scale_format": "float32"}, SM100, 'scale_fmt="ue8m0"'),
        ({"process_group": None}, SM100, "needs the process group"),
        ({"gate": GateSpec("gelu")}, SM100, "computes SwiGLU"),
        ({"concatenated": False}, SM100, "computes SwiGLU"),
        ({"up_bias": "b"}, SM100, "no bias"),
        ({"hidden_size": 320}, SM100, "hidden size that is a multiple of 128, not 320"),
    ],
)
def test_megamoe_names_what_it_does_not_take(changes, situation, words):
    assert words in reasons(megamoe_reasons, replace(MEGAMOE, **changes), situation)


@pytest.mark.parametrize("name", ["deepgemm", "deepgemm_megamoe"])
def test_float32_scales_on_blackwell_are_a_value_error(name):
    spec = replace(FP8_BLOCK if name == "deepgemm" else MEGAMOE, scale_format="float32")
    with pytest.raises(ValueError, match='scale_fmt="ue8m0", or use grouped_mm or batched_mm') as caught:
        decide(name, spec, SM100, tokens=8, where="m", on_reject="error", warn=print)
    assert isinstance(caught.value, ScaleFormatError)
