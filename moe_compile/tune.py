"""Measures experts backends on this machine and keeps the table that `auto` then chooses by.

    moe-compile tune --shapes 128,8,2048,768 --dtypes bfloat16 --tokens 1 8 64 1024

Each block has random weights, a gated silu and random routing. Every legal backend is compiled with `fullgraph=True`
for each token count; the calls of all backends alternate in one process, so that what disturbs one disturbs the others,
and the medians are kept. A backend that falls far behind is not measured at larger counts.
"""

import argparse
import datetime
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

from moe_compile.backend import backend, device_situation
from moe_compile.capture.experts_block import experts_block
from moe_compile.errors import OptionError
from moe_compile.experts_backends import legal_names
from moe_compile.modes import CompileSettings
from moe_compile.spec import ExpertsSpec
from moe_compile.tables import BlockSize, Measurement, Table, cache_file, device_name, read_table, write_table

DEFAULT_SHAPES = {"cuda": ((128, 8, 2048, 768), (8, 2, 4096, 14336)), "cpu": ((32, 8, 2048, 768), (16, 4, 512, 256))}
DEFAULT_TOKENS = {"cuda": (1, 2, 8, 64, 256, 1024, 8192), "cpu": (1, 2, 4, 8, 16, 64, 128, 1024)}
# A backend this many times slower than the best one is hopeless for more tokens.
_HOPELESS = 4.0
_ROUNDS = 15
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class _Block(torch.nn.Module):
    """One experts block with random weights and a gated silu."""

    def __init__(self, size: BlockSize, device: str, training: bool) -> None:
        super().__init__()
        dtype = _DTYPES[size.dtype]

        def weight(*shape: int) -> torch.nn.Parameter:
            values = torch.empty(shape, device=device, dtype=dtype).normal_(std=shape[-1] ** -0.5)
            return torch.nn.Parameter(values, requires_grad=training)

        self.up = weight(size.num_experts, 2 * size.intermediate_size, size.hidden_size)
        self.down = weight(size.num_experts, size.hidden_size, size.intermediate_size)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return experts_block(x_TD, ids_TK, weights_TK, up=self.up, gate=_gated_silu, down=self.down)


