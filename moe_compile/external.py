"""Kernels of other projects, for users: how to load one's own build, and what is there.

moe_compile.external.register_loader("deepgemm", lambda: importlib.import_module("my_deep_gemm"))
for kernel in moe_compile.external.external_kernels():
    print(kernel.name, kernel.missing, kernel.loaded)
"""

from dataclasses import dataclass

from moe_compile.kernels.external.environment import Environment
from moe_compile.kernels.external.environment import describe_environment as _describe
from moe_compile.kernels.external.loading import (
    LoadedKernel,
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
    """What can be said of a kernel without loading it.

    Attributes:
        name: the kernel, which is also the experts backend's name.
        missing: what it needs and this machine lacks, each with how to get it.
        sources: where it would be looked for, in order.
        loaded: what was loaded, from where, in which version; None before its first use.
    """

    name: str
    missing: tuple[str, ...]
    sources: tuple[str, ...]
    loaded: LoadedKernel | None


def describe_environment() -> Environment:
    """What this machine offers: device, CUDA toolkit, distributions, registered loaders."""
    return _describe(loaders=registered_loaders())


def external_kernels() -> tuple[ExternalKernelStatus, ...]:
    """All kernels of other projects that experts backends use. Loads nothing."""
    environment = describe_environment()
    loaded = {kernel.name: kernel for kernel in loaded_kernels()}
    return tuple(
        ExternalKernelStatus(
            name, missing_requirements(name, environment), sources(name, environment), loaded.get(name)
        )
        for name in KERNELS
    )
