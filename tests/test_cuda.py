"""What only a GPU shows: Inductor's kernels, CUDA graphs replayed with other routing, no host synchronisation."""

import copy

import pytest
import torch
from zoo import available, relative_error, standalone

import moe_compile

pytestmark = pytest.mark.cuda
BF16 = torch.bfloat16


def compiled(module, experts, **kwargs):
    backend = moe_compile.backend(experts)
    return torch.compile(module, backend=backend, fullgraph=True, **kwargs), backend


def within_budget(output, own, module, inputs):
    """Whether an output is as near to an fp32 run as the module's own, up to half again as much."""
    hidden, ids, weights = inputs
    reference = copy.deepcopy(module).float()(hidden.float(), ids, weights.float())
    return relative_error(output.float(), reference) <= 1.5 * relative_error(own.float(), reference) + 2**-8


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("model_type", available("qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark_text"))
def test_every_kind_compiles_with_inductor_and_trains(model_type, experts):
    module, inputs = standalone(model_type, BF16, tokens=24, device="cuda")
    function, backend = compiled(module, experts)
    hidden = inputs[0].clone().requires_grad_()
    output = function(hidden, *inputs[1:])
    assert within_budget(output, module(*inputs), module, inputs)
    assert next(iter(backend.blocks.values())).chosen == experts
    output.float().sum().backward()
    assert torch.isfinite(hidden.grad).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


@torch.no_grad()
def test_batched_mm_replays_a_cuda_graph_with_other_routing():
    module, (hidden, ids, weights) = standalone("qwen3_moe", BF16, tokens=16, device="cuda")
    function, _ = compiled(module, "batched_mm", mode="reduce-overhead")
    for shift in range(6):
        inputs = (hidden, (ids + shift) % 8, weights)
        output = function(*inputs).clone()
        assert within_budget(output, module(*inputs), module, inputs)


@torch.no_grad()
def test_native_grouped_mm_never_waits_for_the_device():
    module, inputs = standalone("qwen3_moe", BF16, tokens=16, device="cuda")
    function, _ = compiled(module, "grouped_mm")
    function(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = function(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert within_budget(output, module(*inputs), module, inputs)


@torch.no_grad()
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_one_compiled_model_serves_every_token_count(experts):
    module, _ = standalone("gpt_oss", BF16, device="cuda")
    function, backend = compiled(module, experts)
    for tokens in (7, 33, 1024, 1):
        _, inputs = standalone("gpt_oss", BF16, tokens=tokens, device="cuda")
        assert within_budget(function(*inputs), module(*inputs), module, inputs)
    assert len(backend.graphs) <= 3
