"""What is legal: one predicate per experts backend, read by the rewriter, `explain()` and every table.

A predicate gets the block (`ExpertsSpec`) and what surrounds it (`Situation`) and returns the reasons against the
backend, none when it is legal. It looks at nothing else, so every cell of a matrix can be asked for on any machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moe_compile.errors import RequirementError, RuleError, ScaleFormatError
from moe_compile.kernels.external.environment import Environment
from moe_compile.modes import CompileSettings
from moe_compile.spec import ExpertsSpec


@dataclass(frozen=True)
class Situation:
    """What surrounds an experts block when a backend is chosen for it.

    Attributes:
        device_type: "cpu", "cuda", ...
        capability: CUDA compute capability, None elsewhere.
        settings: compile mode and options.
        fullgraph: whether `torch.compile(fullgraph=True)` was asked for.
        training: whether gradients will be computed.
        own_code_traces_whole: whether Dynamo can trace the model's own code for this block as one graph.
        has_triton: whether triton is installed.
        dynamic_tokens: whether the token count is symbolic.
        tensor_class: name of a wrapper class that the block's tensors have ("DTensor"), None for plain tensors.
        transform: the `torch.func` transform around the block ("vmap", "grad", "jvp"), None without one.
        environment: what the machine offers to kernels of other projects; None leaves that open.
        device_name: under which measurements of the device are kept, None where they are of no interest.
        override: what replaces the predicates' answers, such as what was measured on this machine; None for nothing.
    """

    device_type: str = "cpu"
    capability: tuple[int, int] | None = None
    settings: CompileSettings = field(default_factory=CompileSettings)
    fullgraph: bool = False
    training: bool = False
    own_code_traces_whole: bool = False
    has_triton: bool = False
    dynamic_tokens: bool = False
    tensor_class: str | None = None
    transform: str | None = None
    environment: Environment | None = None
    device_name: str | None = None
    override: "Override | None" = None


class MissingRequirement(str):
    """A reason that something is missing; where it is raised, it is an `ImportError`."""

    error = RequirementError


class WrongScales(str):
    """A reason that scales would be misread; where it is raised, it is a `ValueError`."""

    error = ScaleFormatError


def error_for(reasons: tuple[str, ...]) -> type[RuleError]:
    """The class of the error that says these reasons: that of the first which has one of its own."""
    return next((reason.error for reason in reasons if isinstance(reason, MissingRequirement | WrongScales)), RuleError)


Predicate = Callable[[ExpertsSpec, Situation], tuple[str, ...]]
# (name of the experts backend, block, situation, the predicate's reasons) -> the reasons that count.
Override = Callable[[str, ExpertsSpec, Situation, tuple[str, ...]], tuple[str, ...]]

# float64 is not in the documented table; it runs through the same ops, and gradient checks need it.
FLOATING_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _unquantised(name: str, spec: ExpertsSpec) -> tuple[str, ...]:
    if spec.quantisation is not None:
        return (f"{name} does not read {spec.quantisation} weights yet",)
    if spec.weight_dtype is not None and spec.weight_dtype not in FLOATING_DTYPES:
        return (f"{name} takes bfloat16, float16 or float32 weights, these are {spec.weight_dtype}",)
    return ()


def canonical_reasons(situation: Situation) -> tuple[str, ...]:
    """What stands against every backend but `eager`: a block is first written in canonical ops, whoever runs it."""
    if situation.transform is not None:
        return (f"the block runs inside torch.func.{situation.transform}, which the canonical ops do not support",)
    if situation.tensor_class is not None:
        return (f"the block's tensors are {situation.tensor_class}s, which the canonical ops do not take apart",)
    if situation.device_type == "meta":
        return ("the block is on the meta device, which holds no numbers",)
    return ()


def eager_reasons(spec: ExpertsSpec, situation: Situation) -> tuple[str, ...]:
    """The model's own code: everywhere, but a loop over the experts that were hit is never one graph."""
    if situation.fullgraph and not situation.own_code_traces_whole:
        return ("the model's own loop reads on the host which experts were hit, so it cannot be one graph",)
    return ()


def batched_mm_reasons(spec: ExpertsSpec, situation: Situation) -> tuple[str, ...]:
    """Weight gather and bmm: every mode, every floating dtype."""
    return _unquantised("batched_mm", spec)


def grouped_mm_reasons(spec: ExpertsSpec, situation: Situation) -> tuple[str, ...]:
    """The family of the native kernel and its fallback: every floating dtype, no CUDA graphs.

    Which of the two runs is no question of legality: `passes/lower_grouped_mm.py` decides it by the kernel's real
    preconditions.
    """
    reasons = _unquantised("grouped_mm", spec)
    if situation.settings.cuda_graphs:
        reasons += (
            f"grouped_mm is documented as incompatible with CUDA graphs, which {situation.settings.label} uses",
        )
    return reasons


def triton_reasons(spec: ExpertsSpec, situation: Situation) -> tuple[str, ...]:
    """Own kernels: CUDA from SM80 on, every mode, three dtypes; static token counts, inference.

    With symbolic sizes Inductor of torch 2.11 fails on the kernels' launch grids.
    """
    reasons = _unquantised("triton", spec)
    if spec.weight_dtype == torch.float64:
        reasons += ("triton takes bfloat16, float16 or float32 weights, these are torch.float64",)
    if situation.device_type != "cuda":
        reasons += (f"triton needs a CUDA device, the block is on {situation.device_type}",)
    elif situation.capability is None or situation.capability < (8, 0):
        found = "unknown" if situation.capability is None else "{}.{}".format(*situation.capability)
        reasons += (f"triton needs compute capability 8.0, this is {found}",)
    if not situation.has_triton:
        reasons += ("triton is not installed",)
    if situation.dynamic_tokens:
        reasons += ("triton compiles for static token counts only, here it is symbolic",)
    if situation.training:
        reasons += ("triton has no backward yet",)
    return reasons
