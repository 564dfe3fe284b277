"""What a cell is measured on: the small block, or what a user's `module:function` returns."""

import copy
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from moe_compile.compatibility import small_block
from moe_compile.errors import ModelFunctionError

# Other routings than the one that was compiled, or captured in a CUDA graph.
SEEDS = (0, 1, 2, 3)

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A model and calls of it.

    Attributes:
        module: the model, or a function.
        calls: arguments and keyword arguments of each call.
    """

    module: Callable[..., Any]
    calls: tuple[Call, ...]

    def cast(self, dtype: torch.dtype, device: str) -> "Subject":
        """A copy on a device, whose floating-point parameters and inputs have a dtype."""

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            # Onto fresh memory, so that gradients are the copy's own.
            value = value.detach().to(device, dtype if value.is_floating_point() else None, copy=True)
            return value.requires_grad_(value.is_floating_point())

        module = copy.deepcopy(self.module)
        if isinstance(module, torch.nn.Module):
            module = module.to(device, dtype)
        return Subject(module, tree_map(moved, self.calls))


def subject_of(model: str | None) -> Subject:
    """The small block, or what `module:function` returns."""
    if model is None:
        calls: tuple[Call, ...] = tuple((small_block.inputs(seed), {}) for seed in SEEDS)
        return Subject(small_block.SmallExperts(), calls)
    module, args, kwargs = call_model_function(model)
    return Subject(module, ((args, kwargs),))


def call_model_function(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """Calls a user's function that makes a model and its example arguments.

    Args:
        name: `module:function`, importable from the current folder or an installed package; or `file.py:function`.

    Returns:
        The model, its positional arguments and its keyword arguments.

    Raises:
        ModelFunctionError: if there is no such function, it raises, or it returns something else than
            `(model, arguments)`, with a tuple or a mapping for arguments, or `(model, args, kwargs)`.
    """
    asked = f"model {name!r}"
    module_name, colon, function_name = name.rpartition(":")
    if not (module_name and colon and function_name):
        raise ModelFunctionError(asked, "it is not of the form module:function", "Name a function, as in models:tiny")
    try:
        function = getattr(_import(module_name), function_name)
    except Exception as error:
        raise ModelFunctionError(
            asked, f"importing it raised {_said(error)}", "Run from the folder that holds the module, or install it"
        ) from error
    try:
        returned = function()
    except Exception as error:
        raise ModelFunctionError(
            asked, f"the function raised {_said(error)}", "It is called without arguments; make it return a model"
        ) from error
    return check_returned(asked, returned)


def check_returned(asked: str, returned: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """Splits what a model function returned; see `call_model_function`."""
    remedy = "Return (model, arguments), the arguments as a tuple or a mapping, or (model, args, kwargs)"
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        shape = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise ModelFunctionError(asked, f"the function returned {shape}", remedy)
    model, *rest = returned
    if not callable(model):
        raise ModelFunctionError(asked, f"the first thing it returned is {type(model).__name__}, not a model", remedy)
    if len(rest) == 2 and isinstance(rest[0], tuple | list) and isinstance(rest[1], Mapping):
        return model, tuple(rest[0]), dict(rest[1])
    if len(rest) == 1 and isinstance(rest[0], Mapping):
        return model, (), dict(rest[0])
    if len(rest) == 1 and isinstance(rest[0], tuple | list):
        return model, tuple(rest[0]), {}
    found = ", ".join(type(part).__name__ for part in rest)
    raise ModelFunctionError(asked, f"beside the model, the function returned {found}", remedy)


def floating_outputs(output: Any) -> list[Tensor]:
    """The floating-point tensors in what a model returned."""
    leaves = tree_flatten(output)[0]
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not found and hasattr(output, "logits"):
        found = [output.logits]
    return found


def _import(name: str) -> Any:
    if name.endswith(".py"):
        folder, file = os.path.split(os.path.abspath(name))
        name = file.removesuffix(".py")
    else:
        folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
