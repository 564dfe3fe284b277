"""What `moe-compile doctor` says: versions, devices, which experts backends are usable and what the others need."""

import importlib.util
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tabulate import tabulate

from moe_compile.backend import device_situation
from moe_compile.compatibility import small_block, storage
from moe_compile.compatibility.machine import Machine
from moe_compile.experts_backends import EXPERTS_BACKENDS
from moe_compile.external import ExternalKernelStatus, external_kernels
from moe_compile.modes import CompileSettings


@dataclass(frozen=True)
class Usability:
    """One experts backend on one device.

    Attributes:
        experts: its name.
        device_type: "cpu" or "cuda".
        summary: what it does.
        needs: why it is not usable here for a plain bfloat16 block, in inference and the default mode; () if it is.
    """

    experts: str
    device_type: str
    summary: str
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The state of an installation; `str()` of it is a report.

    Attributes:
        machines: this machine by its devices, the accelerator first.
        backends: every experts backend on each of them.
        kernels: the kernels of other projects: what they lack here, and where each comes from.
        notes: what is worth knowing, in sentences.
        healthy: whether some experts backend besides the model's own code is usable on each device, and no kernel that
            was to be loaded failed.
    """

    machines: tuple[Machine, ...]
    backends: tuple[Usability, ...]
    kernels: tuple[ExternalKernelStatus, ...]
    notes: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        usable = {item.device_type for item in self.backends if not item.needs and item.experts != "eager"}
        failed = any(kernel.error is not None for kernel in self.kernels)
        return usable >= {machine.device_type for machine in self.machines} and not failed

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for JSON."""
        return {
            "healthy": self.healthy,
            "machines": [machine.to_dict() for machine in self.machines],
            "backends": [asdict(item) for item in self.backends],
            "kernels": [asdict(item) for item in self.kernels],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        versions = tabulate(sorted(self.machines[0].versions.items()), ["installed", "version"], disable_numparse=True)
        devices = tabulate([(item.device_type, item.label) for item in self.machines], ["on", "device"])
        rows = [
            (item.experts, item.device_type, "usable" if not item.needs else "\n".join(item.needs), item.summary)
            for item in self.backends
        ]
        backends = tabulate(rows, ["experts", "on", "state", "what it does"], maxcolwidths=[None, None, 60, 32])
        columns = ["kernel", "state", "from"]
        kernels = tabulate([_kernel_row(item) for item in self.kernels], columns, maxcolwidths=[None, 60, 60])
        return "\n\n".join([versions, devices, backends, kernels, *self.notes])


def diagnose(*, load: bool = False) -> Diagnosis:
    """Looks at this machine; compiles nothing.

    Args:
        load: load the kernels of other projects for which nothing is missing, which may download them.
    """
    kinds = (["cuda"] if torch.cuda.is_available() else []) + ["cpu"]
    machines = tuple(Machine.here(kind) for kind in kinds)
    bf16 = torch.bfloat16
    spec = replace(small_block.SPEC, hidden_size=None, intermediate_size=None, weight_dtype=bf16, activation_dtype=bf16)
    backends = []
    for kind in kinds:
        situation = device_situation(torch.device(kind), CompileSettings(), fullgraph=False, training=False)
        for name, record in EXPERTS_BACKENDS.items():
            backends.append(Usability(name, kind, record.summary, record.reasons(spec, situation)))
    return Diagnosis(machines, tuple(backends), external_kernels(load=load), tuple(_notes(machines)))


def _kernel_row(kernel: ExternalKernelStatus) -> tuple[str, str, str]:
    if kernel.loaded is not None:
        state = f"loaded, version {kernel.loaded.version or 'unknown'}"
        return kernel.name, state, f"{kernel.loaded.source}: {kernel.loaded.origin}"
    state = kernel.error or "\n".join(kernel.missing) or "nothing is missing; it is loaded at its first use, or --load"
    return kernel.name, state, "\n".join(kernel.sources)


def _notes(machines: tuple[Machine, ...]) -> list[str]:
    notes: list[str] = []
    if importlib.util.find_spec("transformers") is None:
        notes.append("transformers is not installed; its models are captured as soon as it is imported.")
    for machine in machines:
        path = storage.measured_path(machine)
        state = (
            f"measured rules are at {path}" if path.exists() else "no measured rules; `moe-compile matrix --measure`"
        )
        notes.append(f"{machine.device_type}: {state}.")
    return notes
