"""`moe_compile.matrix(...)`: experts backends x compile modes x dtypes x fullgraph, by rule and by measurement."""

import datetime
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moe_compile.backend import device_situation
from moe_compile.compatibility import small_block, storage
from moe_compile.compatibility.cells import Cell, Key, reasons_against
from moe_compile.compatibility.machine import Machine
from moe_compile.compatibility.measured_rules import MeasuredRules, measured_rules
from moe_compile.compatibility.runner import Runner, progress_bar
from moe_compile.errors import OptionError, ReportError, UnknownBackendError
from moe_compile.experts_backends import EXPERTS_BACKENDS
from moe_compile.files import write_atomically
from moe_compile.modes import CompileSettings, nearest, resolve_settings
from moe_compile.rules import Situation

MODES = (None, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Matrix:
    """A compatibility matrix; `str()` of it is the text form.

    Attributes:
        machine: device and versions that it speaks of.
        date: when it was made, as YYYY-MM-DD.
        subject: what was measured: "small block", or `module:function`.
        cells: one per combination.
    """

    machine: Machine
    date: str
    subject: str
    cells: tuple[Cell, ...]

    @property
    def disagreements(self) -> tuple[Cell, ...]:
        """The cells where documentation, rule and reality are not of one opinion."""
        return tuple(cell for cell in self.cells if cell.disagreement is not None)

    @property
    def measured(self) -> bool:
        """Whether any cell was run."""
        return any(cell.outcome is not None for cell in self.cells)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_text(self) -> str:
        """For a terminal."""
        from moe_compile.compatibility.tables import to_text

        return to_text(self)

    def to_github(self) -> str:
        """GitHub's markdown, with footnotes."""
        from moe_compile.compatibility.tables import to_github

        return to_github(self)

    def to_html(self) -> str:
        """One self-contained page."""
        from moe_compile.compatibility.page import to_html

        return to_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, with the format's name and version."""
        return {
            "format": storage.FORMAT,
            "version": storage.VERSION,
            "date": self.date,
            "machine": self.machine.to_dict(),
            "subject": self.subject,
            "cells": [storage.cell_to_dict(cell) for cell in self.cells],
        }

    def to_json(self) -> str:
        """`to_dict()` as text, one cell a line."""
        data = self.to_dict()
        cells = ",\n  ".join(json.dumps(cell) for cell in data.pop("cells"))
        return json.dumps(data, indent=1).removesuffix("\n}") + f',\n "cells": [\n  {cells}\n ]\n}}\n'

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON form, whole or not at all.

        Raises:
            ReportError: if it cannot be written.
        """
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Matrix":
        """Reads what `save()` wrote.

        Raises:
            ReportError: if it cannot be read, or is no matrix of this version.
        """
        data = storage.read_json(Path(path))
        try:
            cells = tuple(storage.cell_from_dict(cell) for cell in data["cells"])
            return cls(Machine.from_dict(data["machine"]), data["date"], data["subject"], cells)
        except (KeyError, TypeError) as error:
            raise ReportError(f"matrix {str(path)!r}", f"a part is missing: {error}", "Measure it again") from error


def matrix(
    experts: Sequence[str] | None = None,
    *,
    modes: Sequence[str | None] = MODES,
    dtypes: Sequence[str | torch.dtype] = DTYPES,
    fullgraph: Sequence[bool] = (False, True),
    training: Sequence[bool] = (False,),
    device: str | None = None,
    rules: str | os.PathLike[str] = "documented",
    measure: bool = False,
    model: str | None = None,
    timeout: float = 300.0,
    jobs: int = 1,
    output: str | os.PathLike[str] | None = None,
    resume: bool = True,
    progress: bool = False,
) -> Matrix:
    """Says for each combination whether the rules allow it and, if asked, what really happens on this machine.

    Args:
        experts: names of experts backends; all that are registered by default.
        modes: compile modes, None for the default one.
        dtypes: of weights and activations.
        fullgraph: the values to try.
        training: the values to try; True computes gradients of every input and weight.
        device: "cpu" or "cuda"; CUDA by default where there is one.
        rules: the rules in force, as for `backend(rules=...)`; the documented ones are always shown as well.
        measure: run every cell, each in a process of its own, also those that the rule forbids.
        model: measure the model that `module:function` returns, together with its arguments, instead of a small block
            of 8 experts, top-2, D=128, F=96 and 32 tokens.
        timeout: seconds that one cell may take.
        jobs: cells that compile at the same time; they are timed one by one.
        output: file for the JSON form. A run that was interrupted leaves none; what it had measured is kept beside it
            (or in the cache folder) and a later run with the same arguments goes on from there.
        resume: False measures everything again.
        progress: show a progress bar on standard error.

    Returns:
        The matrix. One of the small block also becomes this machine's measurement, which
        `backend(..., rules="measured")` reads.

    Raises:
        UnknownBackendError, OptionError: for a name, mode, dtype or device that does not exist.
        ModelFunctionError: if `model` gives no model that runs uncompiled.
        ReportError: if the output cannot be written.
    """
    machine = Machine.here(device)
    keys = [
        Key(*combination)
        for combination in itertools.product(
            _experts(experts), _modes(modes), _dtypes(dtypes), dict.fromkeys(fullgraph), dict.fromkeys(training)
        )
    ]
    if not keys:
        raise OptionError("matrix(...)", "one of its axes is empty", "Leave an axis out to get all of it")
    override = measured_rules(rules) if rules != "documented" else None
    situation = _situation(machine)
    cells = [_cell(key, situation, override) for key in keys]
    made = Matrix(machine, datetime.date.today().isoformat(), model or "small block", tuple(cells))
    if measure:
        made = _measured(made, Path(output) if output else None, timeout, jobs, resume, progress)
    if output is not None:
        made.save(output)
    return made


def _measured(made: Matrix, output: Path | None, timeout: float, jobs: int, resume: bool, progress: bool) -> Matrix:
    kept = storage.measured_path(made.machine)
    journal = (output or kept).with_suffix(".partial")
    known = _resumed(journal, made) if resume else {}
    model = None if made.subject == "small block" else made.subject
    write_atomically(journal, made.to_json())  # fails now, not after an hour
    cells = {cell.key: replace(cell, outcome=known.get(cell.key)) for cell in made.cells}
    missing = [key for key, cell in cells.items() if cell.outcome is None]
    with progress_bar(len(cells), len(cells) - len(missing), progress) as show:
        for key, outcome in Runner(made.machine.device_type, model, timeout, jobs).run(missing):
            cells[key] = replace(cells[key], outcome=outcome)
            write_atomically(journal, replace(made, cells=tuple(cells.values())).to_json())
            show(key, outcome)
    made = replace(made, cells=tuple(cells.values()))
    if model is None:
        _keep(made, kept)
    if output is not None:
        made.save(output)
    journal.unlink(missing_ok=True)
    return made


def _resumed(journal: Path, made: Matrix) -> dict[Key, Any]:
    """Outcomes that an interrupted run of the same subject on the same machine has left."""
    if not journal.exists():
        return {}
    earlier = Matrix.load(journal)
    if earlier.machine.identity != made.machine.identity or earlier.subject != made.subject:
        return {}
    return {cell.key: cell.outcome for cell in earlier.cells if cell.outcome is not None}


def _keep(made: Matrix, path: Path) -> None:
    """Makes a matrix this machine's measurement, over an earlier one's cells."""
    cells = {cell.key: cell for cell in Matrix.load(path).cells} if path.exists() else {}
    cells.update({cell.key: cell for cell in made.cells})
    replace(made, cells=tuple(cells.values())).save(path)


def _cell(key: Key, situation: Situation, override: MeasuredRules | None) -> Cell:
    documented = reasons_against(key, small_block.SPEC, situation)
    rule = documented if override is None else override.judge(key, documented)
    return Cell(key, documented, rule)


def _situation(machine: Machine) -> Situation:
    return device_situation(torch.device(machine.device_type), CompileSettings(), fullgraph=False, training=False)


def _experts(names: Sequence[str] | None) -> list[str]:
    known = list(EXPERTS_BACKENDS)
    for name in names or ():
        if name not in known:
            raise UnknownBackendError(
                f"experts={name!r}",
                f"there is no such experts backend{nearest(name, known)}",
                f"Use some of {', '.join(known)}",
            )
    return list(dict.fromkeys(known if names is None else names))


def _modes(modes: Sequence[str | None]) -> list[str | None]:
    return list(dict.fromkeys(resolve_settings(mode, None).mode for mode in modes))


def _dtypes(dtypes: Sequence[str | torch.dtype]) -> list[str]:
    known = (*DTYPES, "float64")
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    for name in names:
        if name not in known:
            raise OptionError(
                f"dtype={name!r}", f"matrices know no such dtype{nearest(name, list(known))}", f"Use {', '.join(known)}"
            )
    return list(dict.fromkeys(names))
