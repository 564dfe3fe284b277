"""The documentation: pages equal their data, links lead somewhere, code runs, the site builds."""

import importlib.util
import inspect
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_compile import errors
from moe_compile.compatibility.matrix import DTYPES, MODES, Matrix
from moe_compile.experts_backends import EXPERTS_BACKENDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def name_of(page):
    return page.relative_to(DOCS).as_posix()


def generator():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "measured" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_measured_pages_equal_their_data():
    pages = dict(generator().pages())
    assert {"matrix-cpu-torch2.13.md", "matrix-h200-torch2.11.html", "experts-block-h200-torch2.11.md"} <= set(pages)
    for name, content in pages.items():
        assert (DOCS / "measured" / name).read_text() == content, f"run docs/measured/generate.py for {name}"


def test_the_measured_cpu_holds_every_combination():
    cells = Matrix.load(DOCS / "measured" / "matrix-cpu-torch2.13.json").cells
    experts = ("grouped_mm", "batched_mm", "triton", "eager")
    combinations = itertools.product(experts, MODES, DTYPES, (False, True), (False, True))
    assert {tuple(vars(cell.key).values()) for cell in cells} == set(combinations)
    assert all(cell.outcome is not None for cell in cells)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), target


def test_every_page_can_be_reached_from_the_first():
    reached, queue = set(), [DOCS / "index.md"]
    while queue:
        page = queue.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        queue += [(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())]
    assert reached >= {DOCS / name for name in ("troubleshooting.md", "backends/eager.md", "measured/index.md")}


def test_every_backend_has_a_page():
    index = (DOCS / "backends" / "index.md").read_text()
    assert all(f"`{name}`" in index for name in EXPERTS_BACKENDS)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text() and page.parent in (DOCS, DOCS / "backends")],
    ids=name_of,
)  # fmt: skip
def test_python_blocks_compile(page):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        compile(code, name_of(page), "exec")


def test_python_blocks_of_the_guides_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_COMPILE_CACHE_DIR", str(tmp_path))
    names = ["index.md", "compile-modes.md", "training.md", "reading-graphs.md", "backends/eager.md"]
    blocks = [block for name in names for block in re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.S)]
    assert len(blocks) == len(names)
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks))
    result = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "2 experts blocks, 1 graphs, 0 graph breaks" in result.stdout
    assert "nothing was measured on this machine" in result.stdout
    assert "torch.Size([8, 192, 128])" in result.stdout
    assert "index.html" in result.stdout


def test_every_message_in_troubleshooting_is_one_that_the_code_says():
    headings = re.findall(r"^## `(.*)`", (DOCS / "troubleshooting.md").read_text(), re.M)
    assert len(headings) > 8
    sources = [*(ROOT / "moe_compile").rglob("*.py"), *(ROOT / "passes").glob("*.py")]
    code = " ".join(path.read_text() for path in sources)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # strings that are split over lines
    code = re.sub(r"\{[^{}]*\}", "...", code)
    for heading in headings:
        for message in heading.split("`, `"):
            fixed = max(re.split(r"\.\.\.|fp8|'$|^triton ", message), key=len).strip(" (':)")
            assert fixed in code, message


def test_troubleshooting_has_every_class():
    listed = re.findall(r"^\| `(\w+)` \|", (DOCS / "troubleshooting.md").read_text(), re.M)
    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert sorted(listed) == sorted(classes - {"MoeCompileError"})


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs the docs extra")
def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "site" / "troubleshooting" / "index.html").exists()


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
def test_the_matrix_page_opens_in_a_browser(tmp_path):
    page = DOCS / "measured" / "matrix-h200-torch2.11.html"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    result = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    cells = len(Matrix.load(page.with_suffix(".json")).cells)
    assert result.stdout.count('class="why"') == cells
    assert "not allowed, yet works" in result.stdout
