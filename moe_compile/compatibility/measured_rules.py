"""`backend(..., rules="measured")`: what was measured on this machine has the last word over the documented rules."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_compile.compatibility import small_block, storage
from moe_compile.compatibility.cells import Key, Outcome, reasons_against
from moe_compile.compatibility.machine import Machine
from moe_compile.errors import OptionError, ReportError
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec

if TYPE_CHECKING:
    from moe_compile.compatibility.matrix import Matrix


@dataclass(frozen=True, eq=False)
class MeasuredRules:
    """The documented rules, lifted or tightened cell by cell.

    A cell that worked lifts the reasons that stood against that very cell, and no others: a block whose weights are
    quantised, or whose token count is symbolic, has reasons that the measured block had not. A cell that failed or gave
    wrong numbers becomes a reason. A cell that ran out of time says nothing.

    Attributes:
        outcomes: what happened, by cell.
        device_type: of the device that was measured; blocks on another one keep the documented rules.
        source: the file.
    """

    outcomes: dict[Key, Outcome]
    device_type: str
    source: str

    def __call__(self, name: str, spec: ExpertsSpec, situation: Situation, reasons: tuple[str, ...]) -> tuple[str, ...]:
        """The reasons that count for a block; a `moe_compile.rules.Override`."""
        if situation.device_type != self.device_type or spec.weight_dtype is None:
            return reasons
        dtype = str(spec.weight_dtype).removeprefix("torch.")
        key = Key(name, situation.settings.mode, dtype, situation.fullgraph, situation.training)
        if key not in self.outcomes or situation.settings.options:  # Inductor options were not measured
            return reasons
        lifted = reasons_against(key, small_block.SPEC, situation)
        return self._with_measurement(key, reasons, lifted)

    def judge(self, key: Key, documented: tuple[str, ...]) -> tuple[str, ...]:
        """The reasons that count for a cell of a matrix."""
        return self._with_measurement(key, documented, documented)

    def _with_measurement(self, key: Key, reasons: tuple[str, ...], liftable: tuple[str, ...]) -> tuple[str, ...]:
        outcome = self.outcomes.get(key)
        if outcome is None or outcome.kind == "timeout":
            return reasons
        if outcome.kind == "ok":
            return tuple(reason for reason in reasons if reason not in liftable)
        measured = f"measured on this machine: {outcome.kind}, {outcome.message}"
        return reasons or (measured,)


def measured_rules(rules: str | os.PathLike[str]) -> MeasuredRules:
    """Reads the measurement that `rules` names.

    Args:
        rules: "measured" for what `moe-compile matrix --measure` left on this machine, or the path of a matrix.

    Raises:
        OptionError: if nothing was measured here, or `rules` is an unknown word.
        ReportError: if the file cannot be read, or was measured on another machine or with other versions.
    """
    from moe_compile.compatibility.matrix import Matrix  # which imports this module

    if rules == "measured":
        found = [path for path in map(storage.measured_path, _machines()) if path.exists()]
        if not found:
            raise OptionError(
                "rules='measured'",
                "nothing was measured on this machine with these versions yet",
                "Run `moe-compile matrix --measure`, or name a matrix file",
            )
        return _of(Matrix.load(found[0]), found[0])
    path = Path(rules)
    if not path.suffix:
        raise OptionError(f"rules={rules!r}", "there are no such rules", 'Use "documented", "measured" or a file')
    matrix = Matrix.load(path)
    here = [machine.identity for machine in _machines()]
    if matrix.machine.identity not in here:
        raise ReportError(
            f"rules={str(rules)!r}",
            f"it was measured on {matrix.machine.identity!r}, this machine is {here[0]!r}",
            "A measurement holds where it was made; run `moe-compile matrix --measure` here",
        )
    return _of(matrix, path)


def _machines() -> list[Machine]:
    """This machine by its devices, the accelerator first."""
    import torch

    return [Machine.here(kind) for kind in (["cuda"] if torch.cuda.is_available() else []) + ["cpu"]]


def _of(matrix: "Matrix", path: Path) -> MeasuredRules:
    outcomes = {cell.key: cell.outcome for cell in matrix.cells if cell.outcome is not None}
    return MeasuredRules(outcomes, matrix.machine.device_type, str(path))
