"""The compatibility matrix: verdicts are the predicates', cells run by themselves, disagreements are told."""

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from zoo import standalone

import moe_compile
from moe_compile.compatibility import small_block, storage
from moe_compile.compatibility.cells import Cell, Key, Outcome
from moe_compile.compatibility.compare import compare
from moe_compile.compatibility.machine import Machine
from moe_compile.compatibility.matrix import Matrix
from moe_compile.errors import (
    ModelFunctionError,
    OptionError,
    ReportError,
    RuleError,
    UnknownBackendError,
)
from moe_compile.experts_backends import EXPERTS_BACKENDS
from moe_compile.modes import CompileSettings
from moe_compile.rules import Situation

GRAPHS = "reduce-overhead"
GOOD = Outcome("ok", "", "grouped_mm", 0.001, 0.01, 1500.0, 1)
BAD = Outcome("error", "RuntimeError: it broke | <here>")
TESTS = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Measurements of these tests stay among themselves."""
    monkeypatch.setenv("MOE_COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", TESTS)
    return tmp_path / "cache"


def cell(outcome=None, **changes):
    key = replace(Key("grouped_mm", GRAPHS, "bfloat16", False, False), **changes)
    made = moe_compile.matrix(
        [key.experts], modes=[key.mode], dtypes=[key.dtype], fullgraph=[key.fullgraph], training=[key.training],
        device="cpu",
    )  # fmt: skip
    return replace(made.cells[0], outcome=outcome)


def matrix_of(*cells):
    return Matrix(Machine.here("cpu"), "2026-01-01", "small block", cells)


def test_every_verdict_is_the_predicates():
    made = moe_compile.matrix(device="cpu", training=[False, True])
    assert {cell.key.experts for cell in made.cells} == set(EXPERTS_BACKENDS)
    assert len(made.cells) == len(EXPERTS_BACKENDS) * 4 * 3 * 2 * 2 == len({cell.key for cell in made.cells})
    for one in made.cells:
        dtype = getattr(torch, one.key.dtype)
        spec = replace(small_block.SPEC, weight_dtype=dtype, activation_dtype=dtype)
        situation = Situation(
            settings=CompileSettings(one.key.mode), fullgraph=one.key.fullgraph, training=one.key.training
        )
        allowed = not EXPERTS_BACKENDS[one.key.experts].reasons(spec, situation)
        assert (not one.documented) == allowed, one.key
        assert one.rule == one.documented


def test_it_prints_as_text_markdown_html_and_json():
    made = matrix_of(cell(GOOD), cell(BAD, mode=None), cell(experts="batched_mm"))
    text, github, html = str(made), made.to_github(), made.to_html()
    assert "no, 1.5 ms [1]" in text
    assert "yes, error [2]" in text
    assert "[1] grouped_mm" in text
    assert "no, 1.5 ms [^1]" in github
    assert "[^1]: grouped_mm" in github
    for part in ("<!doctype html>", 'class="odd"', 'class="bad"', 'id="note-1"', "It broke".lower(), "&lt;here&gt;"):
        assert part in html
    assert "<here>" not in html
    assert "http" not in html  # nothing outside the page
    data = json.loads(made.to_json())
    assert (data["format"], data["version"]) == ("moe_compile.matrix", 1)
    assert data["machine"]["versions"]["torch"] == torch.__version__
    assert data["cells"][0]["outcome"]["microseconds"] == 1500.0


def test_a_file_gives_the_same_matrix_back(tmp_path):
    made = matrix_of(cell(GOOD), cell(BAD, mode=None), cell(experts="batched_mm"))
    made.save(tmp_path / "m.json")
    assert Matrix.load(tmp_path / "m.json") == made


@pytest.mark.parametrize(
    ("outcome", "mode", "disagrees"),
    [(GOOD, GRAPHS, True), (BAD, GRAPHS, False), (GOOD, None, False), (BAD, None, True), (None, None, False)],
)
def test_a_cell_is_marked_where_rule_and_reality_disagree(outcome, mode, disagrees):
    assert (cell(outcome, mode=mode).disagreement is not None) == disagrees


def test_what_ran_out_of_time_proves_nothing():
    assert cell(Outcome("timeout", "more than 1 s")).disagreement is None
    assert cell(Outcome("timeout", "more than 1 s"), mode=None).disagreement is None


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": "moe_compile.matrix", "version": 99}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "m.json"
    path.write_text(content)
    with pytest.raises(ReportError):
        Matrix.load(path)


def test_comparing_shows_what_changed_and_nothing_else():
    old = matrix_of(cell(GOOD), cell(GOOD, mode=None), cell(GOOD, dtype="float32"), cell(experts="batched_mm"))
    slower = replace(GOOD, microseconds=3000.0)
    new = replace(
        matrix_of(cell(BAD), cell(slower, mode=None), cell(GOOD, dtype="float32"), cell(experts="eager")),
        machine=replace(old.machine, versions={**old.machine.versions, "torch": "9.9"}),
    )
    found = compare(old, new)
    assert [change.what for change in found.changes] == ["outcome", "time", "removed", "added"]
    assert found.changes[1].ratio == 2.0
    assert found.same == 1
    assert found.machines == {"torch": (torch.__version__, "9.9")}
    assert "4 cells changed, 1 did not" in str(found)
    assert not compare(old, old).changes


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"experts": ["groupedmm"]}, UnknownBackendError),
        ({"modes": ["quick"]}, OptionError),
        ({"dtypes": ["int8"]}, OptionError),
        ({"dtypes": []}, OptionError),
        ({"device": "tpu"}, OptionError),
        ({"rules": "guessed"}, OptionError),
        ({"rules": "measured"}, OptionError),
        ({"measure": True, "jobs": 0}, OptionError),
    ],
)
def test_bad_arguments_are_refused(arguments, error):
    with pytest.raises(error):
        moe_compile.matrix(**{"device": "cpu", **arguments})


# What was measured here, as a rule -----------------------------------------------------------------------------------


def keep(*cells):
    made = matrix_of(*cells)
    made.save(storage.measured_path(made.machine))
    return made


def run(rules, mode=GRAPHS, dtype=torch.bfloat16, experts="grouped_mm"):
    module, inputs = standalone("qwen3_moe", dtype)
    backend = moe_compile.backend(experts, compiler="eager", rules=rules)
    with torch.no_grad():
        torch.compile(module, backend=backend, mode=mode)(*inputs)
    return next(iter(backend.blocks.values())).chosen


def test_a_measurement_lifts_the_rule_where_it_was_made_and_nowhere_else():
    keep(cell(GOOD))
    with pytest.raises(RuleError, match="CUDA graphs"):
        run("documented")
    assert run("measured") == "grouped_mm"
    with pytest.raises(RuleError, match="CUDA graphs"):
        run("measured", dtype=torch.float32)
    with pytest.raises(RuleError, match="CUDA graphs"):
        run("measured", mode="max-autotune")


def test_a_measurement_tightens_the_rule():
    keep(cell(BAD, mode=None))
    assert run("documented", mode=None) == "grouped_mm"
    with pytest.raises(RuleError, match="measured on this machine: error, RuntimeError: it broke"):
        run("measured", mode=None)


def test_reasons_that_the_measured_block_had_not_stay():
    from moe_compile.compatibility.measured_rules import measured_rules

    keep(cell(GOOD))
    rules = measured_rules("measured")
    situation = Situation(settings=CompileSettings(GRAPHS))
    spec = replace(small_block.SPEC, weight_dtype=torch.bfloat16, quantisation="fp8", scale_format="float32")
    reasons = EXPERTS_BACKENDS["grouped_mm"].reasons(spec, situation)
    left = rules("grouped_mm", spec, situation, reasons)
    assert len(left) == len(reasons) - 1
    assert not any("CUDA graphs" in reason for reason in left)


def test_a_matrix_shows_the_documented_rule_beside_the_one_in_force():
    keep(cell(GOOD))
    made = moe_compile.matrix(["grouped_mm"], modes=[GRAPHS], dtypes=["bfloat16"], device="cpu", rules="measured")
    lifted = next(one for one in made.cells if not one.key.fullgraph)
    assert lifted.documented
    assert not lifted.rule
    assert "allowed by the measured rule" in lifted.disagreement


def test_another_machines_measurement_is_refused(tmp_path):
    made = matrix_of(cell(GOOD))
    elsewhere = replace(made, machine=replace(made.machine, device="Another CPU"))
    elsewhere.save(tmp_path / "m.json")
    with pytest.raises(ReportError, match="Another CPU"):
        moe_compile.backend("grouped_mm", rules=tmp_path / "m.json")


# Measuring -----------------------------------------------------------------------------------------------------------


@pytest.mark.inductor
def test_cells_are_measured_and_an_interrupted_run_goes_on(tmp_path, cache):
    arguments = {
        "experts": ["grouped_mm", "eager"], "modes": [None], "dtypes": ["float32"], "fullgraph": [True],
        "device": "cpu", "measure": True, "output": tmp_path / "m.json",
    }  # fmt: skip
    made = moe_compile.matrix(**arguments)
    works, fails = made.cells
    assert works.outcome.kind == "ok"
    assert works.outcome.ran == "grouped_mm_fallback"
    assert works.outcome.relative_error <= works.outcome.budget < 1e-5
    assert works.outcome.microseconds > 0
    assert works.outcome.graphs == 1
    assert fails.outcome.kind == "error"
    assert fails.rule
    assert "\n" not in fails.outcome.message
    assert not made.disagreements
    assert Matrix.load(tmp_path / "m.json") == made
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["m.json"]
    assert moe_compile.backend("grouped_mm", rules="measured").override.outcomes[works.key] == works.outcome

    # An earlier run that had come as far as the first cell: nothing of it is run again.
    known = replace(works.outcome, microseconds=123.0)
    replace(made, cells=(replace(works, outcome=known), replace(fails, outcome=replace(BAD)))).save(
        tmp_path / "m.partial"
    )
    again = moe_compile.matrix(**arguments)
    assert [one.outcome for one in again.cells] == [known, BAD]
    assert not (tmp_path / "m.partial").exists()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", "KeyError: 'no checkpoint here'"),
        ("wrong", "returned str"),
        ("not_callable", "str, not a model"),
        ("strange_arguments", "returned int"),
        ("missing", "no attribute 'missing'"),
        ("broken", "missing 1 required positional argument"),
    ],
)
def test_bad_model_functions_are_named(function, said, tmp_path, monkeypatch):
    from moe_compile.compatibility.measure import Job, run_cell

    job = Job(
        Key("grouped_mm", None, "float32", False, False), "cpu", f"models_for_cli:{function}", str(tmp_path / "l")
    )
    with pytest.raises(ModelFunctionError, match="models_for_cli") as caught:
        run_cell(job)
    assert said in str(caught.value)


def test_a_process_that_dies_or_hangs_is_an_outcome(tmp_path, monkeypatch):
    from moe_compile.compatibility.runner import Runner

    key = Key("grouped_mm", None, "float32", False, False)
    ((_, outcome),) = Runner("cpu", "models_for_cli:dies", 120, 1).run([key])
    assert outcome == Outcome("error", "the process exited with 3")
    ((_, outcome),) = Runner("cpu", "models_for_cli:slow", 20, 1).run([key])
    assert outcome == Outcome("timeout", "more than 20 s")


def children_of(pid):
    """Processes that any thread of a process has started."""
    return [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def test_an_interrupt_leaves_no_process_and_no_half_written_file(tmp_path):
    output = tmp_path / "m.json"
    command = [sys.executable, "-m", "moe_compile", "matrix", "--measure", "--device", "cpu", "--experts", "eager"]
    command += ["--model", "models_for_cli:slow", "--output", str(output)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (children := children_of(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert children
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not output.exists()
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_no_worker_starts_once_the_run_is_stopped(monkeypatch):
    """The interrupt may come while a worker is being made."""
    from moe_compile.compatibility import runner

    making, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Worker:
        def __init__(self):
            making.set()
            assert go_on.wait(60)

        def run(self, job, timeout):
            ended.wait(60)

        def end(self):
            ended.set()

    def interrupted(futures):
        assert making.wait(60)
        threading.Timer(0.5, go_on.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_Worker", Worker)
    monkeypatch.setattr(runner.concurrent.futures, "as_completed", interrupted)
    run = runner.Runner("cpu", None, 60, 1).run([Key("eager", None, "float32", False, False)])
    with pytest.raises(KeyboardInterrupt):
        next(run)
    assert ended.is_set()


def test_cells_hold_nothing_but_plain_values():
    one = cell(GOOD)
    assert storage.cell_from_dict(json.loads(json.dumps(storage.cell_to_dict(one)))) == one
    assert isinstance(one, Cell)
