"""What is known about a value of the normal form, and how axes travel through views and broadcasts.

    ids        (T, K)   expert of each pair          order    (S)  pair at each sorted position
    hidden     (T, D)   outside, no fact             rows     (S, None)  x[order // K]: axis 0 counts sorted rows

Every axis of a value that has a fact is labelled with what it counts, or None for features:

    T   tokens; T0, T1, ... if they take several axes       S    sorted positions; S<e> those of expert e, P of all
    K   slots                                               C    positions in the order in which pieces were joined
    N   pairs, t*K + k                                      E    experts; ET every token, once for each expert
    R<e>  the pairs of expert e, in their order; R<e>@ those that a matrix of marks keeps
    M   the entries that such a matrix keeps, token by token

A label speaks of positions, not of contents. A value without a fact comes from outside the block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import Tensor
from torch.fx import Node

Label = str | None
Size = int | torch.SymInt

Kind = Literal[
    "ids",  # expert of each pair
    "pair",  # flat index t*K + k of a pair
    "token",  # t of a pair
    "slot",  # k of a pair
    "inverse",  # sorted position of a pair
    "onehot",  # one_hot(ids): an axis "E"
    "mask",  # ids == e
    "positions",  # nonzero of a mask, one column per axis of it
    "sentinel",  # ids >= E
    "gates",  # one number per token and expert, the same wherever the token does not go to the expert
    "slots",  # a number per pair where the pair goes to one expert, else zero
    "hit",  # whether an expert has tokens at all
    "turn",  # place among the entries of a matrix of marks, for each sorted position
    "counts",  # pairs per expert
    "offsets",  # cumulated counts
    "count",  # pairs of one expert
    "end",  # pairs of the experts up to one
    "parameter",  # weight[ids]: what an expert owns, per pair
    "rows",  # depends, along its labelled axes, on nothing but the same pair
    "read",  # out[token], to be added to
    "update",  # out[token] + rows, on its way back to out[token]
    "output",  # summed over slots, by some of the experts or all
]


@dataclass(frozen=True)
class Fact:
    """What a value is.

    Attributes:
        kind: see `Kind`.
        labels: one per axis.
        expert: of a mask, of positions, of a count or an end, and of a part of the sorted positions.
        columns: of positions: label of each column's axis.
        clamped: ids that had sentinels pressed into the range of real experts.
        exact: counts that leave sentinels out, whatever the ids.
        base: parameter: the stacked weight. read, update: of where. output: what was there before, if not zeros.
            gates, slots: where one expert's numbers were taken from.
        swapped: parameter: its last two axes are exchanged.
        parts: update and output: (expert, its rows); -1 stands for all experts at once.
        off: gates: the number where a token does not go to an expert.
        sparse: rows along tokens and experts that are zero where a token does not go to an expert.
    """

    kind: Kind
    labels: tuple[Label, ...]
    expert: int | None = None
    columns: tuple[Label, ...] = ()
    clamped: bool = False
    exact: bool = True
    base: Node | None = None
    swapped: bool = False
    parts: tuple[tuple[int, Node], ...] = ()
    off: float = 0.0
    sparse: bool = False


def expression(size: Size) -> Any:
    """A size as a sympy expression in canonical form."""
    if isinstance(size, torch.SymInt):
        return sympy.expand(size.node.expr)
    return size if isinstance(size, sympy.Basic) else sympy.Integer(size)


def same_size(left: Size, right: Size) -> bool:
    """Whether two sizes are equal for every input; adds no guard."""
    return bool(expression(left) == expression(right))


def shape_of(node: Node) -> tuple[Size, ...]:
    """The shape of a value of the normal form: the fake one, or what was found out about it since."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    sizes: tuple[Size, ...] = node.meta.get(SIZES) or tuple(value.shape)
    return sizes


SIZES = "sizes"
"""Where a node keeps a shape in which sizes that were found to be equal are written alike."""


