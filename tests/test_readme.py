"""The README's program runs, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.inductor
def test_the_program_prints_what_it_says(tmp_path):
    program = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "import torch" in block)
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("torch.Size([1, 4, 64])") == 2
    assert "2 experts blocks, 1 graphs, 0 graph breaks" in result.stdout


def test_the_commands_are_targets_of_the_makefile():
    commands = re.findall(r"^    make (\w+)", README, re.M)
    assert {"demo", "test"} <= set(commands)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(commands) <= set(targets)


def test_it_is_short_and_its_links_lead_somewhere():
    assert README.count("\n") < 120
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
