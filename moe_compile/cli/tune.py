"""`moe-compile tune`: the measurements that `auto` chooses by."""

import argparse

from moe_compile.cli.common import Commands

_SUMMARY = "measure what auto chooses by, for this device and the blocks of your models"

_EXAMPLES = """\
  moe-compile tune
  moe-compile tune --shapes 128,8,2048,768 --tokens 1 64 1024 --training
"""


def add_to(commands: Commands) -> None:
    """Adds the command; its options are the tuner's own, which is imported when the command runs."""
    command = commands.add_parser("tune", help=_SUMMARY, add_help=False, prefix_chars="\0")
    command.add_argument("rest", nargs=argparse.REMAINDER)
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import contextlib
    import json
    import sys

    from moe_compile import tune

    parser = argparse.ArgumentParser(
        prog="moe-compile tune",
        description=f"{_SUMMARY[0].upper()}{_SUMMARY[1:]}.",
        epilog=f"examples:\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tune.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the file that was written, as JSON")
    chosen = parser.parse_args(arguments.rest)
    if not chosen.json:
        return tune.run(chosen)
    with contextlib.redirect_stdout(sys.stderr):
        code = tune.run(chosen)
    from moe_compile.tables import cache_file, device_name

    path = chosen.out or cache_file(device_name(chosen.device or _default_device()))
    print(json.dumps(json.loads(path.read_text()), indent=1))
    return code


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
