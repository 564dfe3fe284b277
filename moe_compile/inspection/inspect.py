"""`with moe_compile.inspect(folder):` writes down what becomes of everything that is compiled inside."""

import contextlib
import io
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import depyf
from depyf.explain.enable_debugging import DebuggableHook
from torch._logging._internal import trace_log

from moe_compile.compatibility.machine import Machine
from moe_compile.errors import ReportError
from moe_compile.inspection.collect import Collector, GraphDump
from moe_compile.inspection.diffs import operations_diff, text_diff
from moe_compile.inspection.folder import REPORT, Existing, make_folder, safe_name
from moe_compile.inspection.index import to_index

FORMAT, VERSION = "moe_compile.inspection", 1


@dataclass
class Inspection:
    """A dump; complete once the `with` block has ended.

    Attributes:
        folder: where it lies.
        graphs: the graphs of our backends that were compiled inside.
        files: every file that was written, relative to the folder.
        problem: what ended the block, or kept a part from being written; "" if nothing did.
    """

    folder: Path
    graphs: tuple[GraphDump, ...] = ()
    files: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def index(self) -> Path:
        """The page to open."""
        return self.folder / "index.html"

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for JSON: what report.json holds."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "folder": str(self.folder),
            "machine": Machine.here().to_dict(),
            "problem": self.problem,
            "graphs": [{"compile_id": graph.compile_id, **graph.report} for graph in self.graphs],
            "files": sorted(self.files),
        }


@contextlib.contextmanager
def inspect(folder: str | os.PathLike[str], *, existing: Existing = "version") -> Iterator[Inspection]:
    """Dumps what is compiled inside: depyf's view of Dynamo, our passes one by one, and Inductor's code.

        with moe_compile.inspect("dump") as dump:
            compiled(inputs)
        print(dump.index)

    Only what is compiled inside is seen: call `torch._dynamo.reset()` first where the model has run compiled before.

    The folder then holds `index.html`, `report.json`, one folder per graph with `before.py`, one file per pass that
    changed something, `after.py`, `*.diff` and `*.operations.txt` per pass and what Inductor generated, and `depyf/`.
    `before.py`, the passes' files and `after.py` run by themselves.

    Args:
        folder: where to write.
        existing: where something lies there already: "version" takes `folder-2`, `folder-3`, ...; "error" refuses;
            "replace" removes an earlier dump.

    Yields:
        The inspection; its `index` is the page to open.

    Raises:
        ReportError: before anything runs, if the folder cannot be used.
    """
    made = Inspection(make_folder(folder, existing))
    collector = Collector()
    trace_log.addHandler(collector)
    try:
        with _depyf(made):
            yield made
    except BaseException as error:
        made.problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise
    finally:
        trace_log.removeHandler(collector)
        made.graphs = tuple(collector.graphs)
        _write(made)
    if not made.graphs:
        warnings.warn(
            f"inspect({str(folder)!r}) saw no graph: nothing was compiled by a backend of moe_compile inside. What was "
            "compiled before is not compiled again; torch._dynamo.reset() forgets it",
            UserWarning,
            stacklevel=3,
        )


@contextlib.contextmanager
def _depyf(made: Inspection) -> Iterator[None]:
    """depyf's dump, whose own failures must not become the user's."""
    folder = made.folder / "depyf"
    manager = depyf.prepare_debug(str(folder))
    decompile = DebuggableHook.__call__

    def quietly(hook: DebuggableHook, code: CodeType, new_code: CodeType) -> CodeType | None:
        """What depyf cannot decompile runs as Dynamo made it; its complaint goes to a file, not to the terminal."""
        complaint = io.StringIO()
        with contextlib.redirect_stderr(complaint), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decompiled = decompile(hook, code, new_code)
        if decompiled is None:
            (folder / f"not_decompiled_{safe_name(code.co_name)}.txt").write_text(complaint.getvalue())
        return decompiled

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it reminds of covering all branches
        manager.__enter__()
    DebuggableHook.__call__ = quietly
    try:
        yield
    finally:
        DebuggableHook.__call__ = decompile
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                manager.__exit__(None, None, None)
        except Exception as error:
            made.problem = f"depyf: {type(error).__name__}: {error}"


def _write(made: Inspection) -> None:
    try:
        for number, graph in enumerate(made.graphs):
            _write_graph(made, f"graph_{number}", graph)
        made.files += sorted(f"depyf/{path.name}" for path in (made.folder / "depyf").iterdir() if path.is_file())
        made.files += [REPORT, "index.html"]
        (made.folder / REPORT).write_text(json.dumps(made.to_dict(), indent=1))
        made.index.write_text(to_index(made.folder, made.graphs, made.files, made.problem))
    except OSError as error:
        raise ReportError(f"inspect({str(made.folder)!r})", f"{error.strerror or error}", "Make room there") from error


def _write_graph(made: Inspection, name: str, graph: GraphDump) -> None:
    folder = made.folder / name
    folder.mkdir()

    def write(file: str, text: str) -> None:
        (folder / file).write_text(text)
        made.files.append(f"{name}/{file}")

    stages = list(graph.stages.items())
    counts = {stage["name"]: stage["operations"] for stage in graph.report.get("stages", ())}
    for number, (file, source) in enumerate(stages):
        stage = safe_name(file.removesuffix(".py"))
        write(file if number == 0 else f"{number}_{stage}.py", source)
        if number:
            before = stages[number - 1]
            write(f"{number}_{stage}.diff", text_diff(before[1], source, before[0], file))
            changes = operations_diff(counts.get(before[0].removesuffix(".py"), {}), counts.get(stage, {}))
            write(f"{number}_{stage}.operations.txt", changes)
    if stages:
        write("after.py", stages[-1][1])
    for file, text in graph.generated.items():
        write(safe_name(file), text)
    write(REPORT, json.dumps(graph.report, indent=1))
