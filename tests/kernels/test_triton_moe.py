"""The `triton` backend: its ops against fp32, through torch.compile, and in CUDA graphs.

Everything here needs a GPU but the last test, which runs the kernels' index arithmetic in Triton's interpreter.
"""

import copy
import os
import subprocess
import sys

import pytest
import torch
from zoo import available, relative_error, standalone

import moe_compile
from moe_compile.errors import RuleError
from moe_compile.kernels.triton_moe.tiles import choose_tiles
from moe_compile.rules import Situation, triton_reasons
from moe_compile.spec import ExpertsSpec

SHAPES = [  # T, K, E, in, out
    (1, 2, 8, 64, 32),
    (7, 2, 4, 24, 40),
    (33, 3, 5, 17, 9),
    (256, 8, 128, 64, 96),
    (3000, 2, 3, 320, 160),
    (513, 1, 1, 40, 48),
    (100, 4, 300, 33, 65),
]


def make(shape, dtype, transposed, device, seed=0):
    tokens, top_k, experts, size_in, size_out = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, size_in, generator=generator)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)
    size = (experts, size_in, size_out) if transposed else (experts, size_out, size_in)
    weight = torch.randn(size, generator=generator) / size_in**0.5
    bias = torch.randn(experts, size_out, generator=generator)
    return x.to(device, dtype), ids.to(device), weight.to(device, dtype), bias.to(device, dtype)


def check(shape, dtype, transposed, device):
    """Order, ends, and both ways of writing the product, against a loop over experts in fp32."""
    from moe_compile.kernels.triton_moe.ops import grouped_linear, route

    x, ids, weight, bias = make(shape, dtype, transposed, device)
    top_k, experts = shape[1], shape[2]
    order, ends = route(ids, experts)
    flat = ids.reshape(-1)
    sorted_, expected_order = torch.where((flat < 0) | (flat >= experts), experts, flat).sort(stable=True)
    torch.testing.assert_close(order.long(), expected_order)
    counts = torch.bincount(sorted_, minlength=experts + 1)[:experts]
    torch.testing.assert_close(ends.long(), counts.cumsum(0))

    kept = int(ends[-1])
    matrices = (weight if transposed else weight.transpose(1, 2)).float()
    rows = x.float()[expected_order[:kept] // top_k].split(counts.tolist())
    parts = [part @ matrix + b for part, matrix, b in zip(rows, matrices, bias.float(), strict=True)]
    reference = torch.cat(parts)
    in_order = grouped_linear(x, weight, bias, order, ends, transposed=transposed, gather=top_k)
    by_pair = grouped_linear(x, weight, bias, order, ends, transposed=transposed, gather=top_k, scatter=True)
    # The inputs are exact in the dtype: what remains is one rounding of the result, and fp32 sums in another order.
    budget = torch.finfo(dtype).eps + 1e-5
    for actual in (in_order[:kept], by_pair[expected_order[:kept]]):
        assert actual.dtype == dtype
        assert kept == 0 or relative_error(actual.float(), reference) < budget
    copied = x[order.long() // top_k]
    assert torch.equal(grouped_linear(copied, weight, bias, order, ends, transposed=transposed)[:kept], in_order[:kept])


@pytest.mark.cuda
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_ops_match_fp32(shape, dtype, transposed):
    check(shape, dtype, transposed, "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(seed):
    """Twenty-five shapes a seed, 200 in all."""
    generator = torch.Generator().manual_seed(100 + seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    for _ in range(25):
        experts = draw(1, 70)
        shape = (draw(0, 400), draw(1, min(experts, 9) + 1), experts, draw(1, 200), draw(1, 200))
        dtype = (torch.float32, torch.float16, torch.bfloat16)[draw(0, 3)]
        check(shape, dtype, bool(draw(0, 2)), "cuda")


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model_type", available("qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark_text"))
def test_blocks_compile_in_every_mode_and_replay_other_routing(model_type, dtype, mode):
    module, (hidden, ids, weights) = standalone(model_type, dtype, tokens=24, device="cuda")
    oracle = copy.deepcopy(module).float()
    backend = moe_compile.backend("triton")
    function = torch.compile(module, backend=backend, fullgraph=True, mode=mode)
    for shift in range(5):
        moved = (ids + shift) % 8
        output = function(hidden, moved, weights).clone()
        reference = oracle(hidden.float(), moved, weights.float())
        own = relative_error(module(hidden, moved, weights).float(), reference)
        assert relative_error(output.float(), reference) <= 1.5 * own + 4 * torch.finfo(dtype).eps
    outside = torch.where(ids == 2, 99, ids)
    masked = weights.masked_fill(ids == 2, 0)
    expected = oracle(hidden.float(), ids, masked.float())
    assert relative_error(function(hidden, outside, weights).float(), expected) <= 8 * torch.finfo(dtype).eps + 0.01 * (
        dtype == torch.bfloat16
    )
    assert {block.chosen for block in backend.blocks.values()} == {"triton"}


@pytest.mark.cuda
@torch.no_grad()
def test_auto_takes_it_for_inference_and_not_for_training():
    module, inputs = standalone("qwen3_moe", torch.bfloat16, device="cuda")
    backend = moe_compile.backend("auto", compiler="aot_eager")
    torch.compile(module, backend=backend, fullgraph=True)(*inputs)
    assert {block.chosen for block in backend.blocks.values()} == {"triton"}
    torch._dynamo.reset()
    with torch.enable_grad():
        torch.compile(module, backend=backend, fullgraph=True)(*inputs)
    assert {block.chosen for block in backend.blocks.values()} == {"grouped_mm"}


def test_the_rule_names_what_is_missing():
    spec = ExpertsSpec(weight_dtype=torch.bfloat16)
    assert triton_reasons(spec, Situation("cuda", (8, 0), has_triton=True)) == ()
    for situation, expected in (
        (Situation("cpu", has_triton=True), "CUDA device"),
        (Situation("cuda", (7, 5), has_triton=True), "compute capability 8.0, this is 7.5"),
        (Situation("cuda", (9, 0)), "not installed"),
        (Situation("cuda", (9, 0), has_triton=True, training=True), "no backward"),
        (Situation("cuda", (9, 0), has_triton=True, dynamic_tokens=True), "symbolic"),
    ):
        assert expected in "; ".join(triton_reasons(spec, situation))
    assert triton_reasons(ExpertsSpec(weight_dtype=torch.float64), Situation("cuda", (9, 0), has_triton=True))


@torch.no_grad()
def test_on_a_cpu_it_is_refused_by_its_rule():
    module, inputs = standalone("qwen3_moe")
    with pytest.raises(RuleError, match="CUDA device"):
        torch.compile(module, backend=moe_compile.backend("triton", compiler="aot_eager"))(*inputs)


def test_blocks_fit_the_shared_memory_of_sm80():
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 8, 100, 1000, 3000, 100_000):
            tiles = choose_tiles(rows, 16, dtype.itemsize)
            assert (tiles.m + tiles.n) * tiles.k * dtype.itemsize * tiles.stages <= 163 * 1024


def test_index_arithmetic_in_the_interpreter():
    pytest.importorskip("triton")
    program = (
        "import torch, sys; sys.path[:0] = ['tests', 'tests/kernels']\n"
        "from test_triton_moe import SHAPES, check\n"
        "for shape in SHAPES:\n"
        "    if shape[0] < 300:\n"
        "        [check(shape, torch.float32, transposed, 'cpu') for transposed in (False, True)]\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in result.stderr:
        pytest.skip("this Triton's interpreter does not know this numpy, which no longer makes scalars of arrays")
    assert result.returncode == 0, result.stderr
