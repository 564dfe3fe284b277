"""The folder of a dump: made before anything is compiled, never mixed with what was there."""

import os
import shutil
from pathlib import Path
from typing import Literal

from moe_compile.errors import OptionError, ReportError
from moe_compile.modes import nearest

Existing = Literal["version", "error", "replace"]
EXISTING: tuple[Existing, ...] = ("version", "error", "replace")
REPORT = "report.json"


def make_folder(path: str | os.PathLike[str], existing: Existing) -> Path:
    """Makes an empty folder.

    Args:
        path: where.
        existing: what to do where something lies there already: "version" takes `path-2`, `path-3`, ...; "error"
            refuses; "replace" removes an earlier dump, and nothing else.

    Returns:
        The folder, absolute.

    Raises:
        OptionError: for an unknown word.
        ReportError: if the folder cannot be made or written, or holds something and `existing` does not help.
    """
    if existing not in EXISTING:
        raise OptionError(
            f"existing={existing!r}",
            f"there is no such choice{nearest(existing, list(EXISTING))}",
            f"Use one of {', '.join(EXISTING)}",
        )
    folder = Path(os.path.abspath(path))
    asked = f"inspect({str(path)!r})"
    if folder.exists() and not folder.is_dir():
        raise ReportError(asked, "this is a file", "Name a folder")
    try:
        if folder.is_dir() and any(folder.iterdir()):
            folder = _instead_of(folder, existing, asked)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ReportError(asked, f"{error.strerror or error}", "Name a folder that can be written") from error
    return folder


def _instead_of(folder: Path, existing: Existing, asked: str) -> Path:
    if existing == "version":
        number = 2
        while (versioned := folder.with_name(f"{folder.name}-{number}")).exists():
            number += 1
        return versioned
    if existing == "error":
        raise ReportError(asked, "the folder is not empty", 'Name another one, or pass existing="version" or "replace"')
    if not (folder / REPORT).exists():
        raise ReportError(asked, "what the folder holds is no dump of moe_compile", "Name another one")
    shutil.rmtree(folder)
    return folder


def safe_name(name: str) -> str:
    """A file name for any string: letters, digits and `._-`, never empty, never a path."""
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "_" for letter in name)
    return safe.lstrip(".")[:120] or "_"
