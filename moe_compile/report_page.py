"""An explanation as HTML, for notebooks and for `moe-compile explain --html`."""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_compile.report import Explanation

_STYLE = """
.moe-compile { font: 14px/1.5 system-ui, sans-serif; }
.moe-compile .scroll { overflow-x: auto; }
.moe-compile table { border-collapse: collapse; margin: .5rem 0 1rem; }
.moe-compile th, .moe-compile td { border: 1px solid #8886; padding: .2rem .6rem; text-align: left;
  vertical-align: top; }
.moe-compile .problem { border-left: 4px solid #c33; padding-left: .8rem; }
"""


def to_fragment(explanation: "Explanation") -> str:
    """What a notebook shows: a `div` with its own style."""
    problem = f'<p class="problem">does not compile: {html.escape(explanation.error)}</p>' if explanation.error else ""
    tables = "".join(_table(title, header, rows) for title, header, rows in explanation.tables())
    remarks = "".join(f"<p>{html.escape(remark)}</p>" for remark in explanation.remarks())
    return (
        f'<div class="moe-compile"><style>{_STYLE}</style><p><b>{html.escape(explanation.headline())}</b></p>'
        f"{problem}{tables}{remarks}</div>"
    )


def to_page(explanation: "Explanation") -> str:
    """A page by itself."""
    title = html.escape(explanation.headline())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title></head>\n'
        f"<body>{to_fragment(explanation)}</body></html>\n"
    )


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<h4>{html.escape(title)}</h4><div class="scroll">{table}</div>'
