"""Turns what `benchmarks/experts_block.py` measured into a table that `auto` reads.

    python benchmarks/table_from_benchmark.py docs/measured/FILE.json moe_compile/measured/h200.json

Transformers' `grouped_mm` and `batched_mm` under `torch.compile` stand for ours where ours were not measured: they are
the same operators. `call` and `graph` become entries of their own.
"""

import argparse
import json
from pathlib import Path

import moe_compile
from moe_compile.tables import BlockSize, Measurement, Table, write_table

SHAPES = {"qwen3": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336), "deepseek_v3": (256, 8, 7168, 2048)}
OURS = ("grouped_mm", "batched_mm", "triton", "deepgemm", "sonicmoe")


def convert(record: dict) -> Table:
    """The table of a record of experts_block.py."""
    entries: dict[tuple[str, bool, bool], dict[int, dict[str, float]]] = {}
    # Peers first, so that our own times replace theirs.
    for row in sorted(record["rows"], key=lambda row: not row["experts"].startswith("hf ")):
        name = row["experts"].removeprefix("hf ")
        for column, cuda_graphs in (("call", False), ("graph", True)):
            if name in OURS and row.get(column) is not None and row["shape"] in SHAPES:
                key = row["shape"], bool(row.get("training", False)), cuda_graphs
                entries.setdefault(key, {}).setdefault(row["T"], {})[name] = round(row[column], 1)
    measurements = [
        Measurement(BlockSize(*SHAPES[shape], "bfloat16"), training, cuda_graphs, dict(sorted(times.items())))
        for (shape, training, cuda_graphs), times in sorted(entries.items())
    ]
    versions = {"torch": record["versions"]["torch"], "triton": record["versions"]["triton"]}
    versions["moe_compile"] = moe_compile.__version__
    return Table(record["device"], "cuda", (9, 0), record["date"], versions, tuple(measurements))


def main() -> None:
    """Reads one file and writes the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("table", type=Path)
    arguments = parser.parse_args()
    write_table(convert(json.loads(arguments.record.read_text())), arguments.table)


if __name__ == "__main__":
    main()
