"""Which machine and which versions a matrix speaks of."""

import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from typing import Any

import torch

import moe_compile
from moe_compile.errors import OptionError

# Distributions whose version may change what is legal.
_DISTRIBUTIONS = ("torch", "triton", "transformers", "depyf", "kernels", "moe-compile")


@dataclass(frozen=True)
class Machine:
    """A device and the versions that ran on it.

    Attributes:
        device_type: "cpu", "cuda", ...
        device: the device's own name.
        capability: CUDA compute capability, None elsewhere.
        versions: distribution -> version, and that of Python; without the ones that are not installed.
    """

    device_type: str
    device: str
    capability: tuple[int, int] | None
    versions: dict[str, str]

    @classmethod
    def here(cls, device: str | None = None) -> "Machine":
        """This machine.

        Args:
            device: a device type; by default CUDA where there is one.

        Raises:
            OptionError: for a device that is not here.
        """
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if kind == "cuda" and not torch.cuda.is_available():
            raise OptionError(f"device={device!r}", "torch finds no CUDA device here", 'Use device="cpu"')
        if kind not in ("cpu", "cuda"):
            raise OptionError(f"device={device!r}", "matrices know cpu and cuda", 'Use device="cpu" or device="cuda"')
        versions = {"python": platform.python_version(), **installed_versions()}
        if kind == "cuda":
            return cls(kind, torch.cuda.get_device_name(), torch.cuda.get_device_capability(), versions)
        return cls(kind, _processor(), None, versions)

    @property
    def identity(self) -> str:
        """What has to agree for a measurement to hold: the device, and the versions of torch, triton and ours."""
        names = ("torch", "triton", "moe-compile")
        versions = " ".join(f"{name} {self.versions[name]}" for name in names if name in self.versions)
        return f"{self.device_type} {self.device} {versions}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        capability = list(self.capability) if self.capability else None
        return {
            "device_type": self.device_type,
            "device": self.device,
            "capability": capability,
            "versions": dict(self.versions),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Machine":
        """The inverse of `to_dict`."""
        capability = tuple(data["capability"]) if data["capability"] else None
        return cls(data["device_type"], data["device"], capability, dict(data["versions"]))

    @property
    def label(self) -> str:
        """The device's name and, for CUDA, its capability."""
        return self.device + (" SM{}{}".format(*self.capability) if self.capability else "")

    def __str__(self) -> str:
        return f"{self.label}, " + ", ".join(f"{name} {value}" for name, value in self.versions.items())


def installed_versions() -> dict[str, str]:
    """Versions of the distributions that matter, without those that are not installed."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = str(torch.__version__)  # with its build, +cpu or +cu130
    found["moe-compile"] = moe_compile.__version__  # also where it runs from a checkout
    return found


def _processor() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
