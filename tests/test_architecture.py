"""The arrows between the project's parts, and what importing it costs."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import moe_compile

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "moe_compile").rglob("*.py"), *(ROOT / "passes").glob("*.py")])

# What `passes` may import of the rest: the spec, the ops, the rules, the errors, the kernels.
PASSES_MAY_IMPORT = ("passes", "spec", "ops", "rules", "errors", "kernels")
DYNAMO_INTERNALS = {"_guards", "_dynamo.guards", "_dynamo.source", "_dynamo.symbolic_convert", "_dynamo.variables"}


def imported(path):
    """Modules that a file imports, as dotted names, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path):
    prefix = "moe_compile."
    return {name.removeprefix(prefix).split(".")[0] for name in imported(path) if name.startswith(prefix)}


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "passes"], ids=lambda path: path.name)
def test_passes_import_only_what_lies_below_them(path):
    assert own_imports(path) <= set(PASSES_MAY_IMPORT)


@pytest.mark.parametrize("path", [path for path in FILES if "kernels" in path.parts], ids=lambda path: path.name)
def test_kernels_never_import_passes(path):
    assert "passes" not in own_imports(path)


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name != "cli"], ids=lambda path: path.name)
def test_nothing_imports_the_command_line(path):
    assert path.name == "__main__.py" or "cli" not in own_imports(path)


def test_help_answers_at_once_and_without_torch():
    program = "import sys; sys.argv = ['moe-compile', 'matrix', '--help']; from moe_compile.cli.main import main\n"
    program += "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules)"
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 5  # a fifth of a second where nothing else runs
    assert result.stdout.endswith("False\n")
    assert "examples:" in result.stdout


def test_public_names_are_declared_once_for_people_and_once_for_type_checkers():
    tree = ast.parse((ROOT / "moe_compile" / "__init__.py").read_text())
    declared = [n for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for n in node.names if n.asname]
    assert sorted(alias.name for alias in declared) == sorted(moe_compile.__all__)
    assert all(callable(getattr(moe_compile, name)) for name in moe_compile.__all__)


def test_dynamo_internals_are_read_in_one_file_only():
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        if any(name == f"torch.{part}" for part in DYNAMO_INTERNALS for name in imported(path))
    }
    assert readers == {"moe_compile/capture/tracing.py"}


def test_importing_it_does_not_import_transformers():
    program = "import sys, moe_compile; print('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
