"""`index.html` of a dump: what was found, every file, the passes' diffs, and the code with the blocks highlighted."""

import html
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from moe_compile.inspection.collect import GraphDump
from moe_compile.inspection.diffs import changed_operations, text_diff
from moe_compile.inspection.source import MARK

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c22; --paper: #fff; --line: #c9c9d2; --block: #fdf0c4; --gone: #fbdcda;
  --new: #d8f2dd; --code: #f6f6f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf2; --paper: #17171c; --line: #4b4b57; --block: #4c410f;
  --gone: #5b211d; --new: #1d4a28; --code: #202027; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 80rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 2px solid var(--line);
  padding-top: 1rem; } h3 { font-size: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; } th, td { border: 1px solid var(--line); padding: .25rem .6rem; text-align: left;
  vertical-align: top; }
pre { background: var(--code); padding: .6rem; overflow-x: auto; font-size: 12.5px; line-height: 1.4; }
pre span { display: block; min-width: max-content; } .block { background: var(--block); }
.gone { background: var(--gone); } .new { background: var(--new); }
summary { cursor: pointer; } .problem { border-left: 4px solid #c33; padding-left: .8rem; }
"""


def to_index(folder: Path, graphs: Sequence[GraphDump], files: Sequence[str], problem: str) -> str:
    """The page.

    Args:
        folder: of the dump; links are relative to it.
        graphs: the graphs.
        files: every file of the dump, relative to the folder.
        problem: what went wrong, "" if nothing did.
    """
    sections = "".join(_graph(number, graph, files) for number, graph in enumerate(graphs))
    failed = f'<p class="problem">{html.escape(problem)}</p>' if problem else ""
    others = [file for file in files if not file.startswith("graph_") and file != "index.html"]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{html.escape(folder.name)}: {len(graphs)} graphs</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(folder.name)}: {len(graphs)} graphs</h1>
{failed}
<p>Lines of experts blocks are <span class="block">highlighted</span>. Files that end in <code>.py</code> inside a
graph's folder run by themselves.</p>
{sections}
<h2>Other files</h2>
<p><code>full_code_for_*</code> shows a compiled function as Dynamo left it, <code>__transformed_code_*</code> its
bytecode as Python, <code>__compiled_fn_*</code> its graphs.</p>
{_links(others)}
</body>
</html>
"""


def _graph(number: int, graph: GraphDump, files: Sequence[str]) -> str:
    summary = graph.report.get("summary", {})
    said = f"{summary.get('nodes_before', '?')} operations became {summary.get('nodes_after', '?')}"
    stages = list(graph.stages.items())
    counts = {stage["name"]: stage["operations"] for stage in graph.report.get("stages", ())}
    passes = []
    for (old, before), (new, after) in itertools.pairwise(stages):
        operations = changed_operations(counts.get(old[:-3], {}), counts.get(new[:-3], {}))
        rows = [(name, str(a), str(b)) for name, a, b in operations]
        passes.append(f"<h3>Pass {html.escape(new[:-3])}</h3>{_table(('operation', 'before', 'after'), rows)}")
        passes.append(_details("its diff", _diff(text_diff(before, after, old, new))))
    if not passes:
        passes.append("<p>No pass changed anything.</p>")
    sources = [(stages[0][0], stages[0][1]), ("after.py", stages[-1][1])] if stages else []
    codes = [_details(name, _code(text)) for name, text in sources]
    codes += [_details(name, _code(text)) for name, text in graph.generated.items()]
    own = [file for file in files if file.startswith(f"graph_{number}/")]
    return f"""<h2 id="graph-{number}">Graph {number} <small>({html.escape(graph.compile_id)})</small>: {said}</h2>
{_blocks(graph.report.get("blocks", ()))}
{_rejected(graph.report.get("rejected", ()))}
{"".join(passes)}
<h3>Code</h3>
{"".join(codes)}
<h3>Files</h3>
{_links(own)}
"""


def _blocks(blocks: Sequence[dict[str, Any]]) -> str:
    if not blocks:
        return "<p>No experts block.</p>"
    rows = [
        (
            block["path"] or "?",
            block["form"],
            block["found"],
            (block["source"] or "?").rpartition("site-packages/")[2],
            f"T={block['tokens']}",
            block["chosen"] or "the model's own code",
        )
        for block in blocks
    ]
    reasons = dict.fromkeys((name, why) for block in blocks for name, why in block["reasons"].items())
    why_not = _details("why nothing else", _table(("not", "because"), sorted(reasons)) if reasons else "")
    return _table(("block", "form", "found", "source", "tokens", "runs"), rows) + (why_not if reasons else "")


def _rejected(rejected: Sequence[dict[str, Any]]) -> str:
    rows = [(item["path"] or "?", item["form"], item["reason"], item["source"] or "?") for item in rejected]
    return _table(("left alone", "form", "reason", "source"), rows) if rows else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _details(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def _code(text: str) -> str:
    lines = []
    for line in text.splitlines():
        kind = ' class="block"' if MARK in line else ""
        lines.append(f"<span{kind}>{html.escape(line) or '&nbsp;'}</span>")
    return f"<pre>{''.join(lines)}</pre>"


def _diff(text: str) -> str:
    kinds = {"+": ' class="new"', "-": ' class="gone"'}
    lines = [f"<span{kinds.get(line[:1], '')}>{html.escape(line) or '&nbsp;'}</span>" for line in text.splitlines()]
    return f"<pre>{''.join(lines)}</pre>"


def _links(files: Sequence[str]) -> str:
    items = "".join(f'<li><a href="{quote(file)}">{html.escape(file)}</a></li>' for file in files)
    return f"<ul>{items}</ul>"
