"""What `moe-compile bench` says: the time of a call per experts backend, all of them alternating in one process."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tabulate import tabulate

from moe_compile.backend import MoeBackend, backend
from moe_compile.compatibility import small_block
from moe_compile.compatibility.machine import Machine
from moe_compile.compatibility.measure import distance, one_line, run
from moe_compile.compatibility.subject import Subject, subject_of
from moe_compile.errors import MoeCompileError, OptionError
from moe_compile.experts_backends import EXPERTS_BACKENDS, check_name
from moe_compile.modes import resolve_settings

# Name -> what is called, and the backend of ours that compiles it.
Contenders = dict[str, tuple[Callable[..., Any], MoeBackend | None]]

UNCOMPILED, ALONE = "uncompiled", "torch.compile alone"


@dataclass(frozen=True)
class Timing:
    """One contender.

    Attributes:
        name: an experts backend, "uncompiled" or "torch.compile alone".
        ran: what ran the blocks, "" where that is not ours to say.
        microseconds: median time of a call, None if it did not run.
        ratio: time over that of the uncompiled model.
        relative_error: distance to the uncompiled model's results in the same dtype.
        problem: why it did not run, "" if it did.
    """

    name: str
    ran: str = ""
    microseconds: float | None = None
    ratio: float | None = None
    relative_error: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Benchmark:
    """What was timed; `str()` of it is a table."""

    machine: Machine
    subject: str
    timings: tuple[Timing, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for JSON."""
        timings = [asdict(timing) for timing in self.timings]
        return {"machine": self.machine.to_dict(), "subject": self.subject, "timings": timings}

    def __str__(self) -> str:
        rows = [
            (t.name, t.ran, f"{t.microseconds / 1e3:.3f}", f"{t.ratio:.2f}", f"{t.relative_error:.1e}")
            for t in self.timings
            if t.microseconds is not None
        ]
        table = tabulate(rows, ["experts", "ran", "ms a call", "/ uncompiled", "difference"], disable_numparse=True)
        problems = [f"not {timing.name}: {timing.problem}" for timing in self.timings if timing.problem]
        return "\n\n".join([f"{self.machine}\n{self.subject}", table, *problems])


def bench(
    experts: Sequence[str] | None = None,
    *,
    model: str | None = None,
    sizes: str = "",
    dtype: str = "bfloat16",
    mode: str | None = None,
    training: bool = False,
    device: str | None = None,
    seconds: float = 2.0,
) -> Benchmark:
    """Times a model or a block with each experts backend.

    Args:
        experts: names of experts backends; every registered one by default. One that is not allowed here is listed
            with the reason.
        model: `module:function`, None for one block with random weights and routing.
        sizes: of that block, such as "E=8,K=2,D=512,F=256,T=64".
        dtype: of weights and activations.
        mode: compile mode.
        training: forward and backward.
        device: "cpu" or "cuda"; CUDA by default where there is one.
        seconds: of timing per contender.

    Raises:
        MoeCompileError: a child of it, for a name, mode, dtype, device or model that cannot be used.
    """
    names = [check_name(name) for name in experts or EXPERTS_BACKENDS]
    resolve_settings(mode, None)
    if dtype not in ("bfloat16", "float16", "float32", "float64"):
        raise OptionError(f"dtype={dtype!r}", "this is no dtype of weights", "Use bfloat16, float16 or float32")
    machine = Machine.here(device)
    subject = subject_of(model) if model is not None else _block(sizes)
    subject = subject.cast(getattr(torch, dtype), machine.device_type)
    what = f"{model or sizes or 'one block'}, {dtype}, {'training' if training else 'inference'}, mode={mode}"
    # Every contender is one more entry in Dynamo's cache for the same code.
    with torch._dynamo.config.patch(recompile_limit=64):
        timings = _timed(subject, _contenders(subject, names, mode), training, seconds)
    return Benchmark(machine, what, tuple(timings))


def _contenders(subject: Subject, names: list[str], mode: str | None) -> Contenders:
    module = subject.module
    found: Contenders = {
        UNCOMPILED: (module, None),
        ALONE: (torch.compile(module, mode=mode), None),
    }
    for name in names:
        made = backend(name)
        found[name] = (torch.compile(module, backend=made, mode=mode), made)
    return found


def _timed(subject: Subject, contenders: Contenders, training: bool, seconds: float) -> list[Timing]:
    timings: dict[str, Timing] = {}
    expected = None
    for name, (module, made) in contenders.items():
        try:
            for _ in range(2):
                results = run(replace(subject, module=module), training)
        except Exception as error:
            if name == UNCOMPILED:
                raise
            problem = error.found if isinstance(error, MoeCompileError) else one_line(error)
            timings[name] = Timing(name, problem=problem)
            continue
        expected = results if expected is None else expected
        ran = sorted({block.chosen or "own code" for block in made.blocks.values()}) if made is not None else []
        timings[name] = Timing(name, ", ".join(ran), relative_error=distance(results, expected))
    times: dict[str, list[float]] = {name: [] for name, timing in timings.items() if not timing.problem}
    end = time.perf_counter() + seconds * len(times)
    while time.perf_counter() < end:
        for name, measured in times.items():  # in turns, so that a busy moment hits all alike
            start = time.perf_counter()
            run(replace(subject, module=contenders[name][0]), training)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            measured.append(time.perf_counter() - start)
    base = statistics.median(times[UNCOMPILED])
    for name, measured in times.items():
        median = statistics.median(measured)
        timings[name] = replace(timings[name], microseconds=median * 1e6, ratio=median / base)
    return list(timings.values())


def _block(sizes: str) -> Subject:
    given = {"E": 8, "K": 2, "D": 512, "F": 256, "T": 64}
    for part in filter(None, sizes.split(",")):
        name, _, value = part.partition("=")
        if name not in given or not value.isdigit() or not int(value):
            raise OptionError(f"sizes={sizes!r}", f"{part!r} is no size", "Write them as E=8,K=2,D=512,F=256,T=64")
        given[name] = int(value)
    if given["K"] > given["E"]:
        raise OptionError(f"sizes={sizes!r}", "there are fewer experts than a token takes", "Make K at most E")
    block = small_block.SmallExperts(given["E"], given["D"], given["F"])
    return Subject(block, ((small_block.inputs(0, given["T"], given["D"], given["E"], given["K"]), {}),))
