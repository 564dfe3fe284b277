"""Puts the capture of transformers in place, now or when transformers is imported later.

Nothing is imported here that the user's program does not import itself.
"""

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Sequence
from types import ModuleType

# The modules that hold transformers' registries of experts functions.
_REGISTRIES = ("transformers.integrations.moe", "transformers.integrations.finegrained_fp8")
_GENERATION = "transformers.generation.utils"
_CAPTURED = (*_REGISTRIES, _GENERATION)

_lock = threading.Lock()


def install() -> None:
    """Captures the experts classes of transformers; may be called any number of times, from any thread."""
    from moe_compile.capture.watch import watch

    watch()
    with _lock:
        if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport())
    for name in _CAPTURED:
        module = sys.modules.get(name)
        # A module that another thread is still executing is captured by the finder once it is complete.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _capture(module)


def _capture(module: ModuleType) -> None:
    from moe_compile.capture.transformers import capture_registry
    from moe_compile.decoding import capture_generation

    with _lock:
        if module.__name__ == _GENERATION:
            capture_generation(module)
        else:
            capture_registry(module)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs `_capture` after one of the captured modules has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _CAPTURED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """The module's own loader, followed by the capture."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _capture(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # get_source and the like, for tracebacks and inspect
