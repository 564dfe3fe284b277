"""A matrix as text for a terminal and as GitHub's markdown: a row per backend, dtype and flags, a column per mode."""

from typing import TYPE_CHECKING

from tabulate import tabulate

from moe_compile.compatibility.cells import Cell, Key

if TYPE_CHECKING:
    from moe_compile.compatibility.matrix import Matrix

Row = tuple[str, str, bool, bool]


def rows_of(matrix: "Matrix") -> tuple[list[str | None], dict[Row, dict[str | None, Cell]]]:
    """The compile modes, and for each row its cells by mode."""
    modes = list(dict.fromkeys(cell.key.mode for cell in matrix.cells))
    rows: dict[Row, dict[str | None, Cell]] = {}
    for cell in matrix.cells:
        rows.setdefault(_row(cell.key), {})[cell.key.mode] = cell
    backends = list(dict.fromkeys(row[0] for row in rows))
    return modes, dict(sorted(rows.items(), key=lambda item: backends.index(item[0][0])))


def footnotes(matrix: "Matrix") -> dict[str, list[Key]]:
    """Each explanation of a disagreement with the cells that it is about, in the order of their numbers."""
    notes: dict[str, list[Key]] = {}
    for cell in matrix.cells:
        if cell.disagreement is not None:
            notes.setdefault(cell.disagreement, []).append(cell.key)
    return notes


def reasons_of(matrix: "Matrix") -> list[tuple[str, str]]:
    """(experts backend, reason) for every reason of the rules in force, each once."""
    return list(dict.fromkeys((cell.key.experts, reason) for cell in matrix.cells for reason in cell.rule))


def verdict(cell: Cell) -> str:
    """What the rules in force say, in a word."""
    return "no" if cell.rule else "yes"


def happened(cell: Cell) -> str:
    """What was measured, in a few words, "" if nothing was."""
    outcome = cell.outcome
    if outcome is None:
        return ""
    if outcome.kind == "ok":
        return milliseconds(outcome.microseconds) if outcome.microseconds is not None else "ok"
    if outcome.kind == "wrong numbers" and outcome.relative_error is not None:
        return f"wrong by {outcome.relative_error:.1g}"
    return outcome.kind


def milliseconds(microseconds: float) -> str:
    """Three digits."""
    return f"{microseconds / 1000:.3g} ms"


def flags(row: Row) -> list[str]:
    """The cells before a row's verdicts."""
    experts, dtype, fullgraph, training = row
    return [experts, dtype, "yes" if fullgraph else "no", "training" if training else "inference"]


def where(keys: list[Key]) -> str:
    """Which cells a footnote is about, the common parts said once."""
    parts = []
    for name, values in (
        ("", [key.experts for key in keys]),
        ("mode=", [str(key.mode) for key in keys]),
        ("", [key.dtype for key in keys]),
        ("fullgraph=", [str(key.fullgraph) for key in keys]),
        ("", ["training" if key.training else "inference" for key in keys]),
    ):
        parts.append(name + "/".join(dict.fromkeys(values)))
    return " ".join(parts)


def to_text(matrix: "Matrix") -> str:
    """For a terminal."""
    numbers = {note: f"[{index}]" for index, note in enumerate(footnotes(matrix), 1)}
    parts = [_title(matrix), _table(matrix, numbers, "simple")]
    parts.append("\n".join(f"not {name}: {reason}" for name, reason in reasons_of(matrix)))
    notes = footnotes(matrix).items()
    parts.append("\n".join(f"{numbers[note]} {where(keys)}: {note}" for note, keys in notes))
    return "\n\n".join(part for part in parts if part)


def to_github(matrix: "Matrix") -> str:
    """GitHub's markdown."""
    numbers = {note: f"[^{index}]" for index, note in enumerate(footnotes(matrix), 1)}
    parts = [_title(matrix).replace("\n", "\n\n"), _table(matrix, numbers, "github")]
    parts.append("\n".join(f"- not `{name}`: {reason}" for name, reason in reasons_of(matrix)))
    notes = footnotes(matrix).items()
    parts.append("\n".join(f"{numbers[note]}: {where(keys)}: {_escaped(note)}" for note, keys in notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def legend(matrix: "Matrix") -> str:
    """How to read the cells."""
    if not matrix.measured:
        return "yes and no are what the rules say."
    return (
        "yes and no are what the rules say, then what happened: the median time of a call, or what went wrong. "
        "A number marks a cell where documentation, rule and reality disagree."
    )


def _title(matrix: "Matrix") -> str:
    return f"{matrix.machine}; {matrix.subject}; {matrix.date}\n{legend(matrix)}"


def _table(matrix: "Matrix", numbers: dict[str, str], style: str) -> str:
    modes, rows = rows_of(matrix)
    lines = [[*flags(row), *(_cell(cells.get(mode), numbers) for mode in modes)] for row, cells in rows.items()]
    header = ["experts", "dtype", "fullgraph", "", *(f"mode={mode}" for mode in modes)]
    return tabulate(lines, header, tablefmt=style, disable_numparse=True)


def _cell(cell: Cell | None, numbers: dict[str, str]) -> str:
    if cell is None:
        return ""
    mark = numbers.get(cell.disagreement or "", "")
    return ", ".join(part for part in (verdict(cell), happened(cell)) if part) + (f" {mark}" if mark else "")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _row(key: Key) -> Row:
    return key.experts, key.dtype, key.fullgraph, key.training
