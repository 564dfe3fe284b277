"""Kernels of other projects, for users: how to load one's own build, and what is there.

moe_compile.external.register_loader("deepgemm", lambda: importlib.import_module("my_deep_gemm"))
for kernel in moe_compile.external.external_kernels():
    print(kernel.name, kernel.missing, kernel.loaded)
"""

from dataclasses import dataclass

from moe_compile.errors import MoeCompileError
from moe_compile.kernels.external.environment import Environment
from moe_compile.kernels.external.environment import describe_environment as _describe
from moe_compile.kernels.external.loading import (
    LoadedKernel,
    load_kernel,
    loaded_kernels,
    register_loader,
    registered_loaders,
)
from moe_compile.kernels.external.requirements import KERNELS, missing_requirements, sources

__all__ = [
    "Environment",
    "ExternalKernelStatus",
    "LoadedKernel",
    "describe_environment",
    "external_kernels",
    "loaded_kernels",
    "register_loader",
]


@dataclass(frozen=True)
class ExternalKernelStatus:
    """What can be said of a kernel.

    Attributes:
        name: the kernel, which is also the experts backend's name.
        missing: what it needs and this machine lacks, each with how to get it.
        sources: where it would be looked for, in order.
        loaded: what was loaded, from where, in which version; None before its first use.
        error: why loading it failed, where that was asked for.
    """

    name: str
    missing: tuple[str, ...]
    sources: tuple[str, ...]
    loaded: LoadedKernel | None
    error: str | None = None


def describe_environment() -> Environment:
    """What this machine offers: device, CUDA toolkit, distributions, registered loaders."""
    return _describe(loaders=registered_loaders())


def external_kernels(*, load: bool = False) -> tuple[ExternalKernelStatus, ...]:
    """All kernels of other projects that experts backends use.

    Args:
        load: load those that nothing is missing for, as the first compilation would; the `kernels` package may download
            them. Otherwise nothing is loaded.
    """
    environment = describe_environment()
    missing = {name: missing_requirements(name, environment) for name in KERNELS}
    errors = {name: _load_error(name) for name in KERNELS if load and not missing[name]}
    loaded = {kernel.name: kernel for kernel in loaded_kernels()}
    return tuple(
        ExternalKernelStatus(name, missing[name], sources(name, environment), loaded.get(name), errors.get(name))
        for name in KERNELS
    )


def _load_error(name: str) -> str | None:
    try:
        load_kernel(name)
    except MoeCompileError as error:
        return str(error)
    return None