def is_tensor(node: Any) -> bool:
    """Whether an argument is a tensor-valued node."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def broadcast_labels(
    operands: Sequence[tuple[tuple[Size, ...], tuple[Label, ...]]], result: tuple[Size, ...]
) -> tuple[Label, ...] | None:
    """Labels of an elementwise result.

    Args:
        operands: (shape, labels) of each; values from outside have labels of None only.
        result: the shape of the result.

    Returns:
        The labels; None if two axes that count different things would run side by side, or one row become many.
    """
    rank = max(len(shape) for shape, _ in operands)
    labels: list[Label] = [None] * rank
    for shape, own in operands:
        for axis, label in enumerate(own, start=rank - len(shape)):
            if label is None:
                continue
            if labels[axis] not in (None, label) or not same_size(shape[axis - rank + len(shape)], result[axis]):
                return None
            labels[axis] = label
    for axis, label in enumerate(labels):
        # A value from outside may run along pairs, tokens and slots, whose positions mean the same everywhere, and
        # never along rows in expert order.
        if label is None or label in "TKN":
            continue
        for shape, own in operands:
            at = axis - (rank - len(shape))
            if at >= 0 and own[at] is None and not same_size(shape[at], 1):
                return None
    return tuple(labels)


def view_labels(
    before: tuple[Size, ...], labels: tuple[Label, ...], after: tuple[Size, ...], top_k: int
) -> tuple[Label, ...] | None:
    """Labels of a reshaped value: axes are matched from the left in the smallest groups of equal size.

    Returns:
        The labels; None if a labelled axis would be cut or mixed, tokens and slots becoming pairs (and back) aside.
    """
    result: list[Label] = []
    i = j = 0
    while i < len(before) or j < len(after):
        start_i, start_j = i, j
        left, right = sympy.Integer(1), sympy.Integer(1)
        if i < len(before):
            left, i = expression(before[i]), i + 1
        if j < len(after):
            right, j = expression(after[j]), j + 1
        while left != right:
            grow_left = _is_smaller(left, right)
            if grow_left and i < len(before):
                left, i = sympy.expand(left * expression(before[i])), i + 1
            elif not grow_left and j < len(after):
                right, j = sympy.expand(right * expression(after[j])), j + 1
            else:
                return None
        # With one slot per token, (T, 1) and (N,) have the same size: the slot belongs to the group all the same.
        if top_k == 1 and labels[start_i:i] == ("T",) and labels[i : i + 1] == ("K",) and j - start_j == 1:
            keeps_slot = j < len(after) and same_size(after[j], 1)
            if not keeps_slot:
                i += 1
        group = _group_labels(before[start_i:i], labels[start_i:i], after[start_j:j], top_k)
        if group is None:
            return None
        result += group
    return tuple(result)


def _group_labels(
    before: tuple[Size, ...], labels: tuple[Label, ...], after: tuple[Size, ...], top_k: int
) -> list[Label] | None:
    named = [label for label in labels if label is not None]
    if not named:
        return [None] * len(after)
    if labels == ("T", "K") and len(after) == 1:
        return ["N"]
    if labels == ("N",) and len(after) == 2 and same_size(after[1], top_k):
        return ["T", "K"]
    if labels == ("E", "T") and len(after) == 1:
        return ["ET"]
    if labels == ("ET",) and len(after) == 2:
        return ["E", "T"]
    others_in = [size for size, label in zip(before, labels, strict=True) if label is None]
    if is_tokens(tuple(named)) and after and all(same_size(size, 1) for size in others_in):
        return token_labels(after)
    # Axes of size one may come and go beside a single labelled axis; any other would mix with it.
    wide_out = [axis for axis, size in enumerate(after) if not same_size(size, 1)]
    if len(named) > 1 or len(wide_out) > 1 or not after or not all(same_size(size, 1) for size in others_in):
        return None
    out: list[Label] = [None] * len(after)
    out[wide_out[0] if wide_out else 0] = named[0]
    return out


def token_labels(sizes: Sequence[Size]) -> list[Label]:
    """Labels of axes that together run along all tokens; axes of size one count nothing."""
    wide = [axis for axis, size in enumerate(sizes) if not same_size(size, 1)] or [0]
    names = {axis: "T" if len(wide) == 1 else f"T{place}" for place, axis in enumerate(wide)}
    return [names.get(axis) for axis in range(len(sizes))]


def wide(labels: tuple[Label, ...]) -> tuple[Label, ...]:
    """The labels of axes that count something."""
    return tuple(label for label in labels if label is not None)


def is_tokens(labels: tuple[Label, ...]) -> bool:
    """Whether some axes are those of all tokens, one axis or several."""
    return labels == ("T",) or (len(labels) > 1 and labels == tuple(f"T{axis}" for axis in range(len(labels))))


def _is_smaller(left: Any, right: Any) -> bool:
    if left.is_Integer and right.is_Integer:
        return bool(left < right)
    if left.is_Integer or right.is_Integer:
        return bool(left.is_Integer)
    return bool(sympy.denom(sympy.cancel(right / left)) == 1)
