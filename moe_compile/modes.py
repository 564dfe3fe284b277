"""Compile modes and Inductor options: validated once, then one object that the rules and the compiler read."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor import list_mode_options

from moe_compile.errors import OptionError


@dataclass(frozen=True)
class CompileSettings:
    """What `torch.compile` was asked for, besides the model.

    Attributes:
        mode: one of Inductor's modes, None for the default one.
        options: Inductor options given by the user, on top of the mode's.
        cuda_graphs: whether the compiled code is replayed as CUDA graphs, by mode, option or Inductor's own config.
    """

    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cuda_graphs(self) -> bool:
        enabled = torch._inductor.config.triton.cudagraphs
        enabled = list_mode_options().get(self.mode or "default", {}).get("triton.cudagraphs", enabled)
        return bool(_option(self.options, "triton.cudagraphs", enabled))

    @property
    def label(self) -> str:
        """How messages name these settings."""
        named = f"mode={self.mode!r}"
        if "triton.cudagraphs" in self.options and self.cuda_graphs:
            return 'options={"triton.cudagraphs": True}'
        return named


def _option(options: Mapping[str, Any], name: str, default: Any) -> Any:
    return {key.replace("-", "_"): value for key, value in options.items()}.get(name, default)


def nearest(name: object, known: list[str]) -> str:
    """`; did you mean 'x'?` for the known name closest to a mistyped one, else nothing."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def resolve_settings(mode: str | None, options: Mapping[str, Any] | None) -> CompileSettings:
    """Checks a compile mode and Inductor options.

    Args:
        mode: a mode of `torch.compile`, None or "default" for the default one.
        options: Inductor options, as `torch._inductor.list_options()` names them.

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
    return CompileSettings(None if mode == "default" else mode, dict(options or {}))