def _gated_silu(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def tune(
    shapes: Iterable[Sequence[int]] | None = None,
    *,
    dtypes: Iterable[str] = ("bfloat16",),
    tokens: Iterable[int] | None = None,
    device: str | None = None,
    training: bool = False,
    rounds: int = _ROUNDS,
    note: Callable[[str], None] = lambda line: None,
) -> Table:
    """Measures the legal experts backends of this machine.

    Args:
        shapes: (E, K, D, F) of each block; None for two common ones.
        dtypes: of weights and activations: "bfloat16", "float16", "float32".
        tokens: token counts T; None for a range.
        device: "cuda" or "cpu"; None for CUDA where there is one.
        training: measure forward and backward as well, in entries of their own.
        rounds: how often each call is timed.
        note: told a line of text per measured token count.

    Returns:
        The table. Nothing is written.

    Raises:
        OptionError: for a shape, dtype, device or token count that cannot be.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    blocks = list(DEFAULT_SHAPES.get(device, ()) if shapes is None else shapes)
    sizes = [_check_size(shape, dtype) for dtype in dtypes for shape in blocks]
    counts = sorted(set(tokens or DEFAULT_TOKENS.get(device, ())))
    _check(device, sizes, counts)
    measurements = []
    for size in sizes:
        for trains in (False, True)[: 1 + training]:
            measurements += _measure_block(size, counts, device, trains, rounds, note)
    situation = device_situation(torch.device(device), CompileSettings(), fullgraph=True, training=False)
    return Table(
        device=device_name(device),
        device_type=device,
        capability=situation.capability,
        date=datetime.date.today().isoformat(),
        versions=_versions(),
        measurements=tuple(measurements),
    )


def _measure_block(
    size: BlockSize, counts: Sequence[int], device: str, training: bool, rounds: int, note: Callable[[str], None]
) -> list[Measurement]:
    """One block: called, and on CUDA also replayed as a CUDA graph."""
    module = _Block(size, device, training)
    spec = ExpertsSpec(
        num_experts=size.num_experts,
        top_k=size.top_k,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        weight_dtype=_DTYPES[size.dtype],
    )
    situation = device_situation(torch.device(device), CompileSettings(), fullgraph=True, training=training)
    names = [name for name in legal_names(spec, situation) if name != "eager"]
    in_graphs = replace(situation, settings=CompileSettings("reduce-overhead"))
    graph_safe = set(legal_names(spec, in_graphs)) if device == "cuda" and not training else set()
    called: dict[int, dict[str, float]] = {}
    replayed: dict[int, dict[str, float]] = {}
    for tokens in counts:
        inputs = _inputs(size, tokens, device, training)
        calls = {name: _compiled(module, name, inputs, training) for name in names}
        called[tokens] = _medians(calls, device, rounds)
        if graph_safe:
            replays = {name: _recorded(call) for name, call in calls.items() if name in graph_safe}
            replayed[tokens] = _medians(replays, device, rounds)
        torch._dynamo.reset()
        times = ", ".join(f"{name} {spent:.0f}" for name, spent in called[tokens].items())
        note(f"{_describe(size)}{' training' if training else ''} T={tokens}: {times} us")
        best = min(called[tokens].values())
        names = [name for name in names if called[tokens][name] < _HOPELESS * best]
    found = [Measurement(size, training, False, called)]
    return found + ([Measurement(size, training, True, replayed)] if replayed else [])


def _inputs(size: BlockSize, tokens: int, device: str, training: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, size.hidden_size, device=device, dtype=_DTYPES[size.dtype], requires_grad=training)
    ids = torch.rand(tokens, size.num_experts, device=device).topk(size.top_k, dim=1).indices
    weights = torch.rand(tokens, size.top_k, device=device).softmax(-1).requires_grad_(training)
    return x, ids, weights


def _compiled(module: torch.nn.Module, name: str, inputs: tuple[Tensor, ...], training: bool) -> Callable[[], object]:
    function = torch.compile(module, backend=backend(name), fullgraph=True, dynamic=False)

    def forward() -> object:
        with torch.no_grad():
            return function(*inputs)

    def step() -> object:
        for tensor in (*inputs, *module.parameters()):
            tensor.grad = None
        function(*inputs).sum().backward()
        return None

    call = step if training else forward
    call()
    return call


def _recorded(call: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _medians(calls: dict[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """Median microseconds of each call; all of them take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    flushed = torch.empty(256 << 20, dtype=torch.int8, device=device) if device == "cuda" else None
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            spent = _time_on_gpu(call, flushed) if flushed is not None else _time_on_host(call)
            if round_:  # the first one warms up
                times[name].append(spent)
    return {name: round(statistics.median(spent), 2) for name, spent in times.items()}


def _time_on_host(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _time_on_gpu(call: Callable[[], object], flushed: Tensor) -> float:
    """Microseconds of a call whose weights are not in the L2 cache, launches included."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flushed.zero_()
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _check_size(shape: Sequence[int], dtype: str) -> BlockSize:
    if dtype not in _DTYPES:
        raise OptionError(f"dtype={dtype!r}", "tune does not measure it", f"Use one of {', '.join(_DTYPES)}")
    if len(shape) != 4 or not all(isinstance(size, int) and size > 0 for size in shape) or shape[1] > shape[0]:
        raise OptionError(f"shape={tuple(shape)!r}", "it is no block", "Give E, K, D, F: positive, K at most E")
    experts, top_k, hidden, inner = shape
    return BlockSize(experts, top_k, hidden, inner, dtype)


def _check(device: str, sizes: Sequence[BlockSize], counts: Sequence[int]) -> None:
    if device not in DEFAULT_SHAPES:
        raise OptionError(f"device={device!r}", "tune does not know it", f"Use one of {', '.join(DEFAULT_SHAPES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("device='cuda'", "there is no CUDA device", "Use cpu")
    if not sizes or not counts or counts[0] < 1:
        raise OptionError(f"tokens={list(counts)!r}", "there is nothing to measure", "Give token counts of at least 1")


def _versions() -> dict[str, str]:
    from moe_compile import __version__

    found = {"torch": torch.__version__, "moe_compile": __version__}
    try:
        return {**found, "triton": importlib.metadata.version("triton")}
    except importlib.metadata.PackageNotFoundError:
        return found


def _describe(size: BlockSize) -> str:
    return f"E={size.num_experts} K={size.top_k} D={size.hidden_size} F={size.intermediate_size} {size.dtype}"


# The subcommand ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what `moe-compile tune` takes."""
    parser.add_argument("--shapes", nargs="+", metavar="E,K,D,F", help="blocks to measure; two common ones by default")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=list(_DTYPES))
    parser.add_argument("--tokens", nargs="+", type=int, metavar="T", help="token counts")
    parser.add_argument("--device", choices=list(DEFAULT_SHAPES), help="CUDA where there is one, by default")
    parser.add_argument("--training", action="store_true", help="measure forward and backward as well")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="how often each call is timed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write; the user's cache by default")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table and keeps it; returns the exit status."""
    shapes = None if arguments.shapes is None else [_parse_shape(text) for text in arguments.shapes]
    table = tune(
        shapes,
        dtypes=arguments.dtypes,
        tokens=arguments.tokens,
        device=arguments.device,
        training=arguments.training,
        rounds=arguments.rounds,
        note=print,
    )
    print(render(table))
    path = arguments.out or cache_file(table.device)
    write_table(merge(table, read_table(path)), path)
    print(f"written to {path}")
    return 0


def merge(table: Table, older: Table | None) -> Table:
    """A table, with what an older one of the same device holds of other blocks."""
    if older is None or older.device != table.device:
        return table
    measured = {(m.size, m.training, m.cuda_graphs) for m in table.measurements}
    kept = [m for m in older.measurements if (m.size, m.training, m.cuda_graphs) not in measured]
    return replace(table, measurements=(*kept, *table.measurements))


def render(table: Table, style: str = "simple") -> str:
    """The table as text: microseconds per block, token count and backend, and which one is fastest."""
    names = sorted({name for m in table.measurements for times in m.microseconds.values() for name in times})
    rows = []
    for measurement in table.measurements:
        how = "training" if measurement.training else "CUDA graph" if measurement.cuda_graphs else "call"
        for tokens, times in sorted(measurement.microseconds.items()):
            fastest = min(times, key=times.__getitem__)
            rows.append([_describe(measurement.size), how, tokens, *(times.get(name) for name in names), fastest])
    return tabulate(rows, ["block", "", "T", *names, "fastest"], tablefmt=style, floatfmt=".0f")


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(
            f"--shapes {text}", "it is no list of numbers", "Write E,K,D,F as in 128,8,2048,768"
        ) from None
