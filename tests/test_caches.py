"""Inductor's and AOTAutograd's caches never serve what an edit of an op has made stale."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Trains one block in fp32, where grouped_mm is the fallback op, and prints the caches' counters and a gradient.
PROGRAM = """
import json, torch, moe_compile
from torch._dynamo.utils import counters

def block(x, ids, weights, up, down):
    return moe_compile.experts_block(x, ids, weights, up=up, gate=torch.relu, down=down)

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(torch.ones(4, 8, 8) / 8)
        self.down = torch.nn.Parameter(torch.ones(4, 8, 8) / 8)

    def forward(self, x, ids, weights):
        return x

moe_compile.register_experts(Experts, lambda self, *args: block(*args, self.up, self.down))
module = Experts()
x = torch.ones(6, 8, requires_grad=True)
ids = torch.tensor([[0, 1]] * 6)
compiled = torch.compile(module, backend=moe_compile.backend({experts!r}), fullgraph=True)
compiled(x, ids, torch.ones(6, 2)).sum().backward()
hit = counters["aot_autograd"]["autograd_cache_hit"]
miss = counters["aot_autograd"]["autograd_cache_miss"]
print(json.dumps({{"hit": hit, "miss": miss, "gradient": module.up.grad.sum().item()}}))
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the package that a test may edit."""
    shutil.copytree(ROOT / "moe_compile", tmp_path / "moe_compile", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "passes", tmp_path / "moe_compile/passes", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(package, experts="grouped_mm"):
    environment = {**os.environ, "PYTHONPATH": str(package), "TORCHINDUCTOR_CACHE_DIR": str(package / "cache")}
    command = [sys.executable, "-c", PROGRAM.format(experts=experts)]
    result = subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.inductor
def test_an_edited_op_misses_the_cache_and_an_unedited_one_hits_it(package):
    first = run(package)
    again = run(package)
    assert (first["hit"], first["miss"]) == (0, 1)
    assert (again["hit"], again["miss"]) == (1, 0)
    assert again["gradient"] == first["gradient"] != 0

    source = package / "moe_compile/kernels/grouped_mm_fallback.py"
    edited = source.read_text().replace("return grad_rows if needs_rows else None, grad_weight if", "return grad_rows if needs_rows else None, 2 * grad_weight if")  # fmt: skip  # noqa: E501
    assert edited != source.read_text()
    source.write_text(edited)
    changed = run(package)
    assert (changed["hit"], changed["miss"]) == (0, 1)
    assert changed["gradient"] == 2 * first["gradient"]


@pytest.mark.inductor
def test_another_experts_backend_is_another_entry(package):
    assert run(package, "grouped_mm")["miss"] == 1
    other = run(package, "batched_mm")
    assert (other["hit"], other["miss"]) == (0, 1)
