"""`moe_compile.explain(model, *args)`: what would be found and done, without compiling anything for real."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch._dynamo.utils import graph_break_reasons
from torch.fx import GraphModule

from moe_compile.backend import MoeBackend
from moe_compile.backend import backend as make_backend
from moe_compile.capture import tracing
from moe_compile.decision import OnReject
from moe_compile.errors import FallbackWarning, UnseenExpertsWarning
from moe_compile.kernels.external.loading import LoadedKernel, loaded_kernels
from moe_compile.modes import CompileSettings, resolve_settings
from moe_compile.report import Coverage, Explanation, GraphBreak
from moe_compile.selection import Experts
from moe_compile.side_effects import undone
from moe_compile.stacking import StackedWeight, stacked_weights


def explain(
    model: Callable[..., Any],
    *args: Any,
    backend: MoeBackend | Experts = "auto",
    mode: str | None = None,
    **kwargs: Any,
) -> Explanation:
    """Finds the experts blocks of a model and says what would run them, and why not something else.

    The model runs once, on the arguments given, with its blocks rewritten but nothing compiled. Its buffers, the random
    number generators and what was compiled before stay as they were, gradients are not touched. What the model itself
    writes into its arguments, such as a cache of keys and values, stays there.

    Args:
        model: a module, compiled or not, or a function.
        *args: its arguments.
        backend: what `torch.compile(backend=...)` would get, or only the `experts` of it.
        mode: compile mode to judge by; bind a model's own argument of this name with `functools.partial`.
        **kwargs: its keyword arguments.

    Returns:
        The findings; a rule that forbids the backend is a reason in them, never an error.

    Raises:
        UnknownBackendError, SelectionError, OptionError: for a backend or mode that does not exist.
        Exception: whatever the model itself raises when it runs uncompiled.
    """
    resolve_settings(mode, None)
    recorder = _Recorder(backend)
    function = getattr(model, "_orig_mod", model)

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    error = None
    breaks_before = len(graph_break_reasons)
    # Every layer is traced on its own, which is more than Dynamo's limits for one function allow.
    limits = torch._dynamo.config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16)
    with undone(function), limits, warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        warnings.simplefilter("ignore", UnseenExpertsWarning)
        try:
            torch.compile(run, backend=recorder, mode=mode, **_APART)(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as caught:
            error = str(caught).strip().splitlines()[0]
        finally:
            tracing.forget_compiled(recorder.codes, recorder)
    reasons = graph_break_reasons[breaks_before:]
    breaks = dict.fromkeys(_graph_break(reason) for reason in reasons)
    return Explanation(
        graphs=tuple(recorder.graphs),
        graph_breaks=tuple(breaks),
        blocks=tuple(recorder.blocks.values()),
        rejected=tuple(dict.fromkeys(recorder.rejected)),
        error=error,
        kernels=_kernels_of(recorder),
        unseen=recorder.unseen_experts(),
        coverage=_coverage(function, recorder),
        weights=_stacked_weights(function),
    )


def _stacked_weights(model: Callable[..., Any]) -> tuple[tuple[str, StackedWeight], ...]:
    """The weights that were separate parameters and lie in one buffer, with the paths of their modules."""
    if not isinstance(model, torch.nn.Module):
        return ()
    return tuple((path, weight) for path, module in model.named_modules() for weight in stacked_weights(module))


def _coverage(model: Callable[..., Any], recorder: MoeBackend) -> Coverage:
    """How many bytes of parameters the rewritten blocks hold; a block that runs several times counts once."""
    blocks = {block.path or tag: block for tag, block in recorder.blocks.items()}.values()
    covered = sum(block.spec.parameter_bytes or 0 for block in blocks if not block.keeps_own_code)
    left = sum(block.spec.parameter_bytes or 0 for block in blocks if block.keeps_own_code)
    if not isinstance(model, torch.nn.Module):
        return Coverage(covered, left, None)
    left += sum(_bytes_of(model.get_submodule(unseen.path)) for unseen in recorder.unseen_experts())
    return Coverage(covered, left, max(0, _bytes_of(model) - covered - left))


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def _kernels_of(recorder: MoeBackend) -> tuple[LoadedKernel, ...]:
    """The kernels of other projects that run blocks of the explained model."""
    chosen = {block.chosen for block in recorder.blocks.values()}
    return tuple(kernel for kernel in loaded_kernels() if kernel.name in chosen)


class _Recorder(MoeBackend):
    """A copy of the user's backend that rewrites, refuses nothing, and runs the rewritten graphs as they are."""

    tells_modules_apart = True

    def __init__(self, asked: MoeBackend | Experts) -> None:
        original = asked if isinstance(asked, MoeBackend) else make_backend(asked)
        policy: OnReject = "fallback" if original.on_reject == "fallback" else "keep"
        selection = original.choice.selection
        super().__init__(dict(selection.entries), policy, _run_as_it_is, selection.decode)
        self.override = original.override
        self._judged_by = original.settings
        self.codes: dict[CodeType, None] = {}

    def settings(self, mode: str | None, options: Mapping[str, Any] | None) -> CompileSettings:
        return self._judged_by(mode, options)

    def note_attempt(self, attempt: tracing.Attempt) -> None:
        self.codes[attempt.code] = None
        super().note_attempt(attempt)

    def __eq__(self, other: object) -> bool:
        return self is other  # nothing that was compiled for a report serves another one

    __hash__ = object.__hash__


# Where torch can keep the recompilations of a report apart from those that count towards the user's limits.
_APART: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)


def _run_as_it_is(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    return gm.forward


def _graph_break(reason: Any) -> GraphBreak:
    # The innermost frame is the user's line, unless it is inside torch.
    frames = [frame for frame in reason.user_stack if "/torch/" not in frame.filename] or reason.user_stack
    source = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    return GraphBreak(str(reason.reason).strip().splitlines()[0], source)
