"""Numbers of captured blocks: gradients, token counts, and every flag that an experts class can declare.

The reference is the class's own eager loop, in fp32, or in bf16 against an fp32 run of the same weights.
"""

import copy

import pytest
import torch
from reference import DEVICES
from zoo import available, relative_error, standalone

import moe_compile

pytestmark = pytest.mark.parametrize("device", DEVICES)

EXPERTS = ["grouped_mm", "batched_mm"]
KINDS = available("qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark_text")


def compiled(module, experts, **kwargs):
    backend = moe_compile.backend(experts, compiler="aot_eager")
    return torch.compile(module, backend=backend, fullgraph=True, **kwargs), backend


def gradients(function, module, inputs):
    """Output and gradients of hidden states, routing weights and every parameter, None where there is none."""
    hidden, ids, weights = (tensor.detach().clone() for tensor in inputs)
    hidden.requires_grad_()
    weights.requires_grad_()
    module.zero_grad(set_to_none=True)
    output = function(hidden, ids, weights)
    generator = torch.Generator().manual_seed(1)
    (output.float() * torch.randn(output.shape, generator=generator).to(output.device)).sum().backward()
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad, **named}


def routed(inputs, routing):
    hidden, ids, weights = inputs
    if routing == "an expert without tokens":
        ids = torch.where(ids == 3, 5, ids)
    elif routing == "all tokens on one expert":
        ids = torch.full_like(ids, 6)
    return hidden, ids, weights


@pytest.mark.parametrize("routing", ["random", "an expert without tokens", "all tokens on one expert"])
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("model_type", KINDS)
def test_gradients_of_everything_equal_the_eager_loop(device, model_type, experts, routing):
    module, inputs = standalone(model_type, tokens=12, device=device)
    module.train()
    function, _ = compiled(module, experts)
    for step in range(2):
        step_inputs = (inputs[0] + step, *routed(inputs, routing)[1:])
        expected = gradients(module, module, step_inputs)
        actual = gradients(function, module, step_inputs)
        for name, reference in expected.items():
            reference = torch.zeros_like(actual[name]) if reference is None else reference
            tolerance = {"rtol": 1e-4, "atol": 1e-4 * reference.abs().max().item() + 1e-6}
            torch.testing.assert_close(actual[name], reference, **tolerance)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("model_type", KINDS)
def test_gradients_in_bf16_are_as_near_to_fp32_as_the_eager_loops(device, model_type, experts):
    module, inputs = standalone(model_type, torch.bfloat16, tokens=24, device=device)
    oracle = copy.deepcopy(module).float()
    wide = (inputs[0].float(), inputs[1], inputs[2].float())
    expected = gradients(oracle, oracle, wide)
    own = gradients(module, module, inputs)
    actual = gradients(compiled(module, experts)[0], module, inputs)
    for name, reference in expected.items():
        budget = 1.5 * relative_error(own[name].float(), reference) + torch.finfo(torch.bfloat16).eps
        assert relative_error(actual[name].float(), reference) <= budget, name


@pytest.mark.parametrize("experts", EXPERTS)
def test_an_expert_without_tokens_gets_exactly_zero_gradient(device, experts):
    module, inputs = standalone("gpt_oss", device=device)
    grads = gradients(compiled(module, experts)[0], module, routed(inputs, "an expert without tokens"))
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        assert torch.equal(grads[name][3], torch.zeros_like(grads[name][3]))
        assert grads[name][5].abs().sum() > 0


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("experts", EXPERTS)
def test_token_counts_share_two_compilations(device, experts, training):
    module, _ = standalone("gpt_oss", device=device)
    function, backend = compiled(module, experts)
    counts = [7, 33, 128, 1, 0, 64]
    compilations = []
    with torch.set_grad_enabled(training):
        for tokens in counts:
            inputs = standalone("gpt_oss", tokens=tokens, device=device)[1] if tokens else empty_inputs(device)
            expected = module(*inputs)
            torch.testing.assert_close(function(*inputs), expected, rtol=1e-4, atol=1e-5)
            compilations.append(len(backend.graphs))
    assert compilations[2] <= 2  # 7, then any count
    assert compilations[-1] <= 4  # T = 1 and T = 0 may be one more each
    assert compilations[-1] == compilations[-2]


def empty_inputs(device):
    ids = torch.zeros(0, 2, dtype=torch.int64, device=device)
    return torch.zeros(0, 64, device=device), ids, torch.zeros(0, 2, device=device)


