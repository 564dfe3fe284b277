"""Writes the shipped tables into docs/backends/auto.md, behind its marker.

python benchmarks/auto_page.py
"""

from pathlib import Path

from moe_compile.tables import read_table, shipped_files
from moe_compile.tune import render

PAGE = Path(__file__).parents[1] / "docs" / "backends" / "auto.md"
MARKER = "<!-- tables -->\n"


def page(text: str) -> str:
    """The page with the tables of today's data."""
    parts = [text.partition(MARKER)[0] + MARKER]
    for path in shipped_files():
        table = read_table(path)
        assert table is not None, path
        versions = ", ".join(f"{name} {version}" for name, version in table.versions.items())
        parts.append(f"\n### {table.device}\n\n{table.date}, {versions}.\n\n{render(table, 'github')}\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
