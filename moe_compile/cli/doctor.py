"""`moe-compile doctor`."""

import argparse

from moe_compile.cli.common import DONE, UNSATISFIED, Commands, add_command, deliver, print_json

_EXAMPLES = """\
  moe-compile doctor
  moe-compile doctor --load    load DeepGEMM and SonicMoE as well: from where, and in which version
  moe-compile doctor --json
"""


def add_to(commands: Commands) -> None:
    """Adds the command."""
    summary = "versions, devices, which experts backends are usable here and what each missing one needs"
    parser = add_command(commands, "doctor", _run, summary, _EXAMPLES)
    parser.add_argument("--load", action="store_true", help="load the kernels of other projects; may download them")


def _run(arguments: argparse.Namespace) -> int:
    from moe_compile.diagnosis import diagnose

    found = diagnose(load=arguments.load)
    if arguments.json:
        print_json(found.to_dict())
    else:
        deliver(str(found), None)
    return DONE if found.healthy else UNSATISFIED
