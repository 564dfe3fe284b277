"""The cells of a compatibility matrix: what was asked for, what the rules say, and what happened."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from moe_compile.experts_backends import EXPERTS_BACKENDS
from moe_compile.modes import CompileSettings
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec

Kind = Literal["ok", "error", "wrong numbers", "timeout"]


@dataclass(frozen=True)
class Key:
    """One combination.

    Attributes:
        experts: name of an experts backend.
        mode: compile mode, None for the default one.
        dtype: of weights and activations, without `torch.`: "bfloat16".
        fullgraph: as `torch.compile` takes it.
        training: gradients are computed.
    """

    experts: str
    mode: str | None
    dtype: str
    fullgraph: bool
    training: bool

    def __str__(self) -> str:
        words = [self.experts, f"mode={self.mode}", self.dtype, f"fullgraph={self.fullgraph}"]
        return ", ".join([*words, "training" if self.training else "inference"])


@dataclass(frozen=True)
class Outcome:
    """What happened when a cell was run.

    Attributes:
        kind: "ok", "error", "wrong numbers" or "timeout".
        message: one line; what went wrong, "" if nothing did.
        ran: what ran the block, more precise than the backend's name where that names a family.
        relative_error: norm of the difference to an oracle of higher precision over the oracle's norm; the largest
            of output and gradients.
        budget: what the relative error may be; it comes from the uncompiled model's own error on the same data.
        microseconds: median time of a call (forward, and backward in training), None if it was not timed.
        graphs: graphs that Dynamo handed over.
    """

    kind: Kind
    message: str = ""
    ran: str = ""
    relative_error: float | None = None
    budget: float | None = None
    microseconds: float | None = None
    graphs: int | None = None


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        key: the combination.
        documented: the reasons that the documented rules have against it, none where they allow it.
        rule: the reasons of the rules in force: the documented ones, or those that a measurement lifted or tightened.
        outcome: what happened, None if it was not measured.
    """

    key: Key
    documented: tuple[str, ...]
    rule: tuple[str, ...]
    outcome: Outcome | None = None

    @property
    def disagreement(self) -> str | None:
        """A sentence where documentation, rule and reality are not of one opinion, else None."""
        said = "documented as allowed" if not self.documented else f"documented as forbidden ({self.documented[0]})"
        in_force = ""
        if bool(self.rule) != bool(self.documented):
            in_force = " and allowed by the measured rule" if not self.rule else f" and forbidden ({self.rule[0]})"
        if self.outcome is None or self.outcome.kind == "timeout":
            return f"{said}{in_force}" if in_force else None
        works = self.outcome.kind == "ok"
        if works == (not self.rule) and works == (not self.documented):
            return None
        if works:
            return f"{said}{in_force}, yet it compiled, stayed within its error budget and ran as {self.outcome.ran}"
        return f"{said}{in_force}, yet here: {self.outcome.kind}, {self.outcome.message}"


def reasons_against(key: Key, spec: ExpertsSpec, situation: Situation) -> tuple[str, ...]:
    """What the predicate of an experts backend says of a cell.

    Args:
        key: the combination; its dtype, mode, fullgraph and training replace what `spec` and `situation` say of them.
        spec: the block.
        situation: the machine.
    """
    dtype = getattr(torch, key.dtype)
    if spec.quantisation is None:
        spec = replace(spec, weight_dtype=dtype, activation_dtype=dtype)
    situation = replace(
        situation, settings=CompileSettings(key.mode), fullgraph=key.fullgraph, training=key.training, override=None
    )
    return EXPERTS_BACKENDS[key.experts].reasons(spec, situation)
