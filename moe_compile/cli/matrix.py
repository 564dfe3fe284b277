"""`moe-compile matrix`."""

import argparse

from moe_compile.cli.common import DONE, UNSATISFIED, Commands, add_command, deliver, mode, print_json

_EXAMPLES = """\
  moe-compile matrix                                          what the rules say, for this machine
  moe-compile matrix --measure --jobs 4                       and what really happens
  moe-compile matrix --measure --experts grouped_mm --dtypes bfloat16 --training both
  moe-compile matrix --measure --model models.py:tiny         on a model of yours
  moe-compile matrix --format html --output matrix.html       text, github, html or json
  moe-compile matrix --compare before.json after.json         what changed
"""

_FLAGS = {"both": (False, True), "yes": (True,), "no": (False,)}
_FORMATS = {"text": "simple", "github": "github"}  # and tabulate's name for each


def add_to(commands: Commands) -> None:
    """Adds the command."""
    summary = "what each experts backend can do: by rule and, with --measure, on this machine"
    command = add_command(commands, "matrix", _run, summary, _EXAMPLES)
    command.add_argument("--experts", nargs="+", help="experts backends (default: all)")
    command.add_argument("--modes", nargs="+", type=mode, help="compile modes, none for the default one")
    command.add_argument("--dtypes", nargs="+", help="such as bfloat16 float16 float32")
    command.add_argument("--fullgraph", choices=list(_FLAGS), default="both")
    command.add_argument("--training", choices=list(_FLAGS), default="no", help="forward and backward (default: no)")
    command.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    command.add_argument("--rules", default="documented", help="documented, measured, or a matrix file")
    command.add_argument("--measure", action="store_true", help="run every cell, each in a process of its own")
    command.add_argument("--model", help="measure what module:function returns instead of a small block")
    command.add_argument("--timeout", type=float, default=300.0, help="seconds a cell may take (default: 300)")
    command.add_argument("--jobs", type=int, default=1, help="cells that compile at once (default: 1)")
    command.add_argument("--fresh", action="store_true", help="do not go on from an interrupted run")
    command.add_argument("--format", choices=["text", "github", "html", "json"], default="text")
    command.add_argument("--output", help="file to write instead of printing")
    command.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="two JSON files; measures nothing")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        arguments.format = "json"
    if arguments.compare:
        return _compare(arguments)

    from moe_compile.compatibility.matrix import DTYPES, MODES, matrix

    made = matrix(
        arguments.experts,
        modes=arguments.modes or MODES,
        dtypes=arguments.dtypes or DTYPES,
        fullgraph=_FLAGS[arguments.fullgraph],
        training=_FLAGS[arguments.training],
        device=arguments.device,
        rules=arguments.rules,
        measure=arguments.measure,
        model=arguments.model,
        timeout=arguments.timeout,
        jobs=arguments.jobs,
        resume=not arguments.fresh,
        progress=arguments.measure,
    )
    form = {"text": made.to_text, "github": made.to_github, "html": made.to_html, "json": made.to_json}
    deliver(form[arguments.format](), arguments.output)
    failed = [cell for cell in made.cells if not cell.rule and cell.outcome is not None and cell.outcome.kind != "ok"]
    return UNSATISFIED if failed else DONE


def _compare(arguments: argparse.Namespace) -> int:
    from moe_compile.compatibility.compare import compare
    from moe_compile.compatibility.matrix import Matrix
    from moe_compile.errors import OptionError

    found = compare(*map(Matrix.load, arguments.compare))
    if arguments.format == "json":
        print_json(found.to_dict())
    elif arguments.format == "html":
        raise OptionError("--compare with --format html", "there is no such form", "Use text, github or json")
    else:
        deliver(found.to_table(_FORMATS[arguments.format]), arguments.output)
    return DONE
