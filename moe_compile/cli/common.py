"""What the commands share: exit codes, common options, output."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DONE, UNSATISFIED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130

Commands = Any  # argparse's type for a group of commands is private


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], summary: str, examples: str
) -> argparse.ArgumentParser:
    """A command with its help and examples."""
    made: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(run=run)
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def add_model(command: argparse.ArgumentParser) -> None:
    """The model, as `module:function`."""
    command.add_argument("model", help="module:function or file.py:function that returns (model, arguments)")


def add_compile_options(command: argparse.ArgumentParser) -> None:
    """What `torch.compile` and `backend()` would get."""
    command.add_argument("--experts", default="auto", help="experts backend (default: auto)")
    command.add_argument("--mode", type=mode, default=None, help="compile mode (default: none)")


def mode(text: str) -> str | None:
    """A compile mode as typed; "none" is the default one."""
    return None if text.lower() in ("none", "default") else text


def print_json(data: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(data, indent=1))


def deliver(text: str, output: str | None) -> None:
    """Prints a text, or writes it to a file, whole or not at all."""
    if output is None:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    from moe_compile.files import write_atomically

    write_atomically(Path(output), text)
    print(f"wrote {output}", file=sys.stderr)
