"""`moe-compile explain`."""

import argparse

from moe_compile.cli.common import (
    DONE,
    UNSATISFIED,
    Commands,
    add_command,
    add_compile_options,
    add_model,
    deliver,
    print_json,
)

_EXAMPLES = """\
  moe-compile explain models.py:tiny
  moe-compile explain models.py:tiny --experts grouped_mm --mode reduce-overhead
  moe-compile explain package.models:tiny --json
  moe-compile explain models.py:tiny --html --output report.html
"""


def add_to(commands: Commands) -> None:
    """Adds the command."""
    summary = "what is found in a model, what runs it, and why not something else"
    command = add_command(commands, "explain", _run, summary, _EXAMPLES)
    add_model(command)
    add_compile_options(command)
    command.add_argument("--training", action="store_true", help="with gradients")
    command.add_argument("--html", action="store_true", help="as a page")
    command.add_argument("--output", help="file to write instead of printing")


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from moe_compile.compatibility.subject import call_model_function
    from moe_compile.explain import explain

    model, args, kwargs = call_model_function(arguments.model)
    with torch.set_grad_enabled(arguments.training):
        found = explain(model, *args, backend=arguments.experts, mode=arguments.mode, **kwargs)
    if arguments.json:
        print_json(found.to_dict())
    else:
        deliver(found.to_html() if arguments.html else str(found), arguments.output)
    return UNSATISFIED if found.error is not None else DONE
