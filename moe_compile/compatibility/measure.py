"""Runs one cell in this process: compiles, compares with an oracle, times.

The rule plays no part here: what it forbids is tried as well, since whether it is right is the question.
"""

import contextlib
import fcntl
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_compile.backend import MoeBackend
from moe_compile.compatibility.cells import Key, Outcome
from moe_compile.compatibility.subject import Subject, floating_outputs, subject_of
from moe_compile.errors import ModelFunctionError, MoeCompileError
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec

# Timed calls: as many as fit into the seconds, between the two bounds.
_SECONDS, _FEWEST, _MOST = 0.3, 5, 200


@dataclass(frozen=True)
class Job:
    """A cell to run.

    Attributes:
        key: the cell.
        device: "cpu" or "cuda".
        model: `module:function` of the user's model, None for the small block.
        timing_lock: a file to hold locked while timing, since several cells may run at once.
    """

    key: Key
    device: str
    model: str | None
    timing_lock: str


def run_cell(job: Job) -> Outcome:
    """Runs a cell.

    Raises:
        ModelFunctionError: if the user's model function does not give a model that runs.
    """
    subject = subject_of(job.model)
    key, dtype = job.key, getattr(torch, job.key.dtype)
    oracle, oracle_dtype = _oracle(subject, job)
    # Sums may run in another order, hence twice what the uncompiled model itself loses, and two roundings; a hundred
    # where there is no oracle more precise than the model.
    roundings = 100 if oracle_dtype == dtype else 2
    budget = 2 * distance(_reference(subject, dtype, job), oracle) + roundings * torch.finfo(dtype).eps

    backend = MoeBackend(key.experts, "error", "inductor")
    backend.override = _allow
    cast = subject.cast(dtype, job.device)
    compiled = torch.compile(cast.module, backend=backend, mode=key.mode, fullgraph=key.fullgraph)
    try:
        # Twice around: CUDA graphs are recorded on the second call and replayed, with other routing, from the third on.
        for _ in range(2):
            actual = run(replace(cast, module=compiled), key.training)
        ran = sorted({block.chosen or "own code" for block in backend.blocks.values()})
        if not ran:
            return Outcome("error", "no experts block was found in the model", graphs=len(backend.graphs))
        error = distance(actual, oracle)
        outcome = Outcome("ok", "", ", ".join(ran), relative_error=error, budget=budget, graphs=len(backend.graphs))
        if not error <= budget:  # nan is wrong as well
            message = f"relative error {error:.2g}, the budget is {budget:.2g}"
            return replace(outcome, kind="wrong numbers", message=message)
        with _locked(job.timing_lock):
            seconds = _median_seconds(lambda: run(replace(cast, module=compiled, calls=cast.calls[:1]), key.training))
        return replace(outcome, microseconds=round(seconds * 1e6, 1))
    except Exception as error:
        return Outcome("error", one_line(error))


def one_line(error: BaseException) -> str:
    """The line of an exception that says most: the message of the innermost one."""
    seen = set()
    while not isinstance(error, MoeCompileError) and id(error) not in seen:
        seen.add(id(error))
        inner = getattr(error, "inner_exception", None) or error.__cause__
        if inner is None:
            break
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return line if len(line) <= 240 else line[:237] + "..."


def _allow(name: str, spec: ExpertsSpec, situation: Situation, reasons: tuple[str, ...]) -> tuple[str, ...]:
    return ()


def _oracle(subject: Subject, job: Job) -> tuple[list[Tensor], torch.dtype]:
    """Results of the uncompiled model in float64 or, where it cannot be run so, in float32."""
    try:
        return _reference(subject, torch.float64, job), torch.float64
    except ModelFunctionError:
        return _reference(subject, torch.float32, job), torch.float32


def _reference(subject: Subject, dtype: torch.dtype, job: Job) -> list[Tensor]:
    try:
        return run(subject.cast(dtype, job.device), job.key.training)
    except ModelFunctionError:
        raise
    except Exception as error:
        raise ModelFunctionError(
            f"model {job.model!r}", f"uncompiled, in {dtype}, it raised {one_line(error)}", "Make it run uncompiled"
        ) from error


def run(subject: Subject, training: bool) -> list[Tensor]:
    """Outputs of every call, and in training the gradients, as detached tensors."""
    results: list[Tensor] = []
    for args, kwargs in subject.calls:
        with torch.set_grad_enabled(training):
            torch.compiler.cudagraph_mark_step_begin()
            outputs = floating_outputs(subject.module(*args, **kwargs))
            if not outputs:
                raise ModelFunctionError(
                    "the model", "it returned no floating-point tensor", "Make it return its logits or hidden states"
                )
            # CUDA graphs reuse the memory of what they returned.
            results += [output.detach().clone() for output in outputs]
            if training:
                results += _gradients(subject, (args, kwargs), outputs)
    return results


def _gradients(subject: Subject, call: Any, outputs: list[Tensor]) -> list[Tensor]:
    parameters = list(subject.module.parameters()) if isinstance(subject.module, torch.nn.Module) else []
    inputs = [leaf for leaf in torch.utils._pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    wanted = [tensor for tensor in (*parameters, *inputs) if tensor.requires_grad]
    output = next(output for output in outputs if output.requires_grad)
    cotangent = torch.linspace(-1, 1, output.numel(), device=output.device).reshape(output.shape).to(output.dtype)
    found = torch.autograd.grad(output, wanted, cotangent, allow_unused=True, materialize_grads=True)
    return [gradient.detach().clone() for gradient in found]


def distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of all results."""
    worst = 0.0
    for got, exact in zip(actual, expected, strict=True):
        exact = exact.double()
        scale = exact.norm().item()
        error = (got.double() - exact).norm().item()
        relative = error / scale if scale else error
        if relative != relative:
            return relative
        worst = max(worst, relative)
    return worst


def _median_seconds(call: Callable[[], object]) -> float:
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < _FEWEST or (len(times) < _MOST and time.perf_counter() < end):
        start = time.perf_counter()
        call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
