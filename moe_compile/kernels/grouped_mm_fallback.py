"""Grouped matrix product for whatever the native kernel refuses: `moe::grouped_mm_fallback`.

    out[start:end] = rows[start:end] @ weight[e]        for every expert e, with (start, end) from the offsets

1. Read the offsets on the host, once.
2. One dense product per expert that has rows, written in place into the output.
3. Zero what no product wrote: rows past the last offset, and dW of experts without rows.
4. The backward is an op of its own, so that no compiler unrolls the loop over experts.

Bound by the dense products where an expert has many rows, else by reading the weights and by one launch per expert.
Legend: N rows, E experts, I input and O output features.
"""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from moe_compile.errors import BlockInputError
from moe_compile.ops import groups

_FORWARD = "moe::grouped_mm_fallback"
_BACKWARD = "moe::grouped_mm_fallback_backward"

# AOTAutograd's cache keys a custom op by its name and arguments, but what it stores has the op's autograd formula
# traced into it: after an edit or an upgrade the old formula would still be served. The source's hash as an argument
# makes it another key. It has no other use, so a stale one in a cached graph is harmless.
DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]

torch.library.define(_FORWARD, "(Tensor rows, Tensor weight, Tensor offsets, str digest) -> Tensor")
torch.library.define(
    _BACKWARD,
    "(Tensor grad, Tensor rows, Tensor weight, Tensor offsets, bool needs_rows, bool needs_weight) -> (Tensor, Tensor)",
)


def grouped_mm_fallback(rows_NI: Tensor, weight_EIO: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiplies each expert's rows by its weight; the same contract as `grouped_mm`, without its preconditions.

    Args:
        rows_NI: (N, I), sorted by expert, floating.
        weight_EIO: (E, I, O) in the rows' dtype; any strides, so a transposed view costs nothing.
        offsets_E: (E,) int32 or int64, where each expert's rows end.

    Returns:
        (N, O) in the rows' dtype, contiguous. Rows past `offsets_E[-1]` are zero, and so is their gradient.

    Raises:
        BlockInputError: if shapes or dtypes do not fit together.
    """
    return torch.ops.moe.grouped_mm_fallback(rows_NI, weight_EIO, offsets_E, DIGEST)


def _check(rows: Tensor, weight: Tensor, offsets: Tensor) -> None:
    fits = (
        rows.dim() == 2
        and weight.dim() == 3
        and offsets.dim() == 1
        and rows.shape[1] == weight.shape[1]
        and offsets.shape[0] == weight.shape[0]
    )
    if not fits:
        found = f"got rows {tuple(rows.shape)}, weight {tuple(weight.shape)} and offsets {tuple(offsets.shape)}"
        raise BlockInputError(_FORWARD, found, "Pass rows (N, I), weight (E, I, O) and offsets (E,)")
    if rows.dtype != weight.dtype or offsets.dtype not in (torch.int32, torch.int64):
        found = f"got rows {rows.dtype}, weight {weight.dtype} and offsets {offsets.dtype}"
        raise BlockInputError(_FORWARD, found, "Pass rows in the weight's dtype and integer offsets")


@torch.library.impl(_FORWARD, "CompositeExplicitAutograd")
def _forward(rows_NI: Tensor, weight_EIO: Tensor, offsets_E: Tensor, digest: str) -> Tensor:
    _check(rows_NI, weight_EIO, offsets_E)
    out_NO = rows_NI.new_empty(rows_NI.shape[0], weight_EIO.shape[2])
    ranges = groups(offsets_E)
    for expert, (start, end) in enumerate(ranges):
        if start < end:
            torch.mm(rows_NI[start:end], weight_EIO[expert], out=out_NO[start:end])
    out_NO[ranges[-1][1] :].zero_()
    return out_NO


@torch.library.register_fake(_FORWARD)
def _forward_fake(rows_NI: Tensor, weight_EIO: Tensor, offsets_E: Tensor, digest: str) -> Tensor:
    _check(rows_NI, weight_EIO, offsets_E)
    return rows_NI.new_empty(rows_NI.shape[0], weight_EIO.shape[2])


@torch.library.impl(_BACKWARD, "CompositeExplicitAutograd")
def _backward(
    grad_NO: Tensor, rows_NI: Tensor, weight_EIO: Tensor, offsets_E: Tensor, needs_rows: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    grad_rows, grad_weight = _empty_gradients(rows_NI, weight_EIO, needs_rows, needs_weight)
    ranges = groups(offsets_E)
    for expert, (start, end) in enumerate(ranges):
        if needs_rows and start < end:
            torch.mm(grad_NO[start:end], weight_EIO[expert].T, out=grad_rows[start:end])
        if needs_weight and start < end:
            torch.mm(rows_NI[start:end].T, grad_NO[start:end], out=grad_weight[expert])
        elif needs_weight:
            grad_weight[expert].zero_()
    if needs_rows:
        grad_rows[ranges[-1][1] :].zero_()
    return grad_rows, grad_weight


@torch.library.register_fake(_BACKWARD)
def _backward_fake(
    grad_NO: Tensor, rows_NI: Tensor, weight_EIO: Tensor, offsets_E: Tensor, needs_rows: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    return _empty_gradients(rows_NI, weight_EIO, needs_rows, needs_weight)


def _empty_gradients(
    rows_NI: Tensor, weight_EIO: Tensor, needs_rows: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Where the gradients go; nothing for one that is not asked for, as a frozen weight's would be gigabytes."""
    # The weight's own layout, so that the gradient of a transposed view needs no copy to become its parameter's.
    grad_weight = torch.empty_like(weight_EIO) if needs_weight else weight_EIO.new_empty(0)
    return rows_NI.new_empty(rows_NI.shape if needs_rows else 0), grad_weight


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    rows_NI, weight_EIO, offsets_E, _ = inputs
    ctx.save_for_backward(rows_NI, weight_EIO, offsets_E)


def _derivative(ctx, grad_NO):  # type: ignore[no-untyped-def]
    needs_rows, needs_weight = ctx.needs_input_grad[:2]
    grad_rows, grad_weight = torch.ops.moe.grouped_mm_fallback_backward(
        grad_NO, *ctx.saved_tensors, needs_rows, needs_weight
    )
    return grad_rows if needs_rows else None, grad_weight if needs_weight else None, None, None


torch.library.register_autograd(_FORWARD, _derivative, setup_context=_setup)
