"""Compile modes and Inductor options: validated once, then one object that the rules and the compiler read."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor import list_mode_options

from moe_compile.errors import OptionError

Compiler = str | Callable[..., Callable[..., Any]]

_CUDAGRAPHS = "triton.cudagraphs"


@dataclass(frozen=True)
class CompileSettings:
    """What `torch.compile` was asked for, besides the model, and what compiles the graph.

    Attributes:
        mode: one of Inductor's modes, None for the default one.
        options: Inductor options given by the user, on top of the mode's.
        compiler: "inductor", another Dynamo backend's name, or a function of a graph module and its inputs.
        cuda_graphs: whether the compiled code is replayed as CUDA graphs, by compiler, option, mode or Inductor's own
            config.
    """

    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    compiler: Compiler = "inductor"

    @property
    def cuda_graphs(self) -> bool:
        return self._cuda_graphs is not None

    @property
    def label(self) -> str:
        """How messages name what asks for CUDA graphs, the mode where nothing does."""
        return self._cuda_graphs[0] if self._cuda_graphs is not None else f"mode={self.mode!r}"

    @property
    def without_cuda_graphs(self) -> str | None:
        """What to ask for instead of CUDA graphs, None where nothing asks for them."""
        return self._cuda_graphs[1] if self._cuda_graphs is not None else None

    @property
    def _cuda_graphs(self) -> tuple[str, str] | None:
        """What asks for CUDA graphs, and the remedy."""
        # Dynamo's backend of that name carries it, so that the object itself is recognised as well.
        if getattr(self.compiler, "compiler_name", self.compiler) == "cudagraphs":
            return 'compiler="cudagraphs"', 'compiler="inductor"'
        if _CUDAGRAPHS in self.options:
            asked = f'options={{"{_CUDAGRAPHS}": True}}', f'options={{"{_CUDAGRAPHS}": False}}'
            return asked if self.options[_CUDAGRAPHS] else None
        of_mode = list_mode_options().get(self.mode or "default", {})
        if _CUDAGRAPHS in of_mode:
            return (f"mode={self.mode!r}", 'mode="max-autotune-no-cudagraphs"') if of_mode[_CUDAGRAPHS] else None
        config = f"torch._inductor.config.{_CUDAGRAPHS}"
        return (config, f"{config} = False") if torch._inductor.config.triton.cudagraphs else None


def nearest(name: object, known: list[str]) -> str:
    """`; did you mean 'x'?` for the known name closest to a mistyped one, else nothing."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def resolve_settings(
    mode: str | None, options: Mapping[str, Any] | None, compiler: Compiler = "inductor"
) -> CompileSettings:
    """Checks a compile mode and Inductor options.

    Args:
        mode: a mode of `torch.compile`, None or "default" for the default one.
        options: Inductor options, as `torch._inductor.list_options()` names them.
        compiler: what compiles the graph, checked before.

    Returns:
        The settings, with "default" turned into None.

    Raises:
        OptionError: for a mode or option that does not exist, or a value of the wrong type.
    """
    modes = list(list_mode_options())
    if mode is not None and mode not in modes:
        raise OptionError(
            f"mode={mode!r}", f"there is no such compile mode{nearest(mode, modes)}", f"Use one of {', '.join(modes)}"
        )
    if options:
        try:
            torch._TorchCompileInductorWrapper(None, dict(options), None)
        except (RuntimeError, AttributeError) as error:  # the latter for a key that is no string
            known = torch._inductor.list_options()
            unknown = [key for key in options if str(key).replace("-", "_") not in known]
            found = f"there is no Inductor option {unknown[0]!r}{nearest(unknown[0], known)}" if unknown else str(error)
            raise OptionError(
                f"options={dict(options)!r}", found, "torch._inductor.list_options() names them all"
            ) from error
    return CompileSettings(None if mode == "default" else mode, dict(options or {}), compiler)
