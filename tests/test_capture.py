"""Capture of transformers' experts classes: every kind of class, from any setting, and nobody else's compilation."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers.integrations import moe as registry
from zoo import available, build, check_model, first_output, standalone

import moe_compile
from moe_compile.errors import BlockInputError, FallbackWarning, RuleError

# One of each kind of decorated class: canonical, clamped gate hook, gpt-oss (interleaved, transposed, bias), not gated,
# norm after the experts, transposed and concatenated, and a router that looks ids up in a table.
KINDS = available(
    "qwen3_moe", "minimax_m3_vl_text", "gpt_oss", "nemotron_h", "muse_spark_text", "aria_text", "deepseek_v4"
)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("model_type", KINDS)
def test_every_kind_of_class_becomes_one_graph_from_its_eager_loop(model_type, experts):
    outcome = check_model(model_type, torch.float32, "eager", experts)
    if not outcome.dressed:
        pytest.skip("the installed transformers does not decorate this class")
    assert outcome.break_line == ""
    assert outcome.graphs == 1
    assert outcome.rewritten == outcome.dressed > 0
    assert outcome.error <= outcome.budget


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_in_bf16_from_another_setting(model_type, experts):
    outcome = check_model(model_type, torch.bfloat16, "grouped_mm", experts)
    assert outcome.graphs == 1
    assert outcome.rewritten == outcome.dressed > 0
    assert outcome.error <= outcome.budget


def test_a_break_outside_the_experts_is_left_and_every_block_rewritten():
    outcome = check_model("ernie4_5_vl_moe_text", torch.float32, "eager", "grouped_mm")
    assert "moe_mm_token_type_ids" in outcome.break_line
    assert outcome.graphs > 1
    assert outcome.rewritten == outcome.dressed
    assert outcome.error <= outcome.budget


def test_a_standalone_module_is_captured():
    module, inputs = standalone("qwen3_moe")
    module.config._experts_implementation = None
    backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
    with torch.no_grad():
        output = torch.compile(module, backend=backend, fullgraph=True)(*inputs)
        torch.testing.assert_close(output, module(*inputs))
    assert len(backend.blocks) == 1


def test_other_compilations_and_uncompiled_calls_are_untouched():
    model, arguments = build("qwen3_moe", torch.float32, "eager")

    def graphs_and_output():
        torch._dynamo.reset()
        counter = CompileCounter()
        with torch.no_grad():
            return counter, first_output(torch.compile(model, backend=counter)(**arguments))

    moe_compile.backend("grouped_mm")
    with_capture, output = graphs_and_output()
    mapping = registry.ExpertsInterface._global_mapping
    captured = dict(mapping)
    try:
        mapping.clear()
        originals = {name: function._moe_compile_previous for name, function in captured.items()}
        mapping.update({name: function for name, function in originals.items() if function is not None})
        without_capture, expected = graphs_and_output()
        with torch.no_grad():
            uncompiled = first_output(model(**arguments))
    finally:
        mapping.update(captured)
    assert with_capture.frame_count == without_capture.frame_count > 1
    assert torch.equal(output, expected)
    with torch.no_grad():
        assert torch.equal(first_output(model(**arguments)), uncompiled)


def test_an_implementation_registered_by_the_user_is_captured_too():
    calls = []

    def custom(self, hidden_states, top_k_index, top_k_weights):
        calls.append(1)
        return hidden_states

    registry.ExpertsInterface.register("custom_of_a_test", custom)
    try:
        model, arguments = build("qwen3_moe", torch.float32, "custom_of_a_test")
        backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
        with torch.no_grad():
            torch.compile(model, backend=backend, fullgraph=True)(**arguments)
            assert not calls
            assert len(backend.blocks) == 2
            model(**arguments)
            assert calls
    finally:
        del registry.ExpertsInterface._global_mapping["custom_of_a_test"]


def test_a_subclass_that_calls_its_base_is_captured():
    module, inputs = standalone("qwen3_moe")

    class Doubled(type(module)):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return 2 * super().forward(hidden_states, top_k_index, top_k_weights)

    with torch.no_grad():
        expected = 2 * module(*inputs)
        module.__class__ = Doubled
        backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
        torch.testing.assert_close(module(*inputs), expected)
        torch.testing.assert_close(torch.compile(module, backend=backend, fullgraph=True)(*inputs), expected)
    assert len(backend.blocks) == 1


def test_quantised_experts_are_refused_with_a_reason():
    from transformers.integrations import finegrained_fp8

    module, inputs = standalone("qwen3_moe", torch.bfloat16)
    decorate = registry.use_experts_implementation(experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    base = finegrained_fp8.FP8Experts
    quantised_class = decorate(type("Fp8", (base,), {"forward": base.forward}))
    quantised = quantised_class(config=module.config, block_size=(16, 16), activation_scheme="dynamic")
    for implementation in ("eager", "grouped_mm"):
        module.config._experts_implementation = implementation
        backend = moe_compile.backend("grouped_mm", compiler="eager")
        with torch.no_grad(), pytest.raises(RuleError, match="fp8"):
            torch.compile(quantised, backend=backend, fullgraph=True)(*inputs)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x, ids, w: (x[:, :-1], ids, w), "D=64"),
        (lambda x, ids, w: (x[:-1], ids, w), "same T"),
        (lambda x, ids, w: (x, ids[:, :1], w), r"\(T, K\)"),
        (lambda x, ids, w: (x, ids.float(), w), "int32 or int64"),
        (lambda x, ids, w: (x, ids, w.long()), "floating-point"),
        (lambda x, ids, w: (x, ids.to("meta"), w), "one device"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(damage, message):
    module, inputs = standalone("qwen3_moe")
    compiled = torch.compile(module, backend=moe_compile.backend("grouped_mm", compiler="aot_eager"))
    with pytest.raises(BlockInputError, match=message):
        compiled(*damage(*inputs))


def test_a_sub_config_gets_its_own_choice():
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeModel

    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 48, "head_dim": 8,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    model = Qwen3VLMoeModel(Qwen3VLMoeConfig(text_config=text, vision_config=vision)).eval()
    backend = moe_compile.backend({"": "grouped_mm", "text_config": "batched_mm"}, compiler="aot_eager")
    with torch.no_grad():
        torch.compile(model, backend=backend)(input_ids=torch.randint(64, (1, 6)), use_cache=False)
    assert [block.chosen for block in backend.blocks.values()] == ["batched_mm"]
    assert backend.get() == {"": "grouped_mm", "text_config": "batched_mm"}
    uniform = moe_compile.backend("grouped_mm", compiler="aot_eager")
    with torch.no_grad():
        torch.compile(model, backend=uniform)(input_ids=torch.randint(64, (1, 6)), use_cache=False)
    assert uniform.get() == {"": "grouped_mm", "text_config": "grouped_mm"}


def test_transformers_may_be_imported_later():
    run_python("""
        import sys
        import moe_compile
        backend = moe_compile.backend("grouped_mm", compiler="eager")
        assert not any(name.split(".")[0] == "transformers" for name in sys.modules)
        import torch
        from transformers import MixtralConfig, MixtralModel
        config = MixtralConfig(vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
                               num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        model = MixtralModel(config).eval()
        model.set_experts_implementation("eager")
        with torch.no_grad():
            torch.compile(model, backend=backend, fullgraph=True)(input_ids=torch.tensor([[1, 2, 3]]))
        assert len(backend.blocks) == 1, backend.blocks
    """)


def test_transformers_may_be_missing():
    run_python("""
        import sys
        sys.modules["transformers"] = None
        import torch
        import moe_compile
        model = torch.nn.Linear(2, 2)
        backend = moe_compile.backend("grouped_mm", compiler="eager")
        x = torch.ones(1, 2)
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    """)


def run_python(program):
    """Runs a program in an interpreter of its own; its output shows where it fails."""
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


# What the canonical ops cannot stand for is refused, or keeps its own code --------------------------------------------


def _wrapped(module):
    from torch.testing._internal.two_tensor import TwoTensor

    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name).detach()
        setattr(module, name, torch.nn.Parameter(TwoTensor(weight, weight.clone())))
    return module


def test_wrapped_weights_are_refused():
    module, inputs = standalone("qwen3_moe")
    compiled = torch.compile(_wrapped(module), backend=moe_compile.backend("batched_mm", compiler="aot_eager"))
    with torch.no_grad(), pytest.raises(RuleError, match="TwoTensor"):
        compiled(*inputs)


def test_the_meta_device_is_refused_and_so_are_two_devices():
    module, inputs = standalone("qwen3_moe", device="meta")
    compiled = torch.compile(module, backend=moe_compile.backend("grouped_mm", compiler="aot_eager"))
    with torch.no_grad(), pytest.raises(RuleError, match="meta device"):
        compiled(*inputs)
    with torch.no_grad(), pytest.raises(BlockInputError, match="weights on meta"):
        compiled(*standalone("qwen3_moe")[1])


@pytest.mark.parametrize("on_reject", ["error", "keep"])
def test_function_transforms_are_refused_or_keep_the_models_own_code(on_reject):
    module, (hidden, ids, weights) = standalone("qwen3_moe")
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(module, parameters, (hidden, ids, weights)).square().sum()

    backend = moe_compile.backend("grouped_mm", on_reject=on_reject, compiler="aot_eager")
    compiled = torch.compile(lambda parameters: torch.func.grad(loss)(parameters), backend=backend)
    if on_reject == "error":
        with pytest.raises(RuleError, match=r"torch\.func\.grad"):
            compiled(parameters)
        return
    with pytest.warns(FallbackWarning, match=r"torch\.func\.grad"):
        actual = compiled(parameters)
    for name, expected in torch.func.grad(loss)(parameters).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-4, atol=1e-5)
