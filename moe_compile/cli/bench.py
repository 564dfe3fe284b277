"""`moe-compile bench`."""

import argparse

from moe_compile.cli.common import DONE, Commands, add_command, deliver, mode, print_json

_EXAMPLES = """\
  moe-compile bench                                            one block of 8 experts, 64 tokens
  moe-compile bench --sizes E=128,K=8,D=2048,F=768,T=1024 --dtype bfloat16 --experts grouped_mm triton
  moe-compile bench --model models.py:tiny --mode reduce-overhead
"""


def add_to(commands: Commands) -> None:
    """Adds the command."""
    summary = "time of a call per experts backend, against the uncompiled model and torch.compile alone"
    command = add_command(commands, "bench", _run, summary, _EXAMPLES)
    command.add_argument("--model", help="module:function that returns (model, arguments) (default: one block)")
    command.add_argument("--sizes", default="", help="of the block, such as E=8,K=2,D=512,F=256,T=64")
    command.add_argument("--experts", nargs="+", help="experts backends (default: all that are allowed)")
    command.add_argument("--dtype", default="bfloat16")
    command.add_argument("--mode", type=mode, default=None, help="compile mode (default: none)")
    command.add_argument("--training", action="store_true", help="forward and backward")
    command.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    command.add_argument("--seconds", type=float, default=2.0, help="of timing per backend (default: 2)")


def _run(arguments: argparse.Namespace) -> int:
    from moe_compile.bench import bench

    found = bench(
        arguments.experts,
        model=arguments.model,
        sizes=arguments.sizes,
        dtype=arguments.dtype,
        mode=arguments.mode,
        training=arguments.training,
        device=arguments.device,
        seconds=arguments.seconds,
    )
    if arguments.json:
        print_json(found.to_dict())
    else:
        deliver(str(found), None)
    return DONE
