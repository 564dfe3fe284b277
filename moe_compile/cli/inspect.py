"""`moe-compile inspect`."""

import argparse

from moe_compile.cli.common import DONE, Commands, add_command, add_compile_options, add_model, print_json

_EXAMPLES = """\
  moe-compile inspect models.py:tiny --output dump             then open dump/index.html
  moe-compile inspect models.py:tiny --output dump --existing version --fullgraph
"""


def add_to(commands: Commands) -> None:
    """Adds the command."""
    summary = "dump what a compiled model becomes: graphs before and after, each pass's diff, the generated code"
    command = add_command(commands, "inspect", _run, summary, _EXAMPLES)
    add_model(command)
    add_compile_options(command)
    command.add_argument("--output", required=True, help="folder to write")
    command.add_argument(
        "--existing",
        choices=["error", "version", "replace"],
        default="version",
        help="where the folder holds something: refuse, write dump-2, or replace an earlier dump (default: version)",
    )
    command.add_argument("--fullgraph", action="store_true", help="as torch.compile takes it")
    command.add_argument("--training", action="store_true", help="with gradients")


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from moe_compile.backend import backend
    from moe_compile.compatibility.subject import call_model_function
    from moe_compile.inspection.inspect import inspect

    made = backend(arguments.experts)
    model, args, kwargs = call_model_function(arguments.model)
    with inspect(arguments.output, existing=arguments.existing) as dump, torch.set_grad_enabled(arguments.training):
        torch.compile(model, backend=made, mode=arguments.mode, fullgraph=arguments.fullgraph)(*args, **kwargs)
    if arguments.json:
        print_json(dump.to_dict())
    else:
        print(f"{len(dump.graphs)} graphs; open {dump.index}")
    return DONE
