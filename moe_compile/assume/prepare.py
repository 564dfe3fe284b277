"""`prepare`, `compile` and `release`: any model with experts blocks, as one graph."""

from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from moe_compile.assume import forced_routing
from moe_compile.assume.find import Call, find_host_reads
from moe_compile.assume.prepared import Prepared, altered, install, prepared_of, uninstall
from moe_compile.assume.program import make_program
from moe_compile.assume.trace import CannotAssumeError
from moe_compile.backend import MoeBackend, backend
from moe_compile.errors import OptionError
from moe_compile.selection import Experts
from moe_compile.side_effects import undone
from moe_compile.spec import ExpertsSpec
from moe_compile.stacking import StackedWeight, stack, stacked_weights, unstack

# How far around a module that reads data its experts block may reach.
_LEVELS = 2


@dataclass(frozen=True)
class PreparedBlock:
    """A module whose forward is swapped in traces for our backend.

    Attributes:
        path: module path in the model.
        module: name of its class.
        source: `file.py:line` of its experts block, None if unknown.
        spec: layout and arithmetic.
        assumed: what had to be assumed and was shown to lose nothing: question, `file.py:line`.
        weights: the experts' weights that were separate parameters and now lie in one buffer each.
    """

    path: str
    module: str
    source: str | None
    spec: ExpertsSpec
    assumed: tuple[tuple[str, str], ...]
    weights: tuple[StackedWeight, ...] = ()


@dataclass(frozen=True)
class NotPrepared:
    """A module whose Python reads data and that keeps its own code.

    Attributes:
        path: module path in the model.
        module: name of its class.
        source: `file.py:line`.
        reason: why.
    """

    path: str
    module: str
    source: str
    reason: str


@dataclass(frozen=True)
class Preparation:
    """What `prepare()` did; `str()` of it is a report.

    Attributes:
        prepared: the modules that are now one graph.
        not_prepared: the modules that read data on the host and stay as they are.
    """

    prepared: tuple[PreparedBlock, ...]
    not_prepared: tuple[NotPrepared, ...]

    def __str__(self) -> str:
        parts = [f"{len(self.prepared)} modules prepared, {len(self.not_prepared)} keep their own code"]
        if self.prepared:
            rows = [(p.path or "(model)", p.module, p.spec.summary(), len(p.assumed), p.source) for p in self.prepared]
            parts.append(tabulate(rows, ["prepared", "class", "spec", "assumptions", "source"]))
            weights = [f"weights of {p.path or '(model)'}: {weight}" for p in self.prepared for weight in p.weights]
            parts += ["\n".join(weights)] if weights else []
        if self.not_prepared:
            rows_n = [(n.path or "(model)", n.module, n.reason, n.source) for n in self.not_prepared]
            parts.append(tabulate(rows_n, ["left alone", "class", "reason", "source"]))
        return "\n\n".join(parts)


