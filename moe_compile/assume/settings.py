"""Plain attributes that a module's code reads while it is traced: a program holds only as long as they do.

Numbers, flags, names, tuples of them and functions count, on the module and on every module in it. What lies behind
another object, such as a config, is taken as fixed.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import nn

# Path of a module in the traced one, attribute, value.
Setting = tuple[str, str, Any]

_PLAIN = (bool, int, float, str, NoneType, torch.dtype)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_OF_TORCH = (vars(nn.Module()).keys() | vars(nn.Module).keys()) - {"training"}

_lock = threading.RLock()


@contextlib.contextmanager
def read_settings(module: nn.Module) -> Iterator[list[Setting]]:
    """Collects what is read of a module's plain attributes in the meantime, with the values found first."""
    paths = {id(part): path for path, part in module.named_modules()}
    found: dict[tuple[str, str], Any] = {}
    settings: list[Setting] = []

    def recording(own: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def read(self: Any, name: str) -> Any:
            value = own(self, name)
            if name not in _OF_TORCH and id(self) in paths and _is_setting(value):
                found.setdefault((paths[id(self)], name), tuple(value) if isinstance(value, list) else value)
            return value

        return read

    with _lock, contextlib.ExitStack() as stack:
        for cls in {type(part) for part in module.modules()}:
            if "__getattribute__" in vars(cls):
                stack.callback(setattr, cls, "__getattribute__", vars(cls)["__getattribute__"])
            else:
                stack.callback(delattr, cls, "__getattribute__")
            cls.__getattribute__ = recording(cls.__getattribute__)  # type: ignore[method-assign]
        yield settings
    settings += [(path, name, value) for (path, name), value in found.items()]


def hold(module: nn.Module, settings: tuple[Setting, ...]) -> bool:
    """Whether a module's settings are as they were; traced by Dynamo, it guards the compiled code by them."""
    for path, name, value in settings:
        part = module
        for step in path.split(".") if path else ():
            part = getattr(part, step)
        now = getattr(part, name)
        if isinstance(now, list):
            now = tuple(now)
        if type(now) is not type(value) or now != value:
            return False
    return True


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return type(value) in (tuple, list) and all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN or isinstance(value, _FUNCTIONS)
