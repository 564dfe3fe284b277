"""Loads kernels of other projects: lazily, once, and never while Dynamo traces.

Sources, in this order: a loader that the user registered; the `kernels` package (a local kernel folder that
`LOCAL_KERNELS` names, the hub, or with `HF_HUB_OFFLINE` its cache alone); an installed distribution. A source that is
not there is passed over. One that is there and is broken (fails on import, lacks a symbol) is an error, because what
the user set up is not what runs; nothing is remembered then, and the next attempt starts afresh.
"""

import importlib
import importlib.metadata
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from moe_compile.errors import KernelLoadError, KernelResultError, RegistrationError, RequirementError
from moe_compile.kernels.external.environment import describe_environment, parse_local_kernels
from moe_compile.kernels.external.requirements import KERNELS, ExternalKernel, missing_requirements

Loader = Callable[[], Any]

_lock = threading.RLock()
_loaders: dict[str, Loader] = {}
_loaded: dict[str, "Loaded"] = {}


@dataclass(frozen=True)
class LoadedKernel:
    """What was loaded, for reports.

    Attributes:
        name: the kernel.
        source: "registered loader", "kernels package" or "installed distribution".
        origin: file or folder that the code came from.
        version: its version or revision, None if it says none.
    """

    name: str
    source: str
    origin: str
    version: str | None


@dataclass(frozen=True)
class Loaded:
    """A loaded kernel: what to say of it, the module, and its functions by their dotted names."""

    report: LoadedKernel
    module: Any
    functions: Mapping[str, Any]


class _NotThereError(Exception):
    """A source that does not offer the kernel; the text says why."""


def register_loader(name: str, loader: Loader | None) -> None:
    """Says how to load a kernel, before every other source.

    Args:
        name: "deepgemm", "deepgemm_megamoe" or "sonicmoe".
        loader: returns the module, or any object with the kernel's functions as attributes; None takes an earlier
            registration back. What was loaded before is forgotten.

    Raises:
        RegistrationError: for a name that is no kernel's, or a loader that cannot be called.
    """
    if name not in KERNELS:
        raise RegistrationError(
            f"register_loader({name!r})", "there is no such kernel", f"Use one of {', '.join(KERNELS)}"
        )
    if loader is not None and not callable(loader):
        raise RegistrationError(
            f"register_loader({name!r}, {loader!r})",
            "the loader cannot be called",
            "Pass a function without arguments that returns the kernel's module",
        )
    with _lock:
        forget_kernel(name)
        _loaders.pop(name, None)
        if loader is not None:
            _loaders[name] = loader


def registered_loaders() -> frozenset[str]:
    """Kernels for which the user has registered a loader."""
    return frozenset(_loaders)


def loaded_kernels() -> tuple[LoadedKernel, ...]:
    """What has been loaded so far in this process."""
    return tuple(loaded.report for loaded in _loaded.values())


def forget_kernel(name: str) -> None:
    """Forgets a loaded kernel, so that the next use loads it again, from disk and not from Python's memory."""
    with _lock:
        loaded = _loaded.pop(name, None)
        if loaded is not None:
            _forget_module(loaded.module)


def require_result(name: str, symbol: str, result: Any, like: torch.Tensor) -> torch.Tensor:
    """Returns what a kernel's function returned, if it is what was asked for.

    Args:
        name: the kernel.
        symbol: the function.
        result: what it returned.
        like: a tensor of the shape, dtype and device that it has to have.

    Raises:
        KernelResultError: if it is not; the kernel is then forgotten.
    """
    wanted = like.shape, like.dtype, like.device
    if isinstance(result, torch.Tensor) and (result.shape, result.dtype, result.device) == wanted:
        return result
    forget_kernel(name)
    found = _describe(result) if isinstance(result, torch.Tensor) else repr(result)
    raise KernelResultError(
        f"{symbol} of {name}",
        f"it returned {found} instead of {_describe(like)}",
        "Use another build of the kernel; this one was forgotten, and the next attempt loads it again",
    )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def load_kernel(name: str) -> Loaded:
    """Loads a kernel, unless it is loaded already.

    Args:
        name: one of `KERNELS`.

    Returns:
        Its functions, by the dotted names in the table.

    Raises:
        RequirementError: an `ImportError`, if something that the kernel needs is missing.
        KernelLoadError: an `ImportError`, if a source fails on import or lacks a symbol.
    """
    loaded = _loaded.get(name)
    if loaded is not None:
        return loaded
    assert not torch.compiler.is_dynamo_compiling(), f"{name} would be loaded while Dynamo traces"
    with _lock:
        if name not in _loaded:
            _loaded[name] = _load(KERNELS[name])
        return _loaded[name]


