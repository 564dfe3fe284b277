"""Files are written whole or not at all."""

import os
import tempfile
from pathlib import Path

from moe_compile.errors import ReportError


def write_atomically(path: Path, text: str) -> None:
    """Writes a whole file or nothing.

    Raises:
        ReportError: if the folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ReportError(f"writing {path}", f"{error.strerror or error}", "Name a file that can be written") from error
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise ReportError(f"writing {path}", f"{error.strerror or error}", "Name a file, not a folder") from error
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
