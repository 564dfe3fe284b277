"""Spells out the two einsums that gathered experts are written with, so that recognisers meet products and sums.

    einsum("td,tkfd->tkf", x, w)   ->   bmm(w.flatten(0, 1), x repeated K times in a row, as columns)
    einsum("tkd,tk->td", y, p)     ->   (y * p.unsqueeze(-1)).sum(1)

For the normal form alone, which is never run: torch's own decomposition moves axes around until nothing can be told.
"""

from typing import Any

import torch
from torch import Tensor


def spelled_out(equation: Any, *operands: Any) -> Tensor | None:
    """The value of an einsum of two operands, None if it is of neither kind."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return None
    inputs, out = equation.replace(" ", "").split("->")
    first, second = inputs.split(",")
    if any(len(set(letters)) != len(letters) for letters in (first, second, out)):
        return None
    pairs = ((first, operands[0]), (second, operands[1]))
    # A weighted sum is a product as well, of one matrix per token; as a sum it is what it was meant to be.
    for kind in (_weighted_sum, _product):
        for (narrow, small), (wide, large) in (pairs, pairs[::-1]):
            result = kind(narrow, small, wide, large, out)
            if result is not None:
                return result
    return None


def _product(rows: str, x: Tensor, matrix: str, w: Tensor, out: str) -> Tensor | None:
    """Each batch entry's own matrix times its row: the batch comes first everywhere, one letter is summed over."""
    batch, feature = out[:-1], out[-1:]
    summed = rows[-1:]
    if not batch or matrix not in (batch + feature + summed, batch + summed + feature) or feature in rows:
        return None
    shared = rows[:-1]
    if summed in out or not shared or not batch.startswith(shared):
        return None
    for _ in batch[len(shared) :]:
        x = x.unsqueeze(-2)
    sizes = w.shape[: len(batch)]
    columns = x.expand(*sizes, x.shape[-1]).reshape(-1, x.shape[-1]).unsqueeze(-1)
    flat = w.reshape(-1, *w.shape[len(batch) :])
    flat = flat if matrix.endswith(summed) else flat.transpose(1, 2)
    return torch.bmm(flat, columns).squeeze(-1).view(*sizes, -1)


def _weighted_sum(weights: str, p: Tensor, values: str, y: Tensor, out: str) -> Tensor | None:
    """Values times weights of fewer axes, summed over the last of these."""
    if not values.startswith(weights) or len(weights) < 2 or out != values.replace(weights[-1], ""):
        return None
    for _ in values[len(weights) :]:
        p = p.unsqueeze(-1)
    return (y * p).sum(len(weights) - 1)