def prepare(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Preparation:
    """Makes the experts blocks of a model traceable as one graph, in place.

    The model runs once, uncompiled. Each module whose Python reads data on the host, such as a loop over the experts
    that were hit, is traced on the assumption that every expert has tokens, proven to be an experts block, and what was
    assumed is justified. From then on its forward is swapped inside traces for a moe_compile backend, and nowhere else:
    uncompiled calls, other backends, `state_dict`, copies and hooks see the module as it was. Preparing again adds what
    is new.

    Args:
        model: any module.
        *args: example arguments; one call must reach every experts block.
        **kwargs: example keyword arguments.

    Returns:
        What was prepared, and what was not, with the line and the reason.

    Raises:
        OptionError: if `model` is no module.
        Exception: whatever the model itself raises.
    """
    model = _module(model, "prepare")
    with undone(model):
        calls = find_host_reads(model, args, kwargs)
    prepared: dict[str, PreparedBlock] = {}
    refused: dict[tuple[str, str], NotPrepared] = {}
    for call in calls:
        if any(call in other.inside for other in calls):
            continue  # what it reads itself lies outside the experts, which a module in it holds
        failure = _prepare_outwards(call, prepared)
        if failure is not None:
            source = failure.source or call.source
            name = type(call.module).__name__
            refused.setdefault((source, failure.reason), NotPrepared(call.path, name, source, failure.reason))
    return Preparation(tuple(prepared.values()), tuple(refused.values()))


def _prepare_outwards(call: Call, prepared: dict[str, PreparedBlock]) -> CannotAssumeError | None:
    """Prepares a module, or a module around it: one that only routes or sorts is a part of the block."""
    failure: CannotAssumeError | None = None
    for candidate in (call, *call.inside[:_LEVELS]):
        if candidate.path in prepared or prepared_of(candidate.module) is not None:
            return None
        try:
            prepared[candidate.path] = _prepare(candidate)
            return None
        except CannotAssumeError as error:
            failure = failure or error
    return failure


def release(model: torch.nn.Module) -> None:
    """Undoes `prepare`: every module and class is as it was before.

    Raises:
        OptionError: if `model` is no module.
    """
    for module in _module(model, "release").modules():
        if prepared_of(module) is not None:
            uninstall(module)
        unstack(module)


def compile(
    model: torch.nn.Module, experts: MoeBackend | Experts = "auto", **torch_compile_kwargs: Any
) -> torch.nn.Module:
    """Prepares a model at its first call and compiles it with `torch.compile`.

        model = moe_compile.compile(model, "grouped_mm", fullgraph=True)

    Args:
        model: any module.
        experts: what `moe_compile.backend()` takes, or such a backend.
        **torch_compile_kwargs: `fullgraph`, `dynamic`, `mode`, `options`, as for `torch.compile`.

    Returns:
        The compiled module.

    Raises:
        OptionError: if `model` is no module, or `backend` is among the keywords.
        UnknownBackendError, SelectionError: for experts backends that do not exist.
    """
    model = _module(model, "compile")
    if "backend" in torch_compile_kwargs:
        raise OptionError(
            "compile(..., backend=...)", "the backend is moe_compile's", "Pass moe_compile.backend(...) as `experts`"
        )
    chosen = experts if isinstance(experts, MoeBackend) else backend(experts)
    compiled = torch.compile(model, backend=chosen, **torch_compile_kwargs)
    assert isinstance(compiled, torch.nn.Module)

    def prepare_once(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hook.remove()
        prepare(model, *args, **kwargs)

    hook = compiled.register_forward_pre_hook(prepare_once, with_kwargs=True, prepend=True)
    return compiled


def _prepare(call: Call) -> PreparedBlock:
    module = call.module
    reason = altered(module)
    if reason is not None:
        raise CannotAssumeError(reason, call.source)
    experts = _count_experts(module)
    program = make_program(module, call.args, call.kwargs, experts)
    forced_routing.check(program, module, call.args, call.kwargs)
    prepared = Prepared(experts)
    prepared.keep(module, call.args, call.kwargs, program)
    install(module, prepared)
    if program.stacks:
        stack(module, program.stacks)
    first = program.matches[0]
    assumed = tuple((a.expression, a.source) for a in program.traced.assumptions)
    weights = stacked_weights(module)
    return PreparedBlock(call.path, type(module).__name__, first.source, first.spec, assumed, weights)


def _count_experts(module: torch.nn.Module) -> int:
    """E, as a module's children or stacked weights say: the longest list of modules, else the first axis."""
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    lengths = [len(child) for child in module.modules() if isinstance(child, lists)]
    stacked = [p.shape[0] for p in module.parameters() if p.dim() == 3]
    return max(lengths, default=max(stacked, default=1))


def _module(model: Any, verb: str) -> torch.nn.Module:
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"{verb}({type(model).__name__})", "this is no module", "Pass a torch.nn.Module")
    return model
