"""Spells out the einsums that experts are written with, so that recognisers meet products and sums.

    einsum("td,tkfd->tkf", x, w)   ->   bmm(w.flatten(0, 1), x repeated K times in a row, as columns)
    einsum("td,edf->tef", x, w)    ->   bmm(x repeated E times, w), with the axes moved
    einsum("tkd,tk->td", y, p)     ->   (y * p.unsqueeze(-1)).sum(1)

For the normal form alone, which is never run: torch's own decomposition moves axes around until nothing can be told.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def spelled_out(equation: Any, *operands: Any) -> Tensor | None:
    """The value of an einsum of two operands, None if it is of no such kind."""
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
    for kind in (_weighted_sum, _product, _all_experts):
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
    """Values times weights of fewer axes, summed over one of these."""
    summed = [letter for letter in weights if letter not in out]
    if len(weights) < 2 or len(weights) >= len(values) or len(summed) != 1 or not set(weights) <= set(values[:-1]):
        return None
    if out != values.replace(summed[0], ""):
        return None
    p = p.permute([weights.index(letter) for letter in values if letter in weights])
    for axis, letter in enumerate(values):
        if letter not in weights:
            p = p.unsqueeze(axis)
    return (y * p).sum(values.index(summed[0]))


def _all_experts(rows: str, x: Tensor, matrix: str, w: Tensor, out: str) -> Tensor | None:
    """Every expert's matrix times all rows: one letter of the matrix is left alone, one is summed, one is new."""
    summed = [letter for letter in matrix if letter in rows and letter not in out]
    new = [letter for letter in matrix if letter not in rows and letter in out]
    if len(matrix) != 3 or len(summed) != 1:
        return None
    # The experts come first, by habit; where rows have an axis of experts already, that decides.
    experts = next((letter for letter in matrix if letter in rows and letter in out), matrix[0])
    features = [letter for letter in new if letter != experts]
    tokens = [letter for letter in rows if letter not in (experts, summed[0])]
    if len(features) != 1 or not tokens or sorted(out) != sorted([experts, *tokens, features[0]]) or experts not in out:
        return None
    if experts not in rows:
        x, rows = x.unsqueeze(0).expand(w.shape[matrix.index(experts)], *x.shape), experts + rows
    x = x.permute([rows.index(letter) for letter in (experts, *tokens, summed[0])])
    w = w.permute([matrix.index(letter) for letter in (experts, summed[0], features[0])])
    sizes = x.shape[1:-1]
    y = torch.bmm(x.reshape(x.shape[0], -1, x.shape[-1]), w).view(x.shape[0], *sizes, -1)
    order = (experts, *tokens, features[0])
    return y.permute([order.index(letter) for letter in out])


def _product_with_all(x: Any, w: Any) -> Tensor | None:
    """One set of rows times each matrix of a stack, which torch would turn into one large product."""
    if not isinstance(x, Tensor) or not isinstance(w, Tensor) or w.dim() != 3 or x.dim() not in (2, 3):
        return None
    if x.dim() == 3 and not (isinstance(x.shape[0], int) and x.shape[0] == 1):
        return None
    return torch.bmm(x.expand(w.shape[0], *x.shape[-2:]), w)


SPELLERS: dict[str, Callable[..., Tensor | None]] = {"einsum": spelled_out, "matmul": _product_with_all}
"""By the name of an operation: its value, spelled out, or None where that changes nothing."""
