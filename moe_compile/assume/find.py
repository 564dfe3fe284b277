"""Finds the modules whose own Python reads data on the host: where Dynamo would split the model.

The model runs once, uncompiled, and every read of a tensor's values by Python is noted together with the modules that
were running and their arguments.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Functions whose result, or whose result's shape, Python can only know by looking at the data.
_READS = frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__", "nonzero", "argwhere"}
    | {"unique", "unique_consecutive", "_unique2", "masked_select", "__contains__"}
)


@dataclass(eq=False)
class Call:
    """One call of a module that reads data on the host.

    Attributes:
        path: of the module in the model.
        module: the module.
        args: what it was called with, before it ran.
        kwargs: the same.
        source: `file.py:line` of the first read.
        inside: the calls that were running around it, the innermost first.
    """

    path: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: str
    inside: tuple["Call", ...]


def find_host_reads(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    """Runs a model and returns the calls of modules whose own code read data, the first call of each module.

    Args:
        model: runs once; undoing what that changes is the caller's task.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        Exception: whatever the model raises.
    """
    found: dict[torch.nn.Module, Call] = {}
    stack: list[Call] = []
    with _calls_on(stack, model), _Reads(stack, found):
        model(*args, **kwargs)
    return list(found.values())


@contextlib.contextmanager
def _calls_on(stack: list[Call], model: torch.nn.Module) -> Iterator[None]:
    """Keeps the calls of a model's modules that are running on a stack."""

    def enter(path: str) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stack.append(Call(path, module, args, kwargs, "", tuple(reversed(stack))))

        return hook

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    handles = []
    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Reads(TorchFunctionMode):
    """Notes which module is running when a tensor's data is read."""

    def __init__(self, stack: list[Call], found: dict[torch.nn.Module, Call]) -> None:
        super().__init__()
        self.stack = stack
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stack and self._reads(getattr(func, "__name__", ""), args):
            call = self.stack[-1]
            if call.module not in self.found:
                call.source = user_line()
                self.found[call.module] = call
        return func(*args, **(kwargs or {}))

    def _reads(self, name: str, args: Any) -> bool:
        if name == "where":
            return len(args) == 1
        if name in ("__getitem__", "__setitem__"):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
        return name in _READS


def user_line() -> str:
    """`file.py:line` of the innermost frame that is neither torch's nor of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_foreign(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "moe_compile")
