"""What moe_compile costs against `torch.compile` alone, on the same model set to transformers' grouped_mm.

    python benchmarks/overhead.py [--layers N] [--rounds N] [--dtype bfloat16] [--json FILE]

Prints two ratios from one run: time to compile (cold caches, each compilation in a process of its own, both sides by
turns) and time per call. Below 1 means that moe_compile is cheaper.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from tabulate import tabulate

SIDES = ("torch.compile", "moe_compile")


def measure(side: str, layers: int, dtype: str, device: str) -> dict[str, float]:
    """Compiles a model of `layers` layers in this process; seconds to compile and seconds per call."""
    import moe_compile

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).to(device, getattr(torch, dtype)).eval()
    model.set_experts_implementation("grouped_mm")
    ids = torch.randint(1024, (1, 64), device=device)
    backend = "inductor" if side == "torch.compile" else moe_compile.backend("grouped_mm")
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def call() -> None:
        compiled(input_ids=ids, use_cache=False)
        if device == "cuda":
            torch.cuda.synchronize()

    with torch.no_grad():
        start = time.perf_counter()
        call()
        compile_seconds = time.perf_counter() - start
        for _ in range(5):
            call()
        times = []
        for _ in range(100):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return {"compile": compile_seconds, "call": statistics.median(times)}


def in_a_process_of_its_own(side: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Runs `measure` in a new interpreter with an empty compile cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--side", side, "--layers", str(arguments.layers)]
        command += ["--dtype", arguments.dtype, "--device", arguments.device]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    """Measures both sides by turns and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(measure(arguments.side, arguments.layers, arguments.dtype, arguments.device)))
        return

    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for round_ in range(arguments.rounds):
        for side in SIDES if round_ % 2 == 0 else reversed(SIDES):
            runs[side].append(in_a_process_of_its_own(side, arguments))
            print(side, runs[side][-1], file=sys.stderr, flush=True)
    rows = []
    for what, unit, scale in (("compile", "s", 1), ("call", "us", 1e6)):
        base, ours = (statistics.median(run[what] for run in runs[side]) * scale for side in SIDES)
        rows.append({"what": f"{what} [{unit}]", SIDES[0]: base, SIDES[1]: ours, "ratio": ours / base})
    print(tabulate(rows, headers="keys", floatfmt=".3g"))
    if arguments.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        setting = {"layers": arguments.layers, "dtype": arguments.dtype, "device": arguments.device}
        record = {"date": datetime.date.today().isoformat(), "versions": versions, "setting": setting, "rows": rows}
        arguments.json.write_text(json.dumps({**record, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
