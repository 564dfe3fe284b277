"""Writes the pages of docs/measured from the data that lies beside them.

    python docs/measured/generate.py

A test keeps pages and data equal.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from moe_compile.compatibility.matrix import Matrix
from moe_compile.compatibility.tables import footnotes

HERE = Path(__file__).parent
_NOTE = "This page is generated from [{file}]({file}) by `docs/measured/generate.py`."
_COLOURS = ("#3b6fb6", "#e08a2e", "#5a9e57", "#a05195", "#8c8c8c")


def pages() -> Iterator[tuple[str, str]]:
    """(file name, content) of every generated page and picture."""
    for path in sorted(HERE.glob("matrix-*.json")):
        matrix = Matrix.load(path)
        yield f"{path.stem}.html", matrix.to_html()
        yield f"{path.stem}.md", _matrix_page(path, matrix)
    for path in sorted(HERE.glob("experts-block-*.json")):
        data = json.loads(path.read_text())
        for shape in dict.fromkeys(row["shape"] for row in data["rows"]):
            yield f"{path.stem}-{shape}.svg", _bars(shape, [row for row in data["rows"] if row["shape"] == shape])
        yield f"{path.stem}.md", _block_page(path, data)


def _matrix_page(path: Path, matrix: Matrix) -> str:
    disagreements = len(matrix.disagreements)
    lines = [
        f"# Compatibility on {matrix.machine.label}, torch {matrix.machine.versions['torch']}",
        "",
        _NOTE.format(file=path.name),
        f"The same with colours, and reasons on hover: [{path.stem}.html]({path.stem}.html).",
        "",
        f"{len(matrix.cells)} cells, each run in a process of its own. In {disagreements} of them the documented rule "
        f"and what happened disagree, for {len(footnotes(matrix))} reasons. The machine was busy with other work at "
        "the same time: a time says that a cell runs, and is no benchmark.",
        "",
        matrix.to_github(),
    ]
    return "\n".join(lines)


def _block_page(path: Path, data: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [
        f"# One experts block on {data['device']}",
        "",
        _NOTE.format(file=path.name),
        "",
        f"{versions}, {data['date']}; bf16, random routing, cold L2. Times are microseconds of the compiled call as a "
        "user makes it. `floor` is the least time that memory bandwidth and matmul rate allow.",
    ]
    for shape in dict.fromkeys(row["shape"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["shape"] == shape]
        names = list(dict.fromkeys(row["experts"] for row in rows))
        lines += ["", f"## {shape}", "", f"![share of the hardware's limit, {shape}]({path.stem}-{shape}.svg)", ""]
        lines += ["| T | floor | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 2)]
        for tokens in sorted({row["T"] for row in rows}):
            found = {row["experts"]: row for row in rows if row["T"] == tokens}
            times = [f"{found[name]['call']:.0f}" if name in found else "" for name in names]
            floor = next(iter(found.values()))["floor"]
            lines.append(f"| {tokens} | {floor:.0f} | " + " | ".join(times) + " |")
    return "\n".join(lines) + "\n"


def _bars(shape: str, rows: list[dict]) -> str:
    """Bars of floor / time: the share of the hardware's limit that a call reaches."""
    names = list(dict.fromkeys(row["experts"] for row in rows))
    counts = sorted({row["T"] for row in rows})
    share = {(row["experts"], row["T"]): row["floor/call"] for row in rows}
    bar, gap, height, left, top = 18, 26, 200, 48, 34
    group = bar * len(names) + gap
    width = max(left + group * len(counts) + 20, left + 150 * len(names))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + height + 48}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="floor over time, {shape}">',
        f'<rect width="{width}" height="{top + height + 48}" fill="#fff"/>',
    ]
    for index, name in enumerate(names):
        parts.append(f'<rect x="{left + 150 * index}" y="8" width="12" height="12" fill="{_COLOURS[index]}"/>')
        parts.append(f'<text x="{left + 150 * index + 18}" y="18" fill="#222">{name}</text>')
    for tick in range(0, 11, 2):
        y = top + height * (1 - tick / 10)
        parts.append(f'<line x1="{left}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#222">{tick / 10:.1f}</text>')
    for place, tokens in enumerate(counts):
        x = left + gap / 2 + place * group
        for index, name in enumerate(names):
            value = min(share.get((name, tokens), 0), 1)
            y = top + height * (1 - value)
            if value:
                parts.append(
                    f'<rect x="{x + bar * index:.1f}" y="{y:.1f}" width="{bar - 2}" height="{height * value:.1f}" '
                    f'fill="{_COLOURS[index]}"><title>{name}, T={tokens}: {value:.2f}</title></rect>'
                )
        middle = x + bar * len(names) / 2
        parts.append(
            f'<text x="{middle:.1f}" y="{top + height + 18}" text-anchor="middle" fill="#222">T={tokens}</text>'
        )
    parts.append(f'<text x="{left}" y="{top + height + 38}" fill="#222">floor / time of a call, 1 is the limit</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    for name, content in pages():
        (HERE / name).write_text(content)
