"""`inspect()`: what the folder holds, that its programs run, and that nothing stays behind."""

import json
import logging
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote

import depyf.explain.enable_debugging as depyf_debugging
import pytest
import torch
import torch._inductor.codecache
from torch._logging._internal import trace_log
from zoo import standalone

import moe_compile
from moe_compile.errors import OptionError, ReportError
from moe_compile.inspection.collect import Collector
from moe_compile.inspection.folder import safe_name

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RUN_ALL = "import runpy, sys; [runpy.run_path(path, run_name='__main__') for path in sys.argv[1:]]"


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.classes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.links += [unquote(attributes["href"])] if "href" in attributes else []
        self.classes += attributes.get("class", "").split()


def compiled(function, compiler="aot_eager"):
    return torch.compile(function, backend=moe_compile.backend("grouped_mm", compiler=compiler))


def patched():
    return (
        depyf_debugging.DebuggableHook.__call__,
        torch.fx.graph_module._exec_with_source,
        torch._inductor.codecache.PyCodeCache.load_by_key_path,
        torch._dynamo.utils.lazy_format_graph_code.__code__,
        sum(isinstance(handler, Collector) for handler in trace_log.handlers),
    )


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Two graphs, split by a question about data, with gradients, through Inductor."""
    torch._dynamo.reset()
    module, (hidden, ids, weights) = standalone("qwen3_moe")

    def split(hidden, ids, weights):
        out = module(hidden, ids, weights)
        if out.sum() > 1e9:
            out = out + 1
        return out * 2

    before = patched()
    with moe_compile.inspect(tmp_path_factory.mktemp("inspect") / "a dump") as made:
        compiled(split, "inductor")(hidden, ids, weights).sum().backward()
    assert patched() == before
    return made


@pytest.mark.inductor
def test_the_folder_holds_each_stage_of_each_graph(dump):
    assert dump.problem == ""
    assert len(dump.graphs) == 2
    first = {path.name for path in (dump.folder / "graph_0").iterdir()}
    assert first >= {
        "before.py", "1_lower_experts.py", "1_lower_experts.diff", "1_lower_experts.operations.txt", "after.py",
        "report.json", "inductor_0.py", "inductor_1.py",
    }  # fmt: skip
    assert "moe.dispatch" in (dump.folder / "graph_0" / "before.py").read_text()
    lines = (dump.folder / "graph_0" / "after.py").read_text().splitlines()
    after = "\n".join(line for line in lines if not line.lstrip().startswith("#"))  # which quote the source
    assert "moe.dispatch" not in after
    assert "grouped_mm_fallback" in after
    assert "async_compile" in (dump.folder / "graph_0" / "inductor_0.py").read_text()
    diff = (dump.folder / "graph_0" / "1_lower_experts.diff").read_text()
    assert any(line.startswith("-") and "moe.dispatch" in line for line in diff.splitlines())
    operations = (dump.folder / "graph_0" / "1_lower_experts.operations.txt").read_text()
    assert any(line.split()[:3] == ["moe.dispatch", "1", "0"] for line in operations.splitlines())
    # No pass had anything to do in the second graph.
    assert not list((dump.folder / "graph_1").glob("*.diff"))
    assert any(path.name.startswith("full_code_for_") for path in (dump.folder / "depyf").iterdir())


@pytest.mark.inductor
def test_its_report_is_data(dump):
    data = json.loads((dump.folder / "report.json").read_text())
    assert data == dump.to_dict()
    (block,) = data["graphs"][0]["blocks"]
    assert block["chosen"] == "grouped_mm_fallback"
    assert data["graphs"][1]["blocks"] == []
    assert all((dump.folder / file).is_file() for file in data["files"])


@pytest.mark.inductor
def test_its_page_links_every_file_and_highlights_the_blocks(dump):
    page = Page(dump.index.read_text())
    assert set(page.links) == set(dump.files) - {"index.html"}
    assert page.classes.count("block") > 10  # one is in the legend
    assert {"gone", "new"} <= set(page.classes)


@pytest.mark.inductor
def test_the_dumped_python_runs_by_itself(dump, tmp_path):
    programs = [dump.folder / "graph_0" / name for name in ("before.py", "1_lower_experts.py", "after.py")]
    programs.append(dump.folder / "graph_1" / "after.py")
    command = [sys.executable, "-c", RUN_ALL, *map(str, programs)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("tensor(") >= len(programs)


@pytest.mark.inductor
@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
def test_its_page_opens_in_a_browser(dump, tmp_path):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    result = subprocess.run([*command, dump.index.as_uri()], capture_output=True, text=True, timeout=120)
    page = Page(result.stdout)
    assert set(page.links) == set(dump.files) - {"index.html"}
    assert page.classes.count("block") > 10


def test_a_folder_that_is_taken_is_versioned_refused_or_replaced(tmp_path):
    taken = tmp_path / "dump"
    taken.mkdir()
    (taken / "mine.txt").write_text("precious")
    module, inputs = standalone("qwen3_moe")
    with moe_compile.inspect(taken) as second, torch.no_grad():
        compiled(module)(*inputs)
    assert second.folder == tmp_path / "dump-2"
    with pytest.raises(ReportError, match="not empty"), moe_compile.inspect(taken, existing="error"):
        pytest.fail("ran")
    with pytest.raises(ReportError, match="no dump of moe_compile"), moe_compile.inspect(taken, existing="replace"):
        pytest.fail("ran")
    torch._dynamo.reset()
    with moe_compile.inspect(second.folder, existing="replace") as third, torch.no_grad():
        compiled(module)(*inputs)
    assert third.folder == second.folder
    assert (taken / "mine.txt").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "dump-2"]


def test_an_exception_is_the_users_and_leaves_a_whole_dump_and_nothing_patched(tmp_path):
    module, inputs = standalone("qwen3_moe")
    before = patched()

    def run_and_fail(*arguments):
        compiled(module)(*arguments)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), moe_compile.inspect(tmp_path / "dump") as made:
        run_and_fail(*inputs)
    assert patched() == before
    assert made.problem == "KeyError: 'mine'"
    assert len(made.graphs) == 1
    assert "KeyError" in made.index.read_text()


def test_folders_that_cannot_be_used_are_refused_before_anything_runs(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for bad in (file, file / "below"):
        with pytest.raises(ReportError), moe_compile.inspect(bad):
            pytest.fail("ran")
    with pytest.raises(OptionError, match="did you mean 'version'"), moe_compile.inspect(tmp_path, existing="versions"):
        pytest.fail("ran")


def test_it_says_when_nothing_was_compiled(tmp_path):
    with pytest.warns(UserWarning, match=r"torch\._dynamo\.reset"), moe_compile.inspect(tmp_path / "dump"):
        pass
    assert (tmp_path / "dump" / "index.html").exists()


@pytest.mark.parametrize("name", ["", "..", "../../x", "a/b", "<lambda>", "ü", "a" * 500, ".hidden"])
def test_names_of_files_are_safe(name):
    safe = safe_name(name)
    assert safe
    assert not safe.startswith(".")
    assert set(safe) <= set("abcdefghijklmnopqrstuvwxyz_.-<>") - set("<>")
    assert len(safe) <= 120


def test_one_info_line_per_compile_and_the_graphs_at_debug(caplog):
    module, inputs = standalone("qwen3_moe")
    with caplog.at_level(logging.INFO, "moe_compile"), torch.no_grad():
        compiled(module)(*inputs)
    (record,) = caplog.records
    assert "1 of 1 experts blocks were rewritten to grouped_mm_fallback" in record.getMessage()
    torch._dynamo.reset()
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "moe_compile"), torch.no_grad():
        compiled(module)(*inputs)
    graphs = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert any("moe.dispatch" in text and "# experts block" in text for text in graphs)
