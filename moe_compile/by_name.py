"""`torch.compile(model, backend="moe_compile", options={"experts": "grouped_mm"})`: the backend by its name.

`torch.compile` refuses `mode` together with `options`, so our own keys and `mode` travel inside `options`; the rest
goes to Inductor.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import GraphModule

from moe_compile.backend import MoeBackend, backend
from moe_compile.capture.install import install
from moe_compile.errors import OptionError

_OWN_KEYS = ("experts", "decode", "on_reject", "compiler", "rules")

_backends: dict[str, MoeBackend] = {}
_lock = threading.Lock()


def split_options(
    mode: str | None, options: Mapping[str, Any] | None
) -> tuple[dict[str, Any], str | None, dict[str, Any]]:
    """Splits the options of `torch.compile` into our own, the mode, and Inductor's."""
    rest = dict(options or {})
    ours = {key: rest.pop(key) for key in _OWN_KEYS if key in rest}
    if mode is not None and "mode" in rest:
        raise OptionError(f"mode={mode!r}", f"options hold mode={rest['mode']!r} too", "Give it once")
    return ours, rest.pop("mode", mode), rest


def backend_for(ours: Mapping[str, Any]) -> MoeBackend:
    """The one backend object that stands for these options of ours, the same at every trace and call."""
    key = repr(sorted(ours.items()))
    with _lock:
        if key not in _backends:
            _backends[key] = backend(**ours)
        return _backends[key]


def moe_compile(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend behind the entry point `moe_compile`.

    Args:
        gm: what Dynamo traced.
        example_inputs: its inputs.
        mode: a compile mode.
        options: `experts`, `decode`, `on_reject`, `compiler` and `mode` as `backend()` and `torch.compile` take them;
            any other key is an Inductor option.
    """
    ours, mode, rest = split_options(mode, options)
    return backend_for(ours)(gm, example_inputs, mode=mode, options=rest)


def is_entry_point(compiler: object) -> bool:
    """Whether a trace's compiler is the backend by its name."""
    return compiler is moe_compile


install()  # Dynamo loads this module for the name, before it traces; no other function of ours is called by then
