"""What is legal for the experts backends whose kernels other projects ship.

As in `rules.py`, each predicate sees the block and the situation alone. What the machine must offer is checked one by
one (`kernels/external/requirements.py`) and is an `ImportError` where it is raised.
"""

import torch

from moe_compile.kernels.external.requirements import capability_reason, missing_requirements
from moe_compile.kernels.external.sonicmoe import GATES
from moe_compile.kernels.quantised_linear import FP8_BLOCK
from moe_compile.rules import MissingRequirement, Situation, WrongScales
from moe_compile.spec import ExpertsSpec

# The kernels read their operands in steps of this many features: DeepGEMM insists on whole ones, SonicMoE on strides
# that the copy engine takes, multiples of 16 bytes.
_MULTIPLES = {"deepgemm": 64, "sonicmoe": 8}

_FP8_BLOCKS = ((128, 128), (1, 128))


def deepgemm_reasons(spec: ExpertsSpec, situation: Situation) -> tuple[str, ...]:
    """DeepGEMM: SM90 and SM100, bf16, FP8 and FP4 experts, inference, every mode."""
    reasons: tuple[str, ...] = _machine_reasons("deepgemm", situation)
    if spec.quantisation is None:
        reasons += _dtype_reasons("deepgemm", spec) + _alignment_reasons("deepgemm", spec, _MULTIPLES["deepgemm"])
    else:
        reasons += _quantised_reasons("deepgemm", spec, situation)
    if situation.training:
        reasons += (
            "deepgemm has no backward: its grouped GEMM for weight gradients (k_grouped_bf16_gemm_tn_contiguous) wants "
            "the rows per expert on the host, and would wait for the device in every step",
        )
    return reasons


def megamoe_reasons(spec: ExpertsSpec, situation: Situation) -> tuple[str, ...]:
    """DeepGEMM's Mega MoE: SM100, FP4 experts with UE8M0 scales spread over a process group, inference."""
    reasons: tuple[str, ...] = _machine_reasons("deepgemm_megamoe", situation)
    if spec.quantisation != "fp4":
        reasons += (f"deepgemm_megamoe takes FP4 weights, these are {spec.quantisation or spec.weight_dtype}",)
    else:
        reasons += _quantised_reasons("deepgemm_megamoe", spec, situation)
        if spec.scale_format != "ue8m0" and not any(isinstance(reason, WrongScales) for reason in reasons):
            reasons += (_wrong_scales("deepgemm_megamoe", spec),)
    if spec.process_group is None:
        reasons += (
            "deepgemm_megamoe exchanges tokens itself and needs the process group over which the experts are spread",
        )
    if situation.training:
        reasons += ("deepgemm_megamoe has no backward",)
    if situation.settings.cuda_graphs:
        reasons += (
            "deepgemm_megamoe allocates a buffer with all ranks at its first call and was not tried in CUDA graphs, "
            f"which {situation.settings.label} uses",
        )
    if not spec.gated or spec.gate.kind not in ("silu", "swiglu_clamped") or not spec.concatenated or spec.transposed:
        reasons += (
            "deepgemm_megamoe computes SwiGLU of concatenated halves of (E, out, in) weights, this block is "
            f"{spec.summary()}",
        )
    if spec.bias or spec.post_expert_norm or spec.routing_weight != "output":
        reasons += ("deepgemm_megamoe has no bias, no norm, and puts the routing weight on the output",)
    return reasons


def sonicmoe_reasons(spec: ExpertsSpec, situation: Situation) -> tuple[str, ...]:
    """SonicMoE: SM90 and later, bf16, gated silu, gelu or relu, inference and training, every mode."""
    reasons: tuple[str, ...] = _machine_reasons("sonicmoe", situation)
    if spec.quantisation is not None:
        reasons += (f"sonicmoe takes bfloat16 weights, these are {spec.quantisation}",)
    else:
        reasons += _dtype_reasons("sonicmoe", spec) + _alignment_reasons("sonicmoe", spec, _MULTIPLES["sonicmoe"])
    if not spec.gated:
        reasons += ("sonicmoe needs a gated first projection",)
    elif spec.gate.kind not in GATES:
        reasons += (f"sonicmoe implements {', '.join(GATES)}, this gate is {spec.gate.kind}",)
    if spec.post_expert_norm:
        reasons += ("sonicmoe has no norm after the experts",)
    if spec.routing_weight == "input":
        reasons += ("sonicmoe puts the routing weight on the output, here it is on the input",)
    return reasons


def _machine_reasons(name: str, situation: Situation) -> tuple[str, ...]:
    """What the machine lacks; of one that is only described, device and capability are all that is known."""
    if situation.device_type != "cuda":
        return (MissingRequirement(f"{name} needs a CUDA device, the block is on {situation.device_type}"),)
    if situation.environment is None:
        reason = capability_reason(name, situation.capability)
        return () if reason is None else (MissingRequirement(reason),)
    return tuple(map(MissingRequirement, missing_requirements(name, situation.environment)))


def _dtype_reasons(name: str, spec: ExpertsSpec) -> tuple[str, ...]:
    if spec.weight_dtype in (None, torch.bfloat16):
        return ()
    return (f"{name} takes bfloat16 weights, these are {spec.weight_dtype}",)


def _alignment_reasons(name: str, spec: ExpertsSpec, unit: int) -> tuple[str, ...]:
    sizes = (("a hidden", spec.hidden_size), ("an intermediate", spec.intermediate_size))
    return tuple(
        f"{name} needs {what} size that is a multiple of {unit}, not {size}"
        for what, size in sizes
        if size is not None and size % unit
    )


def _quantised_reasons(name: str, spec: ExpertsSpec, situation: Situation) -> tuple[str, ...]:
    reasons: tuple[str, ...] = ()
    blackwell = situation.capability is not None and situation.capability[0] >= 10
    if spec.quantisation not in ("fp8", "fp4"):
        reasons += (f"{name} takes bfloat16, FP8 or FP4 weights, these are {spec.quantisation}",)
    if spec.quantisation == "fp4" and not blackwell:
        reasons += (f"{name} has no FP4 kernel before SM100; use FP8 experts, or dequantize=True",)
    if spec.activation_scheme == "static":
        reasons += (f"{name} scales activations per row while it runs (dynamic), this checkpoint's scales are static",)
    if blackwell and spec.scale_format == "float32":
        reasons += (_wrong_scales(name, spec),)
    if spec.quantisation == "fp8" and spec.block_size not in (None, *_FP8_BLOCKS):
        blocks = " or ".join(map(str, _FP8_BLOCKS))
        reasons += (f"{name} takes FP8 weights with a scale per block of {blocks}, here it is {spec.block_size}",)
    if spec.quantisation == "fp8" and spec.block_size == (1, 128) and not blackwell:
        reasons += (f"{name} reads scales per row from SM100 on, before it takes one per block of (128, 128)",)
    reasons += _alignment_reasons(name, spec, FP8_BLOCK)
    if spec.bias:
        reasons += (f"{name} adds no bias to quantised projections",)
    if spec.transposed:
        reasons += (f"{name} reads quantised weights as (E, out, in), these are transposed",)
    if name == "deepgemm" and spec.process_group is not None:
        reasons += ("deepgemm runs the experts of this rank, these are spread over a process group",)
    return reasons


def _wrong_scales(name: str, spec: ExpertsSpec) -> WrongScales:
    return WrongScales(
        f"{name} needs UE8M0 scales on SM100, these are {spec.scale_format}, and rounding them would corrupt the "
        'output: quantise with scale_fmt="ue8m0", or use grouped_mm or batched_mm, which take float32 block scales'
    )
