"""An experts block written down independently: one token and one expert at a time, no sorting, no batching.

Run in float64 it is the oracle; run in the dtype under test it says what error that dtype costs, on the same data.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
Gate = Callable[[Tensor], Tensor]


def swiglu(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@dataclass
class Inputs:
    """Tensors of one block; every floating one requires a gradient."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    transposed: bool

    def differentiable(self) -> list[Tensor]:
        tensors = (self.x, self.weights, self.up, self.down, self.up_bias, self.down_bias)
        return [tensor for tensor in tensors if tensor is not None]

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Fresh leaves with the same values."""
        values = {
            name: value.detach().to(dtype).requires_grad_() if torch.is_tensor(value) and name != "ids" else value
            for name, value in vars(self).items()
        }
        return Inputs(**values)


def make_inputs(
    num_tokens: int,
    *,
    experts: int = 4,
    top_k: int = 2,
    hidden: int = 16,
    intermediate: int = 24,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    transposed: bool = False,
    sentinels: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Inputs:
    """A random block; with `sentinels`, some ids are -1 and some are past the last expert."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    low, high = (-1, experts + 2) if sentinels else (0, experts)
    up_shape, down_shape = (2 * intermediate, hidden), (hidden, intermediate)
    if transposed:
        up_shape, down_shape = up_shape[::-1], down_shape[::-1]
    return Inputs(
        x=normal(num_tokens, hidden),
        ids=torch.randint(low, high, (num_tokens, top_k), generator=generator).to(device),
        weights=torch.rand(num_tokens, top_k, generator=generator).to(device, dtype).requires_grad_(),
        up=normal(experts, *up_shape),
        down=normal(experts, *down_shape),
        up_bias=normal(experts, 2 * intermediate) if bias else None,
        down_bias=normal(experts, hidden) if bias else None,
        transposed=transposed,
    )


def per_token(inputs: Inputs, gate: Gate = swiglu) -> Tensor:
    """(T, D) in the inputs' dtype, pair by pair."""
    zero = sum(tensor.sum() * 0 for tensor in inputs.differentiable())  # so that everything has a gradient
    outputs = []
    for x, ids, weights in zip(inputs.x, inputs.ids.tolist(), inputs.weights, strict=True):
        total = torch.zeros_like(x)
        for expert, weight in zip(ids, weights, strict=True):
            if 0 <= expert < inputs.up.shape[0]:
                hidden = _linear(x, inputs.up, inputs.up_bias, expert, inputs.transposed)
                total = total + weight * _linear(gate(hidden), inputs.down, inputs.down_bias, expert, inputs.transposed)
        outputs.append(total)
    return (torch.stack(outputs) if outputs else inputs.x * 0) + zero


def _linear(row: Tensor, weight: Tensor, bias: Tensor | None, expert: int, transposed: bool) -> Tensor:
    matrix = weight[expert].T if transposed else weight[expert]
    return matrix @ row if bias is None else matrix @ row + bias[expert]


def canonical(inputs: Inputs, gate: Gate = swiglu, block: str = "block") -> Tensor:
    """The same block in canonical ops."""
    rows, offsets, order = torch.ops.moe.dispatch(inputs.x, inputs.ids, inputs.up.shape[0], block)
    hidden = torch.ops.moe.grouped_linear(rows, inputs.up, inputs.up_bias, offsets, inputs.transposed)
    out = torch.ops.moe.grouped_linear(gate(hidden), inputs.down, inputs.down_bias, offsets, inputs.transposed)
    return torch.ops.moe.combine(out, inputs.weights, order, inputs.x.dtype, offsets)


def run_with_gradients(function: Callable[[Inputs], Tensor], inputs: Inputs) -> list[Tensor]:
    """[output, gradient of every floating input] under a fixed, uneven cotangent."""
    out = function(inputs)
    cotangent = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs.differentiable(), cotangent)]


def assert_matches_reference(function: Callable[[Inputs], Tensor], inputs: Inputs, gate: Gate = swiglu) -> list[Tensor]:
    """Holds output and all gradients of a function against the oracle; returns them.

    The budget comes from the data: what the per-token loop loses when it runs in the same dtype, doubled because sums
    may run in another order, plus two roundings of the largest value.
    """
    actual = run_with_gradients(function, inputs)
    oracle = run_with_gradients(lambda i: per_token(i, gate), inputs.to(torch.float64))
    naive = run_with_gradients(lambda i: per_token(i, gate), inputs.to(inputs.x.dtype))
    for index, (got, exact, rounded) in enumerate(zip(actual, oracle, naive, strict=True)):
        assert got.shape == exact.shape
        assert got.dtype == rounded.dtype
        if exact.numel() == 0:
            continue
        loss = (rounded.double() - exact).abs().max()
        budget = 2 * loss + 2 * torch.finfo(got.dtype).eps * exact.abs().max()
        error = (got.double() - exact).abs().max()
        assert error <= budget, f"result {index}: error {error:.3g}, budget {budget:.3g}"
    return actual
