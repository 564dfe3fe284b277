"""What each kernel of another project needs, and whether an environment has it.

One table, `KERNELS`, says where a kernel comes from and what it asks for; one function per requirement says what is
missing and how to get it. The functions look at an `Environment` alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moe_compile.kernels.external.environment import Environment


@dataclass(frozen=True)
class HubKernel:
    """A kernel repository, pinned: what the `kernels` package is asked for.

    Attributes:
        repo_id: the repository.
        version: kernel version, where the repository has versions.
        revision: branch, tag or commit, where it has not.
    """

    repo_id: str
    version: int | None = None
    revision: str | None = None


@dataclass(frozen=True)
class ExternalKernel:
    """A kernel of another project.

    Attributes:
        name: what it is called here.
        hub: where the `kernels` package finds it.
        module: what an installed distribution of it is imported as.
        distributions: distributions that provide the module.
        symbols: what is called of it, as dotted names.
        majors: major compute capabilities that it has code for; None for all from `minimum` on.
        minimum: lowest compute capability.
        nvcc: major compute capability -> lowest nvcc that compiles it; empty where nothing is compiled by nvcc.
        needs: distribution -> (lowest version for the hub's kernel, lowest version for an installed one).
    """

    name: str
    hub: HubKernel
    module: str
    distributions: tuple[str, ...]
    symbols: tuple[str, ...]
    majors: tuple[int, ...] | None
    minimum: tuple[int, int]
    nvcc: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    needs: Mapping[str, tuple[str, str]] = field(default_factory=dict)


_DEEP_GEMM = HubKernel("kernels-community/deep-gemm", version=2)
_NVCC = {9: (12, 3), 10: (12, 9)}

KERNELS = {
    kernel.name: kernel
    for kernel in (
        ExternalKernel(
            name="deepgemm",
            hub=_DEEP_GEMM,
            module="deep_gemm",
            distributions=("deep-gemm", "sgl-deep-gemm"),
            symbols=(
                "m_grouped_bf16_gemm_nt_contiguous",
                "m_grouped_bf16_gemm_nn_contiguous",
                "m_grouped_fp8_fp4_gemm_nt_contiguous",
                "get_mk_alignment_for_contiguous_layout",
            ),
            majors=(9, 10),
            minimum=(9, 0),
            nvcc=_NVCC,
        ),
        ExternalKernel(
            name="deepgemm_megamoe",
            hub=_DEEP_GEMM,
            module="deep_gemm",
            distributions=("deep-gemm", "sgl-deep-gemm"),
            symbols=(
                "fp8_fp4_mega_moe",
                "get_symm_buffer_for_mega_moe",
                "transform_sf_into_required_layout",
                "transform_weights_for_mega_moe",
                "utils.per_token_cast_to_fp8",
            ),
            majors=(10,),
            minimum=(10, 0),
            nvcc={10: _NVCC[10]},
        ),
        ExternalKernel(
            name="sonicmoe",
            hub=HubKernel("kernels-community/sonic-moe", revision="ep-support"),
            module="sonicmoe",
            distributions=("sonic-moe",),
            symbols=(
                "functional.forward.gemm",
                "functional.forward.gemm_gated",
                "functional.backward.gemm_dgated",
            ),
            majors=None,
            minimum=(9, 0),
            # Older releases lack what the kernels are written with, and fail at import or while they are compiled.
            needs={"nvidia-cutlass-dsl": ("4.6.0", "4.4.2"), "apache-tvm-ffi": ("0.1.10", "0.1.6")},
        ),
    )
}

Check = Callable[[ExternalKernel, Environment], str | None]


def missing_requirements(name: str, environment: Environment) -> tuple[str, ...]:
    """What a kernel needs and an environment lacks, each with how to get it; empty if nothing is missing."""
    kernel = KERNELS[name]
    return tuple(found for check in CHECKS if (found := check(kernel, environment)) is not None)


def sources(name: str, environment: Environment) -> tuple[str, ...]:
    """Where a kernel would be looked for, in order, as far as that can be said without loading it."""
    kernel = KERNELS[name]
    found = ["a registered loader"] if name in environment.loaders else []
    if "kernels" in environment.distributions:
        folder = environment.local_kernels.get(kernel.hub.repo_id)
        pinned = (
            f"version {kernel.hub.version}" if kernel.hub.version is not None else f"revision {kernel.hub.revision}"
        )
        if folder is not None:
            pinned = f"in {folder} (LOCAL_KERNELS)"
        elif environment.offline:
            pinned += " from its cache alone (HF_HUB_OFFLINE)"
        found.append(f"{kernel.hub.repo_id} {pinned}, by kernels {environment.distributions['kernels']}")
    if kernel.module in environment.modules:
        versions = [
            f"{d} {environment.distributions[d]}" for d in kernel.distributions if d in environment.distributions
        ]
        found.append(f"the installed {versions[0] if versions else kernel.module}")
    return tuple(found)


def check_device(kernel: ExternalKernel, environment: Environment) -> str | None:
    """A CUDA device."""
    if environment.cuda:
        return None
    return f"{kernel.name} needs a CUDA device, torch sees none; install a driver and a CUDA build of torch"


def check_capability(kernel: ExternalKernel, environment: Environment) -> str | None:
    """A compute capability that the kernel has code for."""
    return capability_reason(kernel.name, environment.capability) if environment.cuda else None


def capability_reason(name: str, capability: tuple[int, int] | None) -> str | None:
    """Why a kernel does not run on devices of a compute capability, None if it does."""
    kernel = KERNELS[name]
    listed = kernel.majors is None or (capability is not None and capability[0] in kernel.majors)
    if capability is not None and capability >= kernel.minimum and listed:
        return None
    wanted = "{}.{}".format(*kernel.minimum)
    if kernel.majors is None:
        needed = f"compute capability {wanted} or higher"
    else:
        needed = f"compute capability {' or '.join(f'{major}.x (SM{major}0)' for major in kernel.majors)}"
    found = "unknown" if capability is None else "{}.{}".format(*capability)
    return f"{name} needs {needed}, this device's is {found}; use another experts backend on it"


def check_source(kernel: ExternalKernel, environment: Environment) -> str | None:
    """Somewhere to load it from."""
    if kernel.name in environment.loaders or kernel.module in environment.modules:
        return None
    if "kernels" in environment.distributions:
        return None
    return (
        f"{kernel.name} needs the `kernels` package, which fetches {kernel.hub.repo_id}, or an installed "
        f"`{kernel.module}`; neither is there: pip install kernels, or pip install {kernel.distributions[-1]}"
    )


def check_local_kernels(kernel: ExternalKernel, environment: Environment) -> str | None:
    """A `LOCAL_KERNELS` that the `kernels` package can read, if there is one."""
    if kernel.name in environment.loaders or "kernels" not in environment.distributions:
        return None
    for entry, folder in environment.local_kernels.items():
        if folder is None:
            return (
                f"{kernel.name} would be loaded by the `kernels` package, which cannot read LOCAL_KERNELS: its entry "
                f"{entry!r} is not of the form repository=folder (several are separated by colons); correct or unset it"
            )
    return None


def check_dependencies(kernel: ExternalKernel, environment: Environment) -> str | None:
    """The distributions that it is written with, new enough."""
    if kernel.name in environment.loaders:
        return None  # whoever loads it knows what it needs
    local = kernel.hub.repo_id in environment.local_kernels
    from_hub = "kernels" in environment.distributions and (local or kernel.module not in environment.modules)
    for distribution, (for_hub, for_installed) in kernel.needs.items():
        wanted = for_hub if from_hub else for_installed
        found = environment.distributions.get(distribution)
        if found is None:
            return f"{kernel.name} needs {distribution} >= {wanted}, which is not installed: pip install {distribution}"
        if parse_version(found) < parse_version(wanted):
            return (
                f"{kernel.name} needs {distribution} >= {wanted}, {found} is installed: "
                f"pip install '{distribution}>={wanted}'"
            )
    return None


def check_toolkit(kernel: ExternalKernel, environment: Environment) -> str | None:
    """A whole CUDA toolkit with an nvcc that is new enough: the kernels are compiled at their first call."""
    wanted = kernel.nvcc.get(environment.capability[0]) if environment.capability else None
    if wanted is None:
        return None
    needs = f"{kernel.name} needs nvcc {wanted[0]}.{wanted[1]} or newer"
    remedy = f"point CUDA_HOME at a full CUDA toolkit >= {wanted[0]}.{wanted[1]}"
    toolkit = environment.toolkit
    if toolkit is None:
        return f"{needs}; no CUDA toolkit was found by CUDA_HOME, CUDA_PATH, PATH or in /usr/local/cuda: {remedy}"
    where = f"{toolkit.home} (found by {toolkit.found_by})"
    if not toolkit.has_nvcc:
        return f"{needs}; {where} has no bin/nvcc, it is a runtime-only installation: {remedy}"
    if toolkit.version is None:
        return f"{needs}; the version of the one in {where} cannot be read: {remedy}"
    if toolkit.version < wanted:
        return f"{needs}; the one in {where} is {toolkit.version[0]}.{toolkit.version[1]}: {remedy}"
    return None


CHECKS: tuple[Check, ...] = (
    check_device,
    check_capability,
    check_source,
    check_local_kernels,
    check_dependencies,
    check_toolkit,
)


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "4.4.2.post1" -> (4, 4, 2)."""
    numbers = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
