"""Whose trace is this? Reads the state of the Dynamo trace that is running in this thread.

Dynamo offers no public way to ask, while it traces a function, which backend the graph is for, under which options,
or which module is being traced. All reads of its internals are in this file: `InstructionTranslator.current_tx()`,
its `output.compiler_fn` (the backend, wrapped by `torch.compile`), `one_graph` (fullgraph), `symbolic_locals`, and
the guards of the trace. Tried with torch 2.11 and 2.13.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, GlobalSource
from torch._dynamo.symbolic_convert import InstructionTranslator as InstructionTranslator
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import TensorVariable


@dataclass(frozen=True)
class CompilerCall:
    """The compiler of a trace: the innermost callable, and what `torch.compile` hands it beside the graph."""

    compiler: Any
    mode: str | None
    options: Mapping[str, Any] | None


def root_translator() -> InstructionTranslator | None:
    """The translator of the outermost frame that Dynamo is tracing in this thread, None outside a trace."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # the thread-local is unset until the thread's first trace
        return None


def compiler_call(translator: InstructionTranslator) -> CompilerCall:
    """Unwraps the compiler of a trace to what the user passed as `backend`."""
    compiler, mode, options = translator.output.compiler_fn, None, None
    while True:
        keywords = getattr(compiler, "kwargs", None)
        if isinstance(keywords, dict):
            mode, options = keywords.get("mode", mode), keywords.get("options", options)
        for attribute in ("_torchdynamo_orig_backend", "compiler_fn"):
            inner = getattr(compiler, attribute, None)
            if inner is not None and inner is not compiler:
                compiler = inner
                break
        else:
            return CompilerCall(compiler, mode, options)


def innermost_translator() -> InstructionTranslatorBase:
    """The translator of the (possibly inlined) frame that calls a function marked `assume_constant_result`.

    `current_tx()` is the outermost frame's; the inlined one is an argument of the Dynamo function that evaluates the
    call, found by walking up the interpreter's stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        translator = frame.f_locals.get("tx")
        if isinstance(translator, InstructionTranslatorBase):
            return translator
        frame = frame.f_back  # type: ignore[assignment]
    raise AssertionError("called outside a Dynamo trace")


def local_value(translator: InstructionTranslatorBase, name: str) -> Any:
    """The Python object behind a local of a traced frame: fake for tensors, None where there is none."""
    variable = translator.symbolic_locals.get(name)
    if variable is None:
        return None
    variable = variable.realize()
    if isinstance(variable, TensorVariable):
        return variable.as_proxy().node.meta.get("example_value")
    return getattr(variable, "value", None)


def module_path(translator: InstructionTranslatorBase, name: str) -> str:
    """Dotted path of the module that a local holds, relative to the traced function's argument, from its source."""
    source = getattr(translator.symbolic_locals[name].realize(), "source", None)
    return clean_path(source.name) if source is not None else ""


def clean_path(source_name: str) -> str:
    """`L['self']._modules['model'].layers[0]` -> `model.layers.0`; a closure's variable is a root as well."""
    _, _, steps = source_name.partition("]")
    steps = steps.rpartition(".cell_contents")[2]
    steps = steps.replace("._modules", "").replace("[", ".").replace("]", "")
    return ".".join(step.strip("'\"") for step in steps.split(".") if step.strip("'\""))


def root_module(translator: InstructionTranslator) -> torch.nn.Module | None:
    """The module whose method is the outermost traced frame, None for a plain function."""
    value = translator.f_locals.get("self", translator.f_locals.get("fn"))  # "fn" where Dynamo wraps torch's modules
    return value if isinstance(value, torch.nn.Module) else None


def is_whole_model(translator: InstructionTranslator) -> bool:
    """Whether the graph that is being compiled is all of what the user compiled, as far as can be seen.

    It is not where Dynamo split the traced function, and where it had to run a module's code as Python on the way to
    the function: that module's frame is then still on the interpreter's stack.
    """
    reason = translator.output.compile_subgraph_reason
    if translator.f_code.co_name.startswith("torch_dynamo_resume_in") or (reason is not None and reason.graph_break):
        return False
    root = root_module(translator)
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and getattr(module, "_orig_mod", module) is not root:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return True


def guard_attribute(translator: InstructionTranslator, holder: object, attribute: str) -> None:
    """Makes Dynamo compile again when an attribute of a Python object differs from what it is now."""
    name = translator.output.install_global_by_id("__moe_compile", holder)
    install_guard(AttrSource(GlobalSource(name), attribute).make_guard(GuardBuilder.CONSTANT_MATCH))


def guard_identity(translator: InstructionTranslatorBase, name: str) -> None:
    """Makes Dynamo compile again when a local is another object: layers that share code may then differ."""
    variable = translator.symbolic_locals[name].realize()
    if variable.source is not None:
        install_guard(variable.make_guard(GuardBuilder.ID_MATCH))
