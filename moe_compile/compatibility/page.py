"""A matrix as one self-contained HTML page: colours for verdicts, reasons on hover and, for keyboards, on focus."""

import html
from typing import TYPE_CHECKING

from moe_compile.compatibility.cells import Cell
from moe_compile.compatibility.tables import flags, footnotes, happened, legend, reasons_of, rows_of, verdict, where

if TYPE_CHECKING:
    from moe_compile.compatibility.matrix import Matrix

_STYLE = """
:root { color-scheme: light dark; --ok: #d3f0d8; --no: #ececf0; --bad: #f9d2d0; --odd: #fde9b8; --ink: #1c1c22;
  --line: #c9c9d2; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ok: #1d4a28; --no: #33333c; --bad: #6a211d; --odd: #5d4a10;
  --ink: #ececf2; --line: #4b4b57; --paper: #17171c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; } th, td { border: 1px solid var(--line); padding: .3rem .6rem; text-align: left;
  white-space: nowrap; }
thead th { position: sticky; top: 0; background: var(--paper); }
tr.first > * { border-top: 3px solid var(--line); }
td.ok { background: var(--ok); } td.no { background: var(--no); } td.bad { background: var(--bad); }
td.odd { background: var(--odd); }
td[tabindex] { position: relative; cursor: help; }
td[tabindex] .why { display: none; position: absolute; left: 0; top: 100%; z-index: 2; width: 26rem;
  max-width: 80vw; white-space: normal; background: var(--paper); border: 1px solid var(--line); padding: .5rem .7rem;
  box-shadow: 0 3px 12px #0004; }
td[tabindex]:hover .why, td[tabindex]:focus .why { display: block; }
td:nth-last-child(-n+2) .why { left: auto; right: 0; }
.key span { display: inline-block; padding: .1rem .5rem; margin: 0 .5rem .3rem 0; border: 1px solid var(--line); }
sup a { text-decoration: none; }
"""


def to_html(matrix: "Matrix") -> str:
    """One page without a reference to anything outside it."""
    title = f"moe_compile matrix: {matrix.machine.device}"
    numbers = {note: index for index, note in enumerate(footnotes(matrix), 1)}
    notes = "".join(
        f'<li id="note-{numbers[note]}"><b>{html.escape(where(keys))}</b>: {html.escape(note)}</li>'
        for note, keys in footnotes(matrix).items()
    )
    reasons = "".join(
        f"<li><code>{html.escape(name)}</code>: {html.escape(reason)}</li>" for name, reason in reasons_of(matrix)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(str(matrix.machine))}<br>{html.escape(matrix.subject)}, {html.escape(matrix.date)}</p>
<p>{html.escape(legend(matrix))} Point at a cell, or move to it with the tab key, for its reasons.</p>
<p class="key">{_key(matrix)}</p>
<div class="scroll">
{_table(matrix, numbers)}
</div>
{f"<h2>Why not</h2><ul>{reasons}</ul>" if reasons else ""}
{f"<h2>Where documentation, rule and reality disagree</h2><ol>{notes}</ol>" if notes else ""}
</body>
</html>
"""


def _key(matrix: "Matrix") -> str:
    meanings = {"ok": "allowed", "no": "not allowed"}
    if matrix.measured:
        meanings = {"ok": "allowed, and works", "no": "not allowed, and fails"}
        meanings |= {"odd": "not allowed, yet works", "bad": "allowed, yet fails"}
    style = "background: var(--{})"
    return "".join(f'<span style="{style.format(name)}">{text}</span>' for name, text in meanings.items())


def _table(matrix: "Matrix", numbers: dict[str, int]) -> str:
    modes, rows = rows_of(matrix)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("experts", "dtype", "fullgraph", "", *map(str, modes)))
    lines, previous = [], None
    for row, cells in rows.items():
        first = ' class="first"' if row[0] != previous else ""
        previous = row[0]
        fixed = "".join(f"<th>{html.escape(text)}</th>" for text in flags(row))
        shown = "".join(_cell(cells.get(mode), numbers) for mode in modes)
        lines.append(f"<tr{first}>{fixed}{shown}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(lines)}\n</tbody></table>"


def _cell(cell: Cell | None, numbers: dict[str, int]) -> str:
    if cell is None:
        return "<td></td>"
    mark = ""
    if cell.disagreement is not None:
        number = numbers[cell.disagreement]
        mark = f' <sup><a href="#note-{number}">{number}</a></sup>'
    text = html.escape(", ".join(part for part in (verdict(cell), happened(cell)) if part))
    why = "<br>".join(html.escape(line) for line in details(cell))
    return f'<td class="{colour(cell)}" tabindex="0">{text}{mark}<span class="why" role="tooltip">{why}</span></td>'


def colour(cell: Cell) -> str:
    """The class of a cell: what the rules say, and whether reality agrees."""
    works = cell.outcome.kind == "ok" if cell.outcome is not None and cell.outcome.kind != "timeout" else None
    if cell.rule:
        return "odd" if works else "no"
    return "bad" if works is False else "ok"


def details(cell: Cell) -> list[str]:
    """What is known of a cell, line by line."""
    lines = [str(cell.key), *(f"rule: {reason}" for reason in cell.rule or ("allowed",))]
    if cell.rule != cell.documented:
        lines += [f"documented: {reason}" for reason in cell.documented or ("allowed",)]
    outcome = cell.outcome
    if outcome is None:
        return lines
    lines.append("measured: " + outcome.kind + (f": {outcome.message}" if outcome.message else ""))
    if outcome.ran:
        lines.append(f"ran: {outcome.ran}")
    if outcome.relative_error is not None and outcome.budget is not None:
        lines.append(f"relative error {outcome.relative_error:.2g}, budget {outcome.budget:.2g}")
    if outcome.graphs is not None:
        lines.append(f"graphs: {outcome.graphs}")
    return lines