@pytest.mark.parametrize("sentinel", [8, 11, -1])
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("model_type", KINDS)
def test_ids_outside_the_experts_contribute_nothing(device, model_type, experts, sentinel):
    module, (hidden, ids, weights) = standalone(model_type, device=device)
    outside = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)).to(device) < 0.4
    # The eager loop itself only takes ids in range: there, give those pairs weight zero instead.
    expected = gradients(module, module, (hidden, ids, weights.masked_fill(outside, 0)))
    actual = gradients(compiled(module, experts)[0], module, (hidden, ids.masked_fill(outside, sentinel), weights))
    assert torch.equal(actual["weights"][outside], torch.zeros_like(actual["weights"][outside]))
    expected["weights"] = expected["weights"].masked_fill(outside, 0)
    for name, reference in expected.items():
        torch.testing.assert_close(actual[name], reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("experts", EXPERTS)
def test_expert_ids_may_be_int32(device, experts, ids_dtype):
    module, (hidden, ids, weights) = standalone("qwen3_moe", device=device)
    with torch.no_grad():
        output = compiled(module, experts)[0](hidden, ids.to(ids_dtype), weights)
        torch.testing.assert_close(output, module(hidden, ids, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", EXPERTS)
def test_autocast_runs_the_projections_in_its_dtype(device, experts, weight_dtype):
    module, (hidden, ids, weights) = standalone("qwen3_moe", weight_dtype, tokens=24, device=device)
    inputs = (hidden.float(), ids, weights.float())
    oracle = copy.deepcopy(module).float()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        function, backend = compiled(module, experts)
        output = function(*inputs)
        own = module(*inputs)
    with torch.no_grad():
        reference = oracle(*inputs)
    assert output.dtype == own.dtype == torch.float32
    budget = 1.5 * relative_error(own, reference) + torch.finfo(torch.bfloat16).eps
    assert 1e-4 < relative_error(output, reference) <= budget  # rounded to bf16, and no more than that
    assert next(iter(backend.blocks.values())).chosen == experts


@pytest.mark.parametrize("experts", EXPERTS)
def test_fp32_activations_meet_bf16_weights_without_autocast(device, experts):
    module, (hidden, ids, weights) = standalone("qwen3_moe", torch.bfloat16, device=device)
    with torch.no_grad():
        output = compiled(module, experts)[0](hidden.float(), ids, weights.float())
        reference = copy.deepcopy(module).float()(hidden.float(), ids, weights.float())
    assert output.dtype == torch.float32
    assert relative_error(output, reference) < 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize(
    ("model_type", "hidden_size", "inner_size"),
    [("qwen3_moe", 64, 32), ("qwen3_moe", 33, 17), ("gpt_oss", 64, 32), ("gpt_oss", 30, 15)],
)
def test_square_and_odd_sizes(device, model_type, hidden_size, inner_size, experts, dtype):
    module, inputs = resized(model_type, hidden_size, inner_size, dtype, device)
    compare(module, inputs, experts, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("layout", ["transposed view", "not aligned"])
def test_weights_that_are_views(device, layout, experts, dtype):
    module, inputs = standalone("qwen3_moe", dtype, tokens=24, device=device)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name).detach()
        if layout == "transposed view":
            view = weight.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            view = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)
            assert view.data_ptr() % 16
        setattr(module, name, torch.nn.Parameter(view))
    compare(module, inputs, experts, dtype)


def compare(module, inputs, experts, dtype):
    """Output and gradients against fp32: as near as the module's own code, up to half again as much."""
    oracle = copy.deepcopy(module).float()
    expected = gradients(oracle, oracle, (inputs[0].float(), inputs[1], inputs[2].float()))
    own = gradients(module, module, inputs)
    actual = gradients(compiled(module, experts)[0], module, inputs)
    for name, reference in expected.items():
        budget = 1.5 * relative_error(own[name].float(), reference) + 4 * torch.finfo(dtype).eps
        assert relative_error(actual[name].float(), reference) <= budget, name


def resized(model_type, hidden_size, inner_size, dtype, device):
    """An experts module of other sizes, with random weights, and inputs for it."""
    module, (_, ids, weights) = standalone(model_type, dtype, tokens=24, device=device)
    generator = torch.Generator().manual_seed(3)
    sizes = {64: hidden_size, 48: inner_size, 96: 2 * inner_size}
    for name, parameter in list(module.named_parameters()):
        shape = (parameter.shape[0], *(sizes[size] for size in parameter.shape[1:]))
        setattr(module, name, torch.nn.Parameter((0.2 * torch.randn(shape, generator=generator)).to(device, dtype)))
    for name in ("hidden_dim", "hidden_size", "intermediate_dim", "intermediate_size", "expert_dim"):
        if hasattr(module, name):
            setattr(module, name, hidden_size if name.startswith("hidden") else inner_size)
    return module, (torch.randn(24, hidden_size, generator=generator).to(device, dtype), ids, weights)
