"""Reading and writing matrices: atomically, with a format version, and where this machine's measurements are kept."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_compile.compatibility.cells import Cell, Key, Outcome
from moe_compile.compatibility.machine import Machine
from moe_compile.errors import ReportError
from moe_compile.tables import cache_directory

FORMAT, VERSION = "moe_compile.matrix", 1


def measured_path(machine: Machine) -> Path:
    """Where the measured matrix of a machine is kept; another version of torch has another file."""
    safe = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in machine.identity)
    return cache_directory() / "matrix" / f"{safe}.json"


def cell_to_dict(cell: Cell) -> dict[str, Any]:
    """For JSON."""
    outcome = None if cell.outcome is None else asdict(cell.outcome)
    return {**asdict(cell.key), "documented": list(cell.documented), "rule": list(cell.rule), "outcome": outcome}


def cell_from_dict(data: dict[str, Any]) -> Cell:
    """The inverse of `cell_to_dict`."""
    key = Key(data["experts"], data["mode"], data["dtype"], data["fullgraph"], data["training"])
    outcome = None if data["outcome"] is None else Outcome(**data["outcome"])
    return Cell(key, tuple(data["documented"]), tuple(data["rule"]), outcome)


def read_json(path: Path) -> dict[str, Any]:
    """The contents of a matrix file, checked for format and version.

    Raises:
        ReportError: if there is no such file, or it holds something else, or a later version of it.
    """
    asked = f"matrix {str(path)!r}"
    remedy = "Write one with `moe-compile matrix --measure --output FILE.json`"
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ReportError(asked, f"{error.strerror or error}", remedy) from error
    except ValueError as error:
        raise ReportError(asked, f"it is no JSON: {error}", remedy) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ReportError(asked, "this is no matrix of moe_compile", remedy)
    if data.get("version") != VERSION:
        raise ReportError(asked, f"it has version {data.get('version')}, this is version {VERSION}", "Measure it again")
    return data
