"""One experts block on a GPU: time per experts backend, token count and shape, against the hardware's floor.

    python benchmarks/experts_block.py [--shapes qwen3 mixtral] [--tokens 1 64 1024] [--json FILE]

Every cell is one block of transformers (bf16, random routing), compiled with `fullgraph=True`. `call` is the time of
the compiled call as a user makes it, `graph` the same work replayed as a CUDA graph; both in microseconds, median, cold
L2. `floor` is the larger of the bytes of the hit experts' weights and the activations over the measured copy bandwidth,
and the products' flops over the measured dense matmul rate. Peers (`hf ...`) are transformers' own implementations
under `torch.compile` alone, measured side by side.
"""

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
import triton
from tabulate import tabulate
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from triton.testing import do_bench

import moe_compile

SHAPES = {  # E, K, D, F
    "qwen3": (128, 8, 2048, 768),
    "mixtral": (8, 2, 4096, 14336),
    "deepseek_v3": (256, 8, 7168, 2048),
}
TOKENS = (1, 8, 64, 256, 1024, 8192)
# Gathering a matrix per pair is hopeless, and out of memory, beyond a few tokens.
BATCHED_MM_TOKENS = 8
BF16 = torch.bfloat16


def make_block(shape: str) -> torch.nn.Module:
    """An experts module of a shape, with random weights."""
    experts, top_k, hidden, inner = SHAPES[shape]
    config = transformers.Qwen3MoeConfig(
        num_experts=experts, num_experts_per_tok=top_k, hidden_size=hidden, moe_intermediate_size=inner
    )
    with torch.device("cuda"):
        module = Qwen3MoeExperts(config).to(BF16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return module.eval().requires_grad_(False)


def make_inputs(shape: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (T, D), distinct random expert ids (T, K), routing weights (T, K)."""
    experts, top_k, hidden, _ = SHAPES[shape]
    x = torch.randn(tokens, hidden, device="cuda", dtype=BF16)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k, dim=1).indices
    return x, ids, torch.rand(tokens, top_k, device="cuda").softmax(-1)


def rates() -> tuple[float, float]:
    """Measured copy bandwidth in bytes/s (read and write) and dense bf16 matmul rate in flops/s."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / (do_bench(lambda: target.copy_(source)) * 1e-3)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    return bandwidth, 2 * 8192**3 / (do_bench(lambda: a @ b) * 1e-3)


def floor(shape: str, ids: torch.Tensor, bandwidth: float, flops: float) -> float:
    """Least time of a call in microseconds."""
    _, top_k, hidden, inner = SHAPES[shape]
    tokens, hit = ids.shape[0], ids.unique().numel()
    num_bytes = 2 * (hit * 3 * hidden * inner + 2 * tokens * hidden)
    return max(num_bytes / bandwidth, 6 * tokens * top_k * hidden * inner / flops) * 1e6


def contenders(module: torch.nn.Module, tokens: int) -> dict[str, Callable]:
    """Name -> compiled block."""

    def peer(implementation: str) -> Callable:
        config = type(module.config)(**module.config.to_dict())
        config._experts_implementation = implementation
        twin = object.__new__(type(module))
        twin.__dict__ = {**module.__dict__, "config": config}
        return torch.compile(twin, fullgraph=True)

    def ours(experts: str) -> Callable:
        return torch.compile(module, backend=moe_compile.backend(experts), fullgraph=True)

    chosen = {"triton": ours("triton"), "grouped_mm": ours("grouped_mm"), "hf grouped_mm": peer("grouped_mm")}
    if tokens <= BATCHED_MM_TOKENS:
        chosen |= {"batched_mm": ours("batched_mm"), "hf batched_mm": peer("batched_mm")}
    return chosen


def graph_time(function: Callable, inputs: tuple) -> float:
    """Microseconds of a call replayed as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*inputs)
    return do_bench(graph.replay, return_mode="median") * 1e3


@torch.no_grad()
def measure(
    shape: str, module: torch.nn.Module, tokens: int, bandwidth: float, flops: float, only: list[str] | None
) -> list[dict]:
    """The rows of one shape and token count; every contender is checked against the first one's numbers."""
    inputs = make_inputs(shape, tokens)
    least = floor(shape, inputs[1], bandwidth, flops)
    rows, expected = [], None
    for name, function in contenders(module, tokens).items():
        if only and name not in only:
            continue
        output = function(*inputs).float()
        expected = output if expected is None else expected
        error = ((output - expected).norm() / expected.norm()).item()
        call = do_bench(lambda function=function: function(*inputs), return_mode="median") * 1e3
        graph = graph_time(function, inputs)
        row = {"shape": shape, "T": tokens, "experts": name, "floor": least, "call": call, "graph": graph}
        rows.append({**row, "floor/call": least / call, "floor/graph": least / graph, "error": error})
    torch._dynamo.reset()
    return rows


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--only", nargs="+", help="names of contenders, such as triton 'hf grouped_mm'")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    bandwidth, flops = rates()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 matmul {flops / 1e12:.0f} TFLOP/s")
    rows: list[dict] = []
    for shape in arguments.shapes:
        module = make_block(shape)
        for tokens in arguments.tokens:
            found = measure(shape, module, tokens, bandwidth, flops, arguments.only)
            rows += found
            print(tabulate([list(row.values()) for row in found], list(found[0]), floatfmt=".3g"), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(_record(rows, bandwidth, flops), indent=1) + "\n")
        del module
        torch.cuda.empty_cache()


def _record(rows: list[dict], bandwidth: float, flops: float) -> dict:
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
        },
        "bandwidth": bandwidth,
        "flops": flops,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
