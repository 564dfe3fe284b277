"""The Triton kernels around other projects' products, in Triton's interpreter, against the same functions in torch."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from moe_compile.kernels.external import rows

def run(tokens, top_k, experts, alignment, size, dtype):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)
    ids[ids == 1] = 0  # an expert without tokens
    x = torch.randn(tokens, size, generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    order, ends = rows.sort_pairs(ids, experts)
    padded, layout, position, last = rows.pad_rows(x, order, ends, top_k=top_k, alignment=alignment, dtype=dtype)
    kept = layout >= 0
    padded = torch.where(kept[:, None], padded, 0)
    # The interpreter rounds to FP8 by itself, and not as the device does: tests/test_cuda_external.py has the values.
    _, scales = rows.quantise_rows(padded.float(), layout, 16, True)
    source, place, bounds = rows.place_rows(order, ends, top_k)
    return dict(
        order=order, ends=ends, layout=layout, position=position, last=last, source=source, place=place, bounds=bounds,
        padded=padded, scales=scales[kept],
        combined=rows.combine_rows(padded, weights, position, top_k, torch.float32),
        summed=rows.combine_rows(padded, None, position, top_k, torch.float32),
        per_expert=rows.sum_expert_rows(x[order.long() // top_k], ends, torch.float32),
    )

CASES = [
    (1, 1, 4, 16, 32, torch.float32),
    (9, 2, 4, 16, 32, torch.float32),
    (50, 3, 5, 32, 48, torch.float32),
    (7, 8, 130, 16, 1040, torch.float32),
    (30, 2, 3, 48, 16, torch.float32),
]
expected = [run(*case) for case in CASES]
torch.Tensor.is_cuda = property(lambda tensor: True)  # from here on the kernels run
for case, one in zip(CASES, expected):
    found = run(*case)
    for name, value in one.items():
        torch.testing.assert_close(found[name], value, msg=lambda text: f"{case} {name}: {text}")
from moe_compile.kernels.external import device
assert type(device.combine_kernel).__name__ == "InterpretedFunction"
"""


def test_kernels_do_what_the_torch_code_does():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in result.stderr:
        pytest.skip("this Triton's interpreter does not know this numpy, which no longer makes scalars of arrays")
    assert result.returncode == 0, result.stderr
