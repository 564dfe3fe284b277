"""The real DeepGEMM and SonicMoE on a GPU, where they are installed: numbers, CUDA graphs, no host synchronisation."""

import copy

import pytest
import torch
from zoo import available, relative_error, standalone

import moe_compile
from moe_compile.external import external_kernels
from moe_compile.kernels.external.loading import load_kernel

pytestmark = pytest.mark.cuda
BF16 = torch.bfloat16


def needs(name):
    missing = {status.name: status.missing for status in external_kernels()}[name]
    return pytest.mark.skipif(bool(missing), reason="; ".join(missing))


KERNELS = [pytest.param(name, marks=needs(name)) for name in ("deepgemm", "sonicmoe")]


@pytest.fixture(autouse=True)
def _untuned(monkeypatch):
    """SonicMoE tries tile sizes for minutes at the first call with a shape."""
    monkeypatch.setattr("moe_compile.passes.lower_sonicmoe._is_static", lambda tensor: False)


def block(tokens):
    """A block whose sizes both kernels take, with an expert that no token reaches."""
    module, (_, ids, weights) = standalone("qwen3_moe", BF16, tokens=tokens, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for name, shape in (("gate_up_proj", (8, 256, 128)), ("down_proj", (8, 128, 128))):
        weight = torch.randn(shape, generator=generator, device="cuda").to(BF16) / 128**0.5
        setattr(module, name, torch.nn.Parameter(weight))
    hidden = torch.randn(tokens, 128, generator=generator, device="cuda").to(BF16)
    return module, (hidden, torch.where(ids == 5, 4, ids), weights)


def close(output, module, inputs):
    hidden, ids, weights = inputs
    exact = copy.deepcopy(module).float()(hidden.float(), ids, weights.float())
    own = relative_error(module(*inputs).float(), exact)
    return relative_error(output.float(), exact) <= 1.5 * own + 2**-8


@torch.no_grad()
@pytest.mark.parametrize("experts", KERNELS)
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_numbers_and_other_routing(experts, mode):
    for tokens in (1, 7, 64, 1024):
        torch._dynamo.reset()
        module, (hidden, ids, weights) = block(tokens)
        function = torch.compile(module, backend=moe_compile.backend(experts), fullgraph=True, mode=mode)
        for shift in range(4):
            inputs = hidden, (ids + shift) % 8, weights
            assert close(function(*inputs).clone(), module, inputs)


@torch.no_grad()
@pytest.mark.parametrize("experts", KERNELS)
def test_the_host_never_waits(experts):
    module, inputs = block(64)
    function = torch.compile(module, backend=moe_compile.backend(experts), fullgraph=True)
    function(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = function(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert close(output, module, inputs)


@needs("sonicmoe")
def test_sonicmoe_trains():
    module, (hidden, ids, weights) = block(200)
    function = torch.compile(module, backend=moe_compile.backend("sonicmoe"), fullgraph=True)
    results = []
    for run, dtype in ((function, BF16), (module, BF16), (copy.deepcopy(module).float(), torch.float32)):
        x, w = (tensor.detach().clone().to(dtype).requires_grad_() for tensor in (hidden, weights))
        run(x, ids, w).float().square().sum().backward()
        parameters = (run if dtype == torch.float32 else module).parameters()
        results.append([x.grad, w.grad, *(p.grad.clone() for p in parameters)])
        module.zero_grad()
    for ours, own, exact in zip(*results, strict=True):
        assert relative_error(ours.float(), exact) <= 1.5 * relative_error(own.float(), exact) + 2**-7
    assert results[0][2][5].count_nonzero() == 0


@needs("deepgemm")
def test_deepgemm_reads_fp8_weights():
    from moe_compile.kernels.external import deepgemm
    from moe_compile.kernels.quantised_linear import dequantise

    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(4, 256, 384, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(4, 2, 3, generator=generator, device="cuda") + 0.1
    x = torch.randn(50, 384, generator=generator, device="cuda").to(BF16)
    ids = torch.randint(-1, 4, (50, 2), generator=generator, device="cuda")
    padded, layout, position, ends = deepgemm.dispatch(x, ids, 4, deepgemm.alignment(), BF16)
    out = deepgemm.quantised_gemm(padded, weight, scale, layout, ends)
    kept = ids.reshape(-1) >= 0
    rows = out[position[kept].long()]
    matrices = dequantise(weight, scale)[ids.reshape(-1)[kept]]
    exact = torch.bmm(matrices, x.float().repeat_interleave(2, 0)[kept].unsqueeze(-1)).squeeze(-1)
    assert relative_error(rows.float(), exact) < 0.04  # e4m3 rounds each value by up to 2**-4
    assert load_kernel("deepgemm").report.version


@pytest.mark.parametrize("model_type", available("qwen3_moe"))
def test_what_is_missing_is_said_by_the_compile(model_type):
    module, inputs = standalone(model_type, BF16, device="cuda")
    with pytest.raises(ImportError, match="deepgemm_megamoe needs"):
        torch.compile(module, backend=moe_compile.backend("deepgemm_megamoe"))(*inputs)
