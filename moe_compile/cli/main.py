"""`moe-compile`: picks the command, turns errors into one line and an exit code."""

import argparse
import sys
from collections.abc import Sequence

from moe_compile import __version__
from moe_compile.cli import bench, doctor, explain, inspect, matrix, tune
from moe_compile.cli.common import DONE, INTERRUPTED, UNSATISFIED, UNUSABLE

_COMMANDS = (matrix, explain, inspect, doctor, bench, tune)

_EPILOG = f"""\
exit codes:
  {DONE}    done
  {UNSATISFIED}    done, and the answer is bad news: a model does not compile, an allowed cell fails, nothing is usable
  {UNUSABLE}    the input cannot be used; one line on standard error says why
  {INTERRUPTED}  interrupted

examples:
  moe-compile doctor
  moe-compile matrix --measure --format html --output matrix.html
  moe-compile explain models.py:tiny --experts grouped_mm
  moe-compile inspect models.py:tiny --output dump

A model is named module:function or file.py:function. The function takes no arguments and returns (model, arguments),
the arguments as a tuple or a mapping, or (model, args, kwargs).
"""


def parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    made = argparse.ArgumentParser(
        prog="moe-compile",
        description="torch.compile for Mixture-of-Experts models: what runs, what is allowed, and what really happens.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"moe-compile {__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_to(commands)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit code.
    """
    arguments = parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("\nmoe-compile: interrupted, nothing half written", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # piped into head
        sys.stderr.close()
        return DONE
    except Exception as error:
        from moe_compile.errors import MoeCompileError

        if not isinstance(error, MoeCompileError):
            raise
        print(f"moe-compile: {error}", file=sys.stderr)
        return UNUSABLE
