"""`moe-compile doctor`."""

import argparse

from moe_compile.cli.common import DONE, UNSATISFIED, Commands, add_command, deliver, print_json

_EXAMPLES = """\
  moe-compile doctor
  moe-compile doctor --json
"""


def add_to(commands: Commands) -> None:
    """Adds the command."""
    summary = "versions, devices, which experts backends are usable here and what each missing one needs"
    add_command(commands, "doctor", _run, summary, _EXAMPLES)


def _run(arguments: argparse.Namespace) -> int:
    from moe_compile.diagnosis import diagnose

    found = diagnose()
    if arguments.json:
        print_json(found.to_dict())
    else:
        deliver(str(found), None)
    return DONE if found.healthy else UNSATISFIED
