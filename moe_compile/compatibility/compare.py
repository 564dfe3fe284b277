"""What changed between two matrices: machines, versions, verdicts, outcomes, times."""

from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from moe_compile.compatibility.cells import Cell, Key
from moe_compile.compatibility.matrix import Matrix
from moe_compile.compatibility.tables import happened, verdict

# Times that differ by less are noise.
_FACTOR = 1.25


@dataclass(frozen=True)
class Change:
    """One cell that is not what it was.

    Attributes:
        key: the cell.
        before: verdict and outcome in the first matrix, "" where it has no such cell.
        after: the same of the second.
        what: "added", "removed", "rule", "outcome" or "time".
        ratio: time after over time before, None where either is missing.
    """

    key: Key
    before: str
    after: str
    what: str
    ratio: float | None


@dataclass(frozen=True)
class Comparison:
    """Two matrices side by side; `str()` of it is the text form.

    Attributes:
        machines: what differs between the machines: name -> (before, after).
        changes: the cells that changed.
        same: how many cells did not change.
    """

    machines: dict[str, tuple[str, str]]
    changes: tuple[Change, ...]
    same: int

    def __str__(self) -> str:
        return self.to_table("simple")

    def to_table(self, style: str) -> str:
        """A table in one of tabulate's styles."""
        parts = [tabulate([(k, *v) for k, v in self.machines.items()], ["", "before", "after"], tablefmt=style)]
        if self.changes:
            rows = [
                (str(c.key), c.what, c.before, c.after, f"{c.ratio:.2f}" if c.ratio is not None else "")
                for c in self.changes
            ]
            header = ["cell", "changed", "before", "after", "time ratio"]
            parts.append(tabulate(rows, header, tablefmt=style, disable_numparse=True))
        parts.append(f"{len(self.changes)} cells changed, {self.same} did not")
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for JSON."""
        return asdict(self)


def compare(before: Matrix, after: Matrix) -> Comparison:
    """What changed from one matrix to another.

    A cell that was measured in only one of them changed only if its rule did. Times count as changed from a factor of
    1.25 on.
    """
    old, new = ({cell.key: cell for cell in matrix.cells} for matrix in (before, after))
    changes = [_change(key, old.get(key), new.get(key)) for key in dict.fromkeys((*old, *new))]
    found = tuple(change for change in changes if change is not None)
    return Comparison(_machines(before, after), found, len(changes) - len(found))


def _change(key: Key, old: Cell | None, new: Cell | None) -> Change | None:
    if old is None or new is None:
        return Change(key, _said(old), _said(new), "added" if old is None else "removed", None)
    ratio, what = None, None
    if bool(old.rule) != bool(new.rule):
        what = "rule"
    if old.outcome is not None and new.outcome is not None:
        if old.outcome.microseconds and new.outcome.microseconds:
            ratio = new.outcome.microseconds / old.outcome.microseconds
        if (old.outcome.kind, old.outcome.ran) != (new.outcome.kind, new.outcome.ran):
            what = what or "outcome"
        elif ratio is not None and not 1 / _FACTOR < ratio < _FACTOR:
            what = what or "time"
    return Change(key, _said(old), _said(new), what, ratio) if what is not None else None


def _said(cell: Cell | None) -> str:
    if cell is None:
        return ""
    ran = cell.outcome.ran if cell.outcome is not None else ""
    return ", ".join(part for part in (verdict(cell), happened(cell), ran) if part)


def _machines(before: Matrix, after: Matrix) -> dict[str, tuple[str, str]]:
    old, new = ({"device": matrix.machine.device, **matrix.machine.versions} for matrix in (before, after))
    old["measured"], new["measured"] = before.date, after.date
    names = dict.fromkeys((*old, *new))
    pairs = {name: (old.get(name, "-"), new.get(name, "-")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
