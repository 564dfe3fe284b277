"""What this machine offers to kernels of other projects, as data.

Whether a kernel can run is decided by pure functions of an `Environment` (`requirements.py`), so that every answer can
be had, and tested, for machines that are not here. Describing a machine imports nothing, starts no CUDA context that is
not there yet, and reads a handful of files.
"""

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

# Distributions that some kernel or other asks for, and modules that may hold one.
DISTRIBUTIONS = (
    "apache-tvm-ffi",
    "deep-gemm",
    "kernels",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "sgl-deep-gemm",
    "sonic-moe",
)
MODULES = ("deep_gemm", "sonicmoe")

_CUDA_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_DEFAULT_TOOLKIT = "/usr/local/cuda"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit, as far as it was found.

    Attributes:
        home: its folder.
        found_by: what named it: "CUDA_HOME", "CUDA_PATH", "PATH" or "/usr/local/cuda".
        has_nvcc: whether `bin/nvcc` is there; it is not in a runtime-only installation.
        version: (major, minor), None if it could not be read.
    """

    home: str
    found_by: str
    has_nvcc: bool
    version: tuple[int, int] | None


@dataclass(frozen=True)
class Environment:
    """What decides whether kernels of other projects can be loaded and run.

    Attributes:
        cuda: whether torch sees a CUDA device.
        capability: compute capability of the device in question, None without one.
        toolkit: the CUDA toolkit, None if there is none.
        distributions: name of an installed distribution -> its version, of those in `DISTRIBUTIONS`.
        modules: importable modules, of those in `MODULES`.
        loaders: kernels for which the user has registered a loader.
        local_kernels: what `LOCAL_KERNELS` says to the `kernels` package: repository -> folder, None for an entry that
            names no folder.
        offline: whether the `kernels` package looks into its cache alone (`HF_HUB_OFFLINE`).
    """

    cuda: bool = False
    capability: tuple[int, int] | None = None
    toolkit: Toolkit | None = None
    distributions: Mapping[str, str] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    loaders: frozenset[str] = frozenset()
    local_kernels: Mapping[str, str | None] = field(default_factory=dict)
    offline: bool = False


def describe_environment(
    capability: tuple[int, int] | None = None, loaders: frozenset[str] = frozenset()
) -> Environment:
    """Describes this machine.

    Args:
        capability: that of the device in question, None for the current one's.
        loaders: kernels for which the user has registered a loader.
    """
    cuda = torch.cuda.is_available()
    if capability is None and cuda:
        capability = torch.cuda.get_device_capability()
    variables = tuple(os.environ.get(name) for name in (*_CUDA_VARIABLES, "PATH"))
    toolkit, distributions, modules = _installed(variables, tuple(map(_stamp, sys.path)))
    local_kernels = parse_local_kernels(os.environ.get("LOCAL_KERNELS"))
    return Environment(cuda, capability, toolkit, distributions, modules, loaders, local_kernels, _is_offline())


def parse_local_kernels(text: str | None) -> dict[str, str | None]:
    """Reads `LOCAL_KERNELS` as the `kernels` package does: "repository=folder", several of them separated by colons."""
    entries = [] if text is None else [entry.partition("=") for entry in text.split(":")]
    return {repository: folder if equals else None for repository, equals, folder in entries}


def _is_offline() -> bool:
    """Whether the hub's client is offline, which it decides when it is imported."""
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:
        return bool(constants.HF_HUB_OFFLINE)
    asked = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return asked.upper() in ("1", "ON", "YES", "TRUE")


def _stamp(folder: str) -> tuple[str, int]:
    """A folder on the module path with the time of its last change: an installation makes another stamp."""
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:
        return folder, 0


@functools.lru_cache(maxsize=4)
def _installed(
    variables: tuple[str | None, ...], path: tuple[tuple[str, int], ...]
) -> tuple[Toolkit | None, dict[str, str], frozenset[str]]:
    importlib.invalidate_caches()
    distributions = {name: version for name in DISTRIBUTIONS if (version := _version_of(name)) is not None}
    modules = frozenset(name for name in MODULES if _is_importable(name))
    return find_toolkit(dict(zip((*_CUDA_VARIABLES, "PATH"), variables, strict=True))), distributions, modules


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def find_toolkit(variables: Mapping[str, str | None], default: str = _DEFAULT_TOOLKIT) -> Toolkit | None:
    """Finds the CUDA toolkit in the order in which DeepGEMM's compiler looks for it.

    Args:
        variables: CUDA_HOME, CUDA_PATH and PATH; the first that names a toolkit counts, whole or not.
        default: where to look when none does.
    """
    for name in _CUDA_VARIABLES:
        home = variables.get(name)
        if home:
            return _toolkit(home, name)
    nvcc = shutil.which("nvcc", path=variables.get("PATH") or "")
    if nvcc is not None:
        return _toolkit(str(Path(nvcc).parent.parent), "PATH")
    return _toolkit(default, default) if Path(default).is_dir() else None


def _toolkit(home: str, found_by: str) -> Toolkit:
    nvcc = Path(home, "bin", "nvcc")
    has_nvcc = nvcc.is_file()
    return Toolkit(home, found_by, has_nvcc, _toolkit_version(Path(home), nvcc) if has_nvcc else None)


def _toolkit_version(home: Path, nvcc: Path) -> tuple[int, int] | None:
    """The version, from the files that a toolkit comes with; from nvcc itself where it has none of them."""
    try:
        components = json.loads((home / "version.json").read_text())
        major, minor = (components.get("cuda_nvcc") or components["cuda"])["version"].split(".")[:2]
        return int(major), int(minor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    for name, pattern in (
        ("version.txt", r"CUDA Version (\d+)\.(\d+)"),
        ("include/cuda.h", r"#define CUDA_VERSION (\d+)"),
    ):
        try:
            match = re.search(pattern, (home / name).read_text())
        except (OSError, ValueError):
            continue
        if match is not None and match.lastindex == 2:
            return int(match.group(1)), int(match.group(2))
        if match is not None:
            return int(match.group(1)) // 1000, int(match.group(1)) % 1000 // 10
    try:
        output = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", output)
    return (int(match.group(1)), int(match.group(2))) if match else None
