"""Decides, while Dynamo traces an experts class, whether and how the block is rewritten.

It has to happen here: once the canonical ops are traced instead, the model's own code is gone, and `eager`, `keep` and
a per-path `eager` must be able to run it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_compile.backend import MoeBackend, device_situation
from moe_compile.capture import tracing
from moe_compile.capture.sub_configs import sub_config_of
from moe_compile.decision import decide
from moe_compile.errors import BlockInputError
from moe_compile.modes import CompileSettings
from moe_compile.report import Block, Found
from moe_compile.rewriter import token_count, unique_tag
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec

# Names whose presence in a function means that it reads data on the host, so that it cannot be one graph.
_HOST_READS = frozenset({"nonzero", "item", "tolist", "numpy"})


@dataclass(frozen=True)
class Inputs:
    """The fake tensors that enter a block, None where they are unknown."""

    hidden: torch.Tensor | None
    ids: torch.Tensor | None
    weights: torch.Tensor | None


@dataclass(frozen=True)
class Interface:
    """How to read a captured class.

    Attributes:
        form: name of the spelling, for reports.
        inputs: names of the traced function's parameters for hidden states, expert ids and routing weights.
        spec: describes a module of the class.
        own_code: the function that runs without us.
        found: how blocks of the class came to be known.
    """

    form: Callable[[torch.nn.Module], str]
    inputs: tuple[str, str, str] | None
    spec: Callable[[torch.nn.Module, Inputs], ExpertsSpec]
    own_code: Callable[[torch.nn.Module], Callable[..., Any]]
    found: Found = "captured"


def plan(interface: Interface, tokens: int | torch.SymInt | None = None) -> str:
    """Called at trace time with the traced frame's `self` on the stack.

    Args:
        interface: how to read the module.
        tokens: T, where it is not the length of the hidden states.

    Returns:
        The tag under which the block is to be traced as canonical ops; "" where the model's own code runs, because
        the trace is not for our backend, or the rules or the user say so.

    Raises:
        MoeCompileError: a child of it where the choice is not legal or the tensors do not fit.
    """
    root = tracing.root_translator()
    owner, settings = _owner(root)
    if root is None or owner is None:
        return ""
    frame = tracing.innermost_translator()
    module = tracing.local_value(frame, "self")
    model = tracing.root_module(root)
    if model is None:
        model = tracing.outermost_module(frame, "self")
        owner.check_keys(model)
    owner.learn_paths(model)
    owner.unseen.reach(type(module))
    path = owner.path_of(module, tracing.module_path(frame, "self"))
    inputs = _inputs(frame, interface)
    spec = interface.spec(module, inputs)
    _check(path, spec, inputs)
    _check_devices(path, module, inputs)

    own_code = interface.own_code(module)
    traces_whole = interface.found != "prepared" and _traces_whole(own_code)
    situation = _situation(module, inputs, settings, root.one_graph, traces_whole)
    selection = owner.selection_now(root, situation.device_type)
    tracing.guard_attribute(root, owner.choice, "signature")
    if selection.varies or owner.tells_modules_apart:
        tracing.guard_identity(frame, "self")
    sub_config = sub_config_of(module, model)
    owner.note_sub_config(sub_config)

    if inputs.hidden is not None:
        tokens = inputs.hidden.shape[0]
    decision = decide(
        selection.name_for(path, sub_config),
        spec,
        replace(situation, override=owner.override),
        tokens=tokens,
        where=path or type(module).__name__,
        on_reject=owner.on_reject,
        warn=owner.warn_once,
    )
    tag = unique_tag(path, owner.captured_blocks(root))
    code = own_code.__code__
    owner.note_captured(
        root,
        tag,
        Block(
            path=path,
            form=interface.form(module),
            found=interface.found,
            source=f"{code.co_filename}:{code.co_firstlineno}",
            spec=spec,
            tokens=token_count(tokens),
            chosen=decision.name,
            reasons=decision.reasons,
            ladder=decision.ladder,
            rungs=decision.rungs,
        ),
    )
    return "" if decision.keeps_own_code else tag


def latest_tag() -> str:
    """Tag of the block that was planned last in the trace that is running, "" without one."""
    root = tracing.root_translator()
    owner, _ = _owner(root)
    if root is None or owner is None:
        return ""
    return next(reversed(owner.captured_blocks(root)), "")


def traces_for_us() -> bool:
    """Whether Dynamo is tracing for a backend of ours in this thread."""
    return _owner(tracing.root_translator())[0] is not None


def _owner(root: Any) -> tuple[MoeBackend | None, CompileSettings]:
    """The backend of ours that a trace is for, and what `torch.compile` was asked for."""
    return owner_of(tracing.compiler_call(root)) if root is not None else (None, CompileSettings())


def owner_of(call: tracing.CompilerCall) -> tuple[MoeBackend | None, CompileSettings]:
    """The backend of ours behind a compiler, and what `torch.compile` was asked for."""
    from moe_compile.by_name import backend_for, is_entry_point, split_options  # which captures when it is imported

    if isinstance(call.compiler, MoeBackend):
        return call.compiler, call.compiler.settings(call.mode, call.options)
    if is_entry_point(call.compiler):
        ours, mode, options = split_options(call.mode, call.options)
        owner = backend_for(ours)
        return owner, owner.settings(mode, options)
    return None, CompileSettings()


def _inputs(frame: Any, interface: Interface) -> Inputs:
    if interface.inputs is None:
        return Inputs(None, None, None)
    values = [tracing.local_value(frame, name) for name in interface.inputs]
    return Inputs(*(value if isinstance(value, torch.Tensor) else None for value in values))


def _situation(
    module: torch.nn.Module, inputs: Inputs, settings: CompileSettings, fullgraph: bool, traces_whole: bool
) -> Situation:
    parameters = list(module.parameters())
    tensors = [*(t for t in (inputs.hidden, inputs.weights) if t is not None), *parameters]
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    situation = device_situation(device, settings, fullgraph, training, traces_whole)
    wrapped = next((type(tensor).__name__ for tensor in tensors if is_traceable_wrapper_subclass(tensor)), None)
    return replace(situation, tensor_class=wrapped, transform=tracing.transform())


def _traces_whole(function: Callable[..., Any]) -> bool:
    return _HOST_READS.isdisjoint(function.__code__.co_names)


def _check(path: str, spec: ExpertsSpec, inputs: Inputs) -> None:
    hidden, ids, weights = inputs.hidden, inputs.ids, inputs.weights
    if hidden is None or ids is None or weights is None:
        return
    where = f"experts block {path or '(unknown path)'}"
    found = f"hidden states {_describe(hidden)}, expert ids {_describe(ids)}, routing weights {_describe(weights)}"
    if not hidden.dim() == ids.dim() == weights.dim() == 2 or ids.shape != weights.shape:
        raise BlockInputError(where, found, "Pass (T, D), (T, K) and (T, K)")
    if hidden.shape[0] != ids.shape[0] or (spec.hidden_size is not None and hidden.shape[1] != spec.hidden_size):
        raise BlockInputError(where, f"{found}, D={spec.hidden_size}", "Pass (T, D), (T, K) and (T, K) with the same T")
    if ids.dtype not in (torch.int32, torch.int64):
        raise BlockInputError(where, found, "Pass expert ids as int32 or int64")
    if not hidden.is_floating_point() or not weights.is_floating_point():
        raise BlockInputError(where, found, "Pass floating-point hidden states and routing weights")
    if not hidden.device == ids.device == weights.device:
        raise BlockInputError(where, found, "Put all three on one device")


def _check_devices(path: str, module: torch.nn.Module, inputs: Inputs) -> None:
    devices = {parameter.device for parameter in module.parameters()}
    if inputs.hidden is not None and not devices <= {inputs.hidden.device}:
        raise BlockInputError(
            f"experts block {path or '(unknown path)'}",
            f"hidden states {_describe(inputs.hidden)}, weights on {', '.join(sorted(map(str, devices)))}",
            "Move the model and its inputs to one device",
        )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
