"""A `torch.compile` backend that rewrites Mixture-of-Experts blocks to the kernel you choose.

model = torch.compile(model, backend=moe_compile.backend("grouped_mm"))

Public names are loaded when they are first used: `moe-compile --help` answers at once, without importing torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_compile.assume.prepare import compile as compile
    from moe_compile.assume.prepare import prepare as prepare
    from moe_compile.assume.prepare import release as release
    from moe_compile.backend import backend as backend
    from moe_compile.capture.experts_block import experts_block as experts_block
    from moe_compile.capture.registered import register_experts as register_experts
    from moe_compile.compatibility.matrix import matrix as matrix
    from moe_compile.errors import MoeCompileError as MoeCompileError
    from moe_compile.explain import explain as explain
    from moe_compile.inspection.inspect import inspect as inspect
    from moe_compile.register_backend import register_backend as register_backend
    from moe_compile.register_backend import unregister_backend as unregister_backend
    from moe_compile.rewrite import rewrite as rewrite
    from moe_compile.spec import ExpertsSpec as ExpertsSpec

__version__ = "0.1.0"

# Public name -> the module below this package that defines it.
_DEFINED_IN = {
    "ExpertsSpec": "spec",
    "MoeCompileError": "errors",
    "backend": "backend",
    "compile": "assume.prepare",
    "experts_block": "capture.experts_block",
    "explain": "explain",
    "inspect": "inspection.inspect",
    "matrix": "compatibility.matrix",
    "prepare": "assume.prepare",
    "register_backend": "register_backend",
    "register_experts": "capture.registered",
    "release": "assume.prepare",
    "rewrite": "rewrite",
    "unregister_backend": "register_backend",
}

__all__ = sorted(_DEFINED_IN)


class _Package(ModuleType):
    """Finds public names where they are defined, also those that a module of the package shares its name with."""

    def __getattribute__(self, name: str) -> Any:
        if name in _DEFINED_IN:
            return getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> ModuleType:
        """Modules of the package, such as `moe_compile.errors`, without importing them by hand."""
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_DEFINED_IN})


sys.modules[__name__].__class__ = _Package
