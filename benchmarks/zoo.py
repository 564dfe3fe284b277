"""Every MoE model of transformers, tiny, under `torch.compile` with moe_compile: graphs, blocks rewritten, errors.

    python benchmarks/zoo.py [MODEL_TYPE ...] [--json FILE]

Each model is built with random weights, in fp32 and bf16, set to its own eager loop and to grouped_mm, and compiled
with `fullgraph=True` for "grouped_mm" and "batched_mm". A model that cannot be one graph is listed with the line.
"""

import argparse
import datetime
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from zoo import ZOO, build, check_model, experts_modules

DTYPES = (torch.float32, torch.bfloat16)
IMPLEMENTATIONS = ("eager", "grouped_mm")
EXPERTS = ("grouped_mm", "batched_mm")


def main() -> int:
    """Prints the table; returns 1 if a decorated experts block was not rewritten or a budget was exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", default=list(ZOO), metavar="MODEL_TYPE")
    parser.add_argument("--json", type=Path, help="where to write the outcomes")
    arguments = parser.parse_args()

    outcomes, failures = [], []
    for model_type in arguments.model_types:
        decorated = bool(experts_modules(build(model_type)[0]))
        for dtype in DTYPES:
            for implementation in IMPLEMENTATIONS if decorated else (None,):
                for experts in EXPERTS:
                    name = str(dtype).removeprefix("torch.")
                    row = {"model": model_type, "dtype": name, "from": implementation, "experts": experts}
                    try:
                        outcome = check_model(model_type, dtype, implementation, experts)
                        row |= asdict(outcome)
                        good = outcome.rewritten >= outcome.dressed and outcome.error <= outcome.budget
                    except Exception as error:  # one model's failure is a row of the table
                        row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                        good = False
                    outcomes.append(row)
                    if not good:
                        failures.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)

    print(tabulate([_row(outcome) for outcome in outcomes], headers="keys"))
    print(f"{len(outcomes)} runs, {len(failures)} failed")
    if arguments.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        date = datetime.date.today().isoformat()
        record = {"date": date, "device": "cpu", "versions": versions, "runs": outcomes}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return bool(failures)


def _row(outcome: dict) -> dict:
    """One line of the printed table."""
    if "failed" in outcome:
        return {key: outcome[key] for key in ("model", "dtype", "from", "experts")} | {"breaks at": outcome["failed"]}
    return {
        "model": outcome["model"],
        "dtype": outcome["dtype"],
        "from": outcome["from"] or "",
        "experts": outcome["experts"],
        "graphs": outcome["graphs"],
        "rewritten": f"{outcome['rewritten']}/{outcome['dressed']}",
        "error": f"{outcome['error']:.1e}",
        "budget": f"{outcome['budget']:.1e}",
        "breaks at": outcome["break_line"],
    }


if __name__ == "__main__":
    sys.exit(main())
