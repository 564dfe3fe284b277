"""Experts' weights in separate parameters beside weights that were stacked from the start: bytes and time, in one run.

    python benchmarks/stacking.py [--layers 48 --experts 128 --hidden 64 --inner 32 --tokens 64]

Both models compute the same with the same graph; the sides are timed in turn, and the smallest time of each counts.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn

import moe_compile
import moe_compile.ops
from moe_compile.stacking import stack, stacked, stacked_weights

TOP_K = 8


class Separate(nn.Module):
    """E experts with three parameters each, stacked by `moe_compile`."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        sizes = {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()}) for _ in range(experts)
        )

    def stack(self) -> None:
        numbers = range(len(self.experts))
        stack(self, {name: [f"experts.{e}.{name}.weight" for e in numbers] for name in ("gate", "up", "down")})

    def weight(self, name: str) -> Tensor:
        return stacked(self, name)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        rows, offsets, order = torch.ops.moe.dispatch(x, ids, self.router.out_features)
        linear = torch.ops.moe.grouped_linear
        up = linear(rows, self.weight("up"), None, offsets, False)
        inner = nn.functional.silu(linear(rows, self.weight("gate"), None, offsets, False)) * up
        out = linear(inner, self.weight("down"), None, offsets, False)
        return x + torch.ops.moe.combine(out, weights, order, x.dtype)


class Stacked(Separate):
    """The same with three parameters (E, ...)."""

    def __init__(self, other: Separate) -> None:
        nn.Module.__init__(self)
        self.router = other.router
        for name in ("gate", "up", "down"):
            setattr(self, name, nn.Parameter(torch.stack([e[name].weight.detach() for e in other.experts])))

    def weight(self, name: str) -> Tensor:
        return getattr(self, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in {"layers": 48, "experts": 128, "hidden": 64, "inner": 32, "tokens": 64, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", default="aot_eager")
    parser.add_argument("--experts-backend", default="grouped_mm")
    options = parser.parse_args()

    torch.manual_seed(0)
    layers = [Separate(options.experts, options.hidden, options.inner) for _ in range(options.layers)]
    separate = nn.Sequential(*layers).to(options.device)
    beside = nn.Sequential(*(Stacked(layer) for layer in layers)).to(options.device)
    x = torch.randn(options.tokens, options.hidden, device=options.device)
    start, before = time.perf_counter(), _Memory(x.device)
    for layer in layers:
        layer.stack()
    took, (steady, peak) = time.perf_counter() - start, before.growth()
    largest = max(weight.nbytes for weight in stacked_weights(layers[0]))
    print(f"{sum(len([*layer.experts.parameters()]) for layer in layers)} parameters,", end=" ")
    print(f"{sum(p.nbytes for p in separate.parameters())} bytes, the largest stacked weight has {largest}")
    print(f"stacked in {took:.2f} s; process memory grew by {steady} bytes, {peak} at the peak")

    rows = []
    for kind in ("inference", "training"):
        torch._dynamo.reset()
        sides = {}
        for name, model in {"stacked from the start": beside, "separate parameters": separate}.items():
            backend = moe_compile.backend(options.experts_backend, compiler=options.compiler)
            sides[name] = _step(torch.compile(model, backend=backend, fullgraph=True), model, x, kind == "training")
        compile_times = {name: _time(side) for name, side in sides.items()}
        times = {name: min(_time(side) for _ in range(options.repeats)) for name, side in sides.items()}
        for _ in range(options.repeats):  # in turn
            times = {name: min(times[name], _time(side)) for name, side in sides.items()}
        reference = times["stacked from the start"], compile_times["stacked from the start"]
        for name in sides:
            ratios = f"{times[name] / reference[0]:.3f}", f"{compile_times[name] / reference[1]:.3f}"
            rows.append((kind, name, f"{times[name] * 1e3:.1f}", ratios[0], f"{compile_times[name]:.1f}", ratios[1]))
    check = time.perf_counter()
    for layer in layers:
        layer._moe_compile_stacks.state  # noqa: B018  what a guard reads
    print(f"the check of all parameters, part of each call: {(time.perf_counter() - check) * 1e3:.2f} ms")
    print(tabulate(rows, ["", "weights", "ms", "ratio", "compile s", "ratio"], disable_numparse=True))


class _Memory:
    """How much memory is in use from here on: the allocator's on CUDA, the process's resident set on CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        self.start, _ = self._now()

    def growth(self) -> tuple[int, int]:
        """Bytes more than at the start: now, and at the peak."""
        now, peak = self._now()
        return now - self.start, peak - self.start

    def _now(self) -> tuple[int, int]:
        if self.cuda:
            return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        now, peak = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return now, peak


def _step(compiled: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, training: bool) -> Callable[[], None]:
    def infer() -> None:
        with torch.no_grad():
            compiled(x)

    def train() -> None:
        model.zero_grad()
        compiled(x).sum().backward()

    return train if training else infer


def _time(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
