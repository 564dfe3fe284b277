"""What compiles a rewritten graph: Inductor with the options of the mode, or any other Dynamo backend."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from moe_compile.errors import OptionError
from moe_compile.modes import Compiler, CompileSettings, nearest


def check_compiler(compiler: Compiler) -> Compiler:
    """Returns a compiler that exists.

    Raises:
        OptionError: for a name that Dynamo does not know, the name of this backend, or something not callable.
    """
    known = [name for name in torch._dynamo.list_backends(exclude_tags=()) if name != "moe_compile"]
    if isinstance(compiler, str) and compiler not in known:
        raise OptionError(
            f"compiler={compiler!r}",
            f"Dynamo knows no such backend{nearest(compiler, known)}",
            f"Use one of {', '.join(known)}, or a function of a graph module and its inputs",
        )
    if not isinstance(compiler, str) and not callable(compiler):
        raise OptionError(f"compiler={compiler!r}", "it is neither a name nor callable", "Pass one of the two")
    return compiler


def compile_graph(
    compiler: Compiler, settings: CompileSettings, gm: GraphModule, example_inputs: list[Any]
) -> Callable[..., Any]:
    """Compiles a rewritten graph.

    Args:
        compiler: "inductor", another Dynamo backend's name, or a function of a graph module and its inputs.
        settings: compile mode and Inductor options. Inductor gets exactly these; another compiler gets `mode` and
            `options`, as `torch.compile` would pass them, if it has a parameter of that name or `**kwargs`.
        gm: the graph, without canonical ops.
        example_inputs: what Dynamo passed along with it.
    """
    if compiler == "inductor":
        return inductor(settings)(gm, example_inputs)
    function = torch._dynamo.lookup_backend(compiler)
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {"mode": settings.mode, "options": dict(settings.options) or None}
    keywords = {name: value for name, value in given.items() if value is not None and (takes_any or name in parameters)}
    return function(gm, example_inputs, **keywords)


def inductor(settings: CompileSettings) -> Any:
    """Inductor as `torch.compile` itself would call it for this mode and these options."""
    return torch._TorchCompileInductorWrapper(settings.mode, dict(settings.options), None)


def reset_compiler(compiler: Compiler, settings: CompileSettings) -> None:
    """Forwards `torch._dynamo.reset()`, which frees recorded CUDA graphs."""
    target = inductor(settings) if compiler == "inductor" else compiler
    if hasattr(target, "reset"):
        target.reset()