def _load(kernel: ExternalKernel) -> Loaded:
    if kernel.name not in _loaders:
        missing = missing_requirements(kernel.name, describe_environment(loaders=registered_loaders()))
        if missing:
            raise RequirementError(f"loading {kernel.name}", "; ".join(missing), "Or use another experts backend")
    passed_over = []
    for source, load in _SOURCES:
        try:
            module, version = load(kernel)
        except _NotThereError as reason:
            passed_over.append(f"{source}: {reason}")
            continue
        except Exception as error:
            raise KernelLoadError(
                f"loading {kernel.name} from the {source}",
                f"it raised {type(error).__name__}: {str(error).strip() or 'without a message'}",
                "Repair or remove it; nothing was kept, and the next compilation tries again",
            ) from error
        return _checked(kernel, source, module, version)
    raise RequirementError(
        f"loading {kernel.name}",
        f"no source offers it ({'; '.join(passed_over)})",
        f"Let the `kernels` package fetch {kernel.hub.repo_id}, or pip install {kernel.distributions[-1]}, or use "
        "another experts backend",
    )


def _checked(kernel: ExternalKernel, source: str, module: Any, version: str | None) -> Loaded:
    origin = getattr(module, "__file__", None) or repr(module)
    functions = {symbol: _resolve(module, symbol) for symbol in kernel.symbols}
    lacking = [symbol for symbol, value in functions.items() if not callable(value)]
    if lacking:
        _forget_module(module)
        raise KernelLoadError(
            f"loading {kernel.name} from the {source}",
            f"{origin} lacks {', '.join(lacking)}",
            f"Use a build of {kernel.hub.repo_id} or {kernel.distributions[-1]} that has them; nothing was kept",
        )
    return Loaded(LoadedKernel(kernel.name, source, origin, version), module, MappingProxyType(functions))


def _forget_module(module: Any) -> None:
    """Takes a module out of Python's memory, and out of that of the `kernels` package."""
    if not isinstance(module, ModuleType) or any(loaded.module is module for loaded in _loaded.values()):
        return
    for name in [name for name in sys.modules if name == module.__name__ or name.startswith(f"{module.__name__}.")]:
        del sys.modules[name]
    importer = sys.modules.get("kernels.importer")
    remembered = getattr(importer, "_loaded_kernels", {})
    for path in [path for path, kernel in remembered.items() if kernel.module is module]:
        del remembered[path]


def _resolve(module: Any, symbol: str) -> Any:
    return reduce(lambda holder, name: getattr(holder, name, None), symbol.split("."), module)


def _from_registered(kernel: ExternalKernel) -> tuple[Any, str | None]:
    loader = _loaders.get(kernel.name)
    if loader is None:
        raise _NotThereError("none")
    module = loader()
    return module, _version(module)


def _from_kernels_package(kernel: ExternalKernel) -> tuple[Any, str | None]:
    try:
        import kernels
    except ModuleNotFoundError as error:
        raise _NotThereError("the package is not installed") from error
    pinned = {"version": kernel.hub.version, "revision": kernel.hub.revision}
    local = kernel.hub.repo_id in parse_local_kernels(os.environ.get("LOCAL_KERNELS"))
    try:
        module = kernels.get_kernel(kernel.hub.repo_id, **{k: v for k, v in pinned.items() if v is not None})
    except Exception as error:
        if local or _is_from_imported_code(error):
            raise
        # There is no build for this machine, or no network: another source may have the kernel.
        raise _NotThereError(str(error).strip().partition("\n")[0]) from error
    return module, f"local, {kernel.hub.repo_id}" if local else str(kernel.hub.version or kernel.hub.revision)


def _is_from_imported_code(error: Exception) -> bool:
    """Whether an error was raised while a module's code ran, and not on the way to it."""
    frames = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
    return "exec_module" in frames


def _from_distribution(kernel: ExternalKernel) -> tuple[Any, str | None]:
    if kernel.module not in describe_environment().modules:
        raise _NotThereError(f"no module {kernel.module}")
    module = importlib.import_module(kernel.module)
    for distribution in kernel.distributions:
        try:
            return module, f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return module, _version(module)


def _version(module: Any) -> str | None:
    version = getattr(module, "__version__", None)
    return None if version is None else str(version)


_SOURCES: tuple[tuple[str, Callable[[ExternalKernel], tuple[Any, str | None]]], ...] = (
    ("registered loader", _from_registered),
    ("kernels package", _from_kernels_package),
    ("installed distribution", _from_distribution),
)
