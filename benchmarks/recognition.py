"""What recognition costs of a compile: two models whose experts are loops over separate layers, small but deep.

    python benchmarks/recognition.py [--compiler aot_eager]

Prints seconds for Dynamo's trace, for finding and proving the blocks, for the rest of our passes and for the compiler
behind them, and how recognition grows with the number of nodes.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from tabulate import tabulate
from torch import Tensor, nn

import moe_compile
from moe_compile import passes

D, F_, TOKENS = 32, 16, 24


class Expert(nn.Module):
    """Mixtral's: two projections up, one down."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*sizes, bias=False) for sizes in ((D, F_), (F_, D), (D, F_)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """A norm, a router and the loop over experts of transformers 4."""

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.norm, self.gate, self.top_k = nn.RMSNorm(D), nn.Linear(D, experts, bias=False), top_k
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        weights, ids = F.softmax(self.gate(hidden), dim=-1, dtype=torch.float).topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        masks = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
        total = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            slot, token = torch.where(masks[number])
            rows = expert(hidden[None, token].reshape(-1, D)) * weights[token, slot, None]
            total.index_add_(0, token, rows.to(hidden.dtype))
        return x + total


def timed(name: str, seconds: dict[str, float], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that adds the time it takes to `seconds[name]`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    return call


def measure(experts: int, top_k: int, layers: int, compiler: str) -> dict[str, Any]:
    """Compiles one model and returns what each part took, in seconds."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(experts, top_k) for _ in range(layers))).eval()
    seconds: dict[str, float] = {}
    backend = moe_compile.backend("grouped_mm", compiler=compiler)
    with (
        mock.patch.object(passes, "recognize", timed("recognition", seconds, passes.recognize)),
        mock.patch.object(passes, "apply", timed("recognition", seconds, passes.apply)),
        mock.patch.object(type(backend), "__call__", timed("behind Dynamo", seconds, type(backend).__call__)),
        torch.no_grad(),
    ):
        start = time.perf_counter()
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(TOKENS, D))
        total = time.perf_counter() - start
    assert len(backend.blocks) == layers, backend.rejected
    nodes = sum(graph.nodes_before for graph in backend.graphs)
    return {
        "experts x layers": f"{experts} x {layers}",
        "nodes": nodes,
        "trace": total - seconds["behind Dynamo"],
        "recognition": seconds["recognition"],
        "the rest": seconds["behind Dynamo"] - seconds["recognition"],
        "total": total,
        "share": f"{seconds['recognition'] / total:.1%}",
        "us per node": 1e6 * seconds["recognition"] / nodes,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--shapes", nargs="*", default=["8x8", "8x32", "32x4", "128x4"], help="experts x layers")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    measure(4, 2, 1, options.compiler)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    rows = [measure(experts, 2 if experts <= 8 else 8, layers, options.compiler) for experts, layers in shapes]
    print(tabulate(rows, headers="keys", floatfmt=".2f"))


if __name__ == "__main__":
    main()
