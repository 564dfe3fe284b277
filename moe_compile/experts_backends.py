"""The experts backends, as records: everything that is said of one is read from here."""

from dataclasses import dataclass

from moe_compile.errors import UnknownBackendError
from moe_compile.external_rules import deepgemm_reasons, megamoe_reasons, sonicmoe_reasons
from moe_compile.modes import nearest
from moe_compile.passes import Lowering
from moe_compile.passes.lower_batched_mm import lower_batched_mm
from moe_compile.passes.lower_deepgemm import lower_deepgemm
from moe_compile.passes.lower_grouped_mm import lower_grouped_mm
from moe_compile.passes.lower_megamoe import lower_megamoe
from moe_compile.passes.lower_sonicmoe import lower_sonicmoe
from moe_compile.passes.lower_triton import lower_triton
from moe_compile.rules import (
    Predicate,
    Situation,
    batched_mm_reasons,
    canonical_reasons,
    eager_reasons,
    grouped_mm_reasons,
    triton_reasons,
)
from moe_compile.spec import ExpertsSpec

AUTO = "auto"


@dataclass(frozen=True)
class ExpertsBackend:
    """One way to execute an experts block.

    Attributes:
        name: what users call it.
        reasons: predicate; why it is not legal for a block in a situation, empty when it is.
        lower: replaces the canonical ops of one block in a graph and says what runs there; None where the model's own
            code stays.
        has_backward: whether gradients flow through it.
        cuda_graph_safe: whether it may run inside CUDA graphs.
        summary: one line for tables.
    """

    name: str
    reasons: Predicate
    lower: Lowering | None
    has_backward: bool
    cuda_graph_safe: bool
    summary: str


# In the order in which `on_reject="fallback"` tries them.
_BACKENDS = (
    ExpertsBackend("grouped_mm", grouped_mm_reasons, lower_grouped_mm, True, False, "sort and one grouped GEMM"),
    ExpertsBackend("batched_mm", batched_mm_reasons, lower_batched_mm, True, True, "weight gather and bmm"),
    ExpertsBackend("triton", triton_reasons, lower_triton, False, True, "own kernels, gathering and scattering rows"),
    ExpertsBackend("deepgemm", deepgemm_reasons, lower_deepgemm, False, True, "DeepGEMM's grouped GEMM, aligned rows"),
    ExpertsBackend(
        "deepgemm_megamoe", megamoe_reasons, lower_megamoe, False, False, "DeepGEMM's expert-parallel block, one kernel"
    ),
    ExpertsBackend("sonicmoe", sonicmoe_reasons, lower_sonicmoe, True, True, "SonicMoE's fused forward and backward"),
    ExpertsBackend("eager", eager_reasons, None, True, True, "the model's own code"),
)
EXPERTS_BACKENDS = {record.name: record for record in _BACKENDS}


def known_names() -> list[str]:
    """All names that may be chosen, `auto` included."""
    return [AUTO, *EXPERTS_BACKENDS]


def check_name(name: object, argument: str = "experts") -> str:
    """Returns the name of an experts backend.

    Raises:
        UnknownBackendError: if nothing goes by that name.
    """
    if not isinstance(name, str) or name not in known_names():
        raise UnknownBackendError(
            f"{argument}={name!r}",
            f"there is no such experts backend{nearest(name, known_names())}",
            f"Use one of {', '.join(known_names())}",
        )
    return name


def all_reasons(spec: ExpertsSpec, situation: Situation) -> dict[str, tuple[str, ...]]:
    """Backend name -> reasons against it, for every backend; an override of the situation has the last word.

    Except on what the canonical ops cannot stand for, which no override knows of.
    """
    reasons = {name: record.reasons(spec, situation) for name, record in EXPERTS_BACKENDS.items()}
    if situation.override is not None:
        reasons = {name: situation.override(name, spec, situation, found) for name, found in reasons.items()}
    canonical = canonical_reasons(situation)
    rewrites = {name for name, record in EXPERTS_BACKENDS.items() if record.lower is not None}
    return {name: (*canonical, *found) if name in rewrites else found for name, found in reasons.items()}


def legal_names(spec: ExpertsSpec, situation: Situation) -> list[str]:
    """The backends that are legal for this block, in fallback order."""
    return [name for name, reasons in all_reasons(spec, situation).items() if not reasons]
