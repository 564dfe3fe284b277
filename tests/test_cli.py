"""The command line: what it prints, its exit codes, and how it takes bad input."""

import json

import pytest

from moe_compile.cli.main import main
from moe_compile.compatibility.matrix import Matrix

MODELS = "models_for_cli"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_COMPILE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("command", [[], ["matrix"], ["explain"], ["inspect"], ["doctor"], ["bench"], ["tune"]])
def test_every_command_has_help_with_examples(command, capsys):
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main([*command, "--help"]))
    assert not stop.value.code
    assert "examples:" in capsys.readouterr().out


def test_doctor_says_what_each_backend_needs(capsys):
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    needs = {(item["experts"], item["device_type"]): item["needs"] for item in data["backends"]}
    assert needs["grouped_mm", "cpu"] == []
    assert any("CUDA" in need for need in needs["triton", "cpu"])
    assert data["machines"][-1]["versions"]["torch"]
    assert [kernel["name"] for kernel in data["kernels"]] == ["deepgemm", "deepgemm_megamoe", "sonicmoe"]
    assert main(["doctor", "--load"]) == 0
    assert "usable" in capsys.readouterr().out


def test_matrix_prints_writes_and_compares(tmp_path, capsys):
    assert main(["matrix", "--device", "cpu", "--experts", "grouped_mm", "--dtypes", "bfloat16"]) == 0
    assert "mode=reduce-overhead" in capsys.readouterr().out
    for name, experts in (("a", "grouped_mm"), ("b", "batched_mm")):
        command = ["matrix", "--device", "cpu", "--experts", experts, "--json", "--output", str(tmp_path / name)]
        assert main(command) == 0
    assert len(Matrix.load(tmp_path / "a").cells) == 24
    capsys.readouterr()
    assert main(["matrix", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert {change["what"] for change in json.loads(capsys.readouterr().out)["changes"]} == {"added", "removed"}


@pytest.mark.parametrize("function", ["tiny", "with_keywords"])
def test_explain_takes_arguments_in_every_form(function, capsys):
    assert main(["explain", f"{MODELS}:{function}", "--experts", "grouped_mm", "--json"]) == 0
    (block,) = json.loads(capsys.readouterr().out)["blocks"]
    assert block["chosen"] == "grouped_mm_fallback"
    assert block["others"]["batched_mm"] == "allowed here; another one was asked for"


def test_explain_reads_a_file_and_writes_a_page(tmp_path, capsys):
    file = tmp_path / "my_models.py"
    file.write_text(f"from {MODELS} import tiny\n")
    page = tmp_path / "page.html"
    assert main(["explain", f"{file}:tiny", "--experts", "batched_mm", "--html", "--output", str(page)]) == 0
    assert "registered.SmallExperts" in page.read_text()


@pytest.mark.inductor
def test_inspect_writes_a_folder(tmp_path, capsys):
    command = ["inspect", f"{MODELS}:tiny", "--experts", "batched_mm", "--output", str(tmp_path / "dump"), "--json"]
    assert main(command) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["graphs"][0]["blocks"][0]["chosen"] == "batched_mm"
    assert (tmp_path / "dump" / "index.html").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["explain", "tiny"], "not of the form module:function"),
        (["explain", "no_such_module:tiny"], "ModuleNotFoundError"),
        (["explain", f"{MODELS}:missing"], "no attribute 'missing'"),
        (["explain", f"{MODELS}:raises"], "no checkpoint here"),
        (["explain", f"{MODELS}:wrong"], "returned str"),
        (["explain", f"{MODELS}:tiny", "--experts", "groupedmm"], "did you mean 'grouped_mm'"),
        (["explain", f"{MODELS}:tiny", "--mode", "quick"], "no such compile mode"),
        (["explain", f"{MODELS}:tiny", "--output", "/proc/nothing/here"], "writing /proc/nothing/here"),
        (["inspect", f"{MODELS}:tiny", "--output", "/proc/nothing"], "inspect('/proc/nothing')"),
        (["matrix", "--modes", "quick"], "no such compile mode"),
        (["matrix", "--compare", "missing.json", "missing.json"], "No such file"),
        (["bench", "--sizes", "E=x"], "is no size"),
        (["bench", "--dtype", "int8"], "no dtype of weights"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, said, capsys):
    assert main(command) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.startswith("moe-compile: ")
    assert errors.count("\n") == 1


def test_a_model_that_does_not_run_raises_its_own_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        main(["explain", f"{MODELS}:broken"])
