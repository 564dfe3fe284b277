"""SonicMoE's grouped products (CuteDSL, by way of QuACK), as the opaque ops `moe_sonicmoe::experts` and `::linear`.

    forward    h = x[tokens] @ up[e],  a = gate(h)      one product; gathers rows itself, the gate is its epilogue
               y = a @ down[e]
               out[t] = sum_k weights[t, k] * y[position[t, k]]
    backward   dh, s*a, ds = dgate(dout[tokens] @ down[e]^T, h, s)      one product; recomputes a, reduces ds
               ddown[e] = (s*a)^T @ dout[tokens],  dx_rows = dh @ up[e]^T,  dup[e] = dh^T @ x[tokens]

What is kept for the backward is h alone: neither y nor a. Pairs are sorted here, with those that belong to no expert
behind all others, so the kernels never see them. Weights are views of what the model stores; halves that are
concatenated are read as interleaved by a stride, which works where they are rows of the stored matrix. Of transposed
weights they are columns, and those take `::linear`, a product without the gate.

Legend: T tokens, K experts per token, N = T*K pairs, E experts, D model, F expert size, I input and O output features.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_compile.errors import BlockInputError
from moe_compile.kernels.external.loading import load_kernel, require_result
from moe_compile.kernels.external.rows import combine_rows, place_rows, sort_pairs, sum_expert_rows

NAME = "sonicmoe"

# What the kernel calls the gate made of an activation. Its GeGLU takes gelu's tanh form.
GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "relu": "reglu"}

_EXPERTS, _EXPERTS_BACKWARD = "moe_sonicmoe::experts", "moe_sonicmoe::experts_backward"
_LINEAR, _LINEAR_BACKWARD = "moe_sonicmoe::linear", "moe_sonicmoe::linear_backward"
_REFERENCE = "CompositeExplicitAutograd"

# AOTAutograd's cache keys an op by its name and arguments, but stores its derivative; an edit has to make another key.
DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]

_BLOCK = "Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias"
_LAYOUT = "str gate, bool concatenated, bool transposed"
torch.library.define(
    _EXPERTS,
    f"({_BLOCK}, {_LAYOUT}, ScalarType dtype, bool training, bool tuned, str digest)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    _EXPERTS_BACKWARD,
    f"(Tensor grad, {_BLOCK}, Tensor preact, Tensor order, Tensor ends, {_LAYOUT}, bool tuned)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    _LINEAR,
    "(Tensor rows, Tensor weight, Tensor? bias, Tensor ends, bool transposed, bool tuned, str digest) -> Tensor",
)
torch.library.define(
    _LINEAR_BACKWARD,
    "(Tensor grad, Tensor rows, Tensor weight, Tensor ends, bool transposed, bool has_bias, bool tuned)"
    " -> (Tensor, Tensor, Tensor)",
)


def experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *,
    gate: str,
    concatenated: bool,
    transposed: bool,
    dtype: torch.dtype,
    training: bool,
    tuned: bool,
) -> Tensor:
    """Runs a whole experts block.

    Args:
        x_TD: (T, D) bf16.
        ids_TK: (T, K) int32 or int64; ids outside [0, E) contribute nothing.
        weights_TK: (T, K), floating.
        up: (E, 2F, D), or (E, D, 2F) when transposed; bf16.
        up_bias: (E, 2F) or None.
        down: (E, D, F), or (E, F, D) when transposed; bf16.
        down_bias: (E, D) or None.
        gate: one of `GATES`, of the first part of the projection, times the second.
        concatenated: the parts are halves, else interleaved; halves need weights that are not transposed.
        transposed: layout of both weights.
        dtype: of the result.
        training: keep what a backward needs.
        tuned: let the library try its tile sizes at the first call with these shapes, which takes minutes.

    Returns:
        (T, D).

    Raises:
        BlockInputError: if shapes, dtypes or layout do not fit.
        KernelLoadError, KernelResultError: for a kernel that cannot be loaded, or returns something else.
    """
    return torch.ops.moe_sonicmoe.experts(
        x_TD, ids_TK, weights_TK, up, up_bias, down, down_bias, gate, concatenated, transposed, dtype, training, tuned,
        DIGEST,
    )[0]  # fmt: skip


def linear(
    rows_NI: Tensor, weight: Tensor, bias: Tensor | None, ends_E: Tensor, transposed: bool, tuned: bool
) -> Tensor:
    """Multiplies each expert's rows by its weight.

    Args:
        rows_NI: (N, I) bf16, sorted by expert.
        weight: (E, O, I), or (E, I, O) when transposed; bf16.
        bias: (E, O) or None.
        ends_E: (E,) int32.
        transposed: layout of the weight.
        tuned: as for `experts`.

    Returns:
        (N, O); rows past the last end are not written, nor is their gradient.
    """
    return torch.ops.moe_sonicmoe.linear(rows_NI, weight, bias, ends_E, transposed, tuned, DIGEST)


# The whole block ------------------------------------------------------------------------------------------------------


def _check_block(
    x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: str, cat: bool, tr: bool
) -> None:
    size, inner = (down.shape[2], down.shape[1]) if tr else (down.shape[1], down.shape[2])
    up_shape = (down.shape[0], size, 2 * inner) if tr else (down.shape[0], 2 * inner, size)
    fits = (
        x.dim() == ids.dim() == weights.dim() == 2
        and ids.shape == weights.shape
        and x.shape[0] == ids.shape[0]
        and tuple(up.shape) == tuple(up_shape)
        and x.shape[1] == size
    )
    if not fits or not x.dtype == up.dtype == down.dtype == torch.bfloat16 or gate not in GATES or (cat and tr):
        raise BlockInputError(
            _EXPERTS,
            f"got x {tuple(x.shape)} {x.dtype}, ids {tuple(ids.shape)}, up {tuple(up.shape)} {up.dtype}, down "
            f"{tuple(down.shape)} {down.dtype}, gate {gate!r}, concatenated={cat}, transposed={tr}",
            "Pass bfloat16 x (T, D), up (E, 2F, D) and down (E, D, F), or both transposed and interleaved",
        )


@torch.library.impl(_EXPERTS, _REFERENCE)
def _experts(
    x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
    gate: str, concatenated: bool, transposed: bool, dtype: torch.dtype, training: bool, tuned: bool, digest: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check_block(x, ids, weights, up, down, gate, concatenated, transposed)
    num_experts, top_k, n = up.shape[0], ids.shape[1], ids.numel()
    inner = down.shape[1 if transposed else 2]
    order, ends = sort_pairs(ids, num_experts)
    preact = x.new_empty(n if training else 0, 2 * inner)
    if n == 0:
        return x.new_zeros(x.shape, dtype=dtype), preact, order, ends
    tokens, position, bounds = place_rows(order, ends, top_k)
    functions = load_kernel(NAME).functions
    act, y = x.new_empty(n, inner), x.new_empty(n, x.shape[1])
    halves = (("B", "bias") if up_bias is not None else ("B",)) if concatenated else None
    _, returned = functions["functional.forward.gemm_gated"](
        _rows(x), _in_out(up, transposed), activation=GATES[gate], cu_seqlens_m=bounds, A_idx=tokens,
        preact_out=preact if training else None, postact_out=act, store_preact=training, bias=up_bias, tuned=tuned,
        concat_layout=halves,
    )  # fmt: skip
    act = require_result(NAME, "gemm_gated", returned, act)
    y = _gemm(act, _in_out(down, transposed), y, bias=down_bias, cu_seqlens_m=bounds, tuned=tuned)
    return combine_rows(y, weights, position, top_k, dtype), preact, order, ends


@torch.library.register_fake(_EXPERTS)
def _experts_fake(
    x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
    gate: str, concatenated: bool, transposed: bool, dtype: torch.dtype, training: bool, tuned: bool, digest: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check_block(x, ids, weights, up, down, gate, concatenated, transposed)
    n = ids.shape[0] * ids.shape[1]
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(n if training else 0, 2 * down.shape[1 if transposed else 2]),
        x.new_empty(n, dtype=torch.int32),
        x.new_empty(up.shape[0], dtype=torch.int32),
    )


@torch.library.impl(_EXPERTS_BACKWARD, _REFERENCE)
def _experts_gradients(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, preact: Tensor, order: Tensor, ends: Tensor, gate: str, concatenated: bool,
    transposed: bool, tuned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grads = _empty_gradients(x, weights, up, up_bias, down, down_bias)
    n, top_k, num_experts = ids.numel(), ids.shape[1], up.shape[0]
    if n == 0:
        return tuple(g.zero_() for g in grads)  # type: ignore[return-value]
    _, dweights, dup, dup_bias, ddown, ddown_bias = grads
    tokens, position, bounds = place_rows(order, ends, top_k)
    functions = load_kernel(NAME).functions
    grad = _rows(grad.to(x.dtype))
    scale = weights.reshape(-1).float()[order.long()]
    dpreact, act = torch.empty_like(preact), x.new_empty(n, preact.shape[1] // 2)
    _, _, returned = functions["functional.backward.gemm_dgated"](
        grad, _in_out(down, not transposed), PreAct=preact, activation=GATES[gate], dx_out=dpreact, postact_out=act,
        colvec_scale=scale, colvec_reduce=True, cu_seqlens_m=bounds, A_idx=tokens, dynamic_scheduler=False, tuned=tuned,
    )  # fmt: skip
    dscale = require_result(NAME, "gemm_dgated", returned, scale)
    kept = (position >= 0).view(weights.shape)
    dscale = dscale[position.clamp(min=0).long()].view(weights.shape)
    if down_bias is not None:
        known = torch.where(kept, ids, 0).long()
        dscale = dscale + (grad.float() @ down_bias.float().T).gather(1, known)
        routing = x.new_zeros(x.shape[0], num_experts, dtype=torch.float32)
        routing.scatter_add_(1, known, torch.where(kept, weights.float(), 0))
        ddown_bias.copy_(routing.T @ grad.float())
    dweights.copy_(torch.where(kept, dscale, 0))
    ddown_out = _in_out(ddown, not transposed)
    _gemm(grad.T, act, ddown_out, cu_seqlens_k=bounds, A_idx=tokens, dynamic_scheduler=False, tuned=tuned)
    if up_bias is not None:
        sums = sum_expert_rows(dpreact, ends, up_bias.dtype)  # interleaved, as the kernel keeps them
        dup_bias.copy_(sums.view(num_experts, -1, 2).transpose(1, 2).flatten(1) if concatenated else sums)
    rows = _gemm(
        dpreact, _in_out(up, not transposed), torch.empty_like(x).new_empty(n, x.shape[1]), cu_seqlens_m=bounds,
        dynamic_scheduler=False, tuned=tuned, concat_layout=("B",) if concatenated else None,
    )  # fmt: skip
    _gemm(
        _rows(x).T, dpreact, _in_out(dup, transposed), cu_seqlens_k=bounds, A_idx=tokens, dynamic_scheduler=False,
        tuned=tuned, concat_layout=("out",) if concatenated else None,
    )  # fmt: skip
    return combine_rows(rows, None, position, top_k, x.dtype), dweights, dup, dup_bias, ddown, ddown_bias


@torch.library.register_fake(_EXPERTS_BACKWARD)
def _experts_gradients_fake(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, preact: Tensor, order: Tensor, ends: Tensor, gate: str, concatenated: bool,
    transposed: bool, tuned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_gradients(x, weights, up, up_bias, down, down_bias)


def _empty_gradients(
    x: Tensor, weights: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = (x, weights, up, up_bias, down, down_bias)
    grads = tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in tensors)
    return grads  # type: ignore[return-value]


def _experts_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, gate, concatenated, transposed, _, _, tuned, _ = inputs
    _, preact, order, ends = output
    ctx.save_for_backward(*tensors, preact, order, ends)
    ctx.settings = gate, concatenated, transposed, tuned
    ctx.mark_non_differentiable(preact, order, ends)


def _experts_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, preact, order, ends = ctx.saved_tensors
    found = torch.ops.moe_sonicmoe.experts_backward(grad, *tensors, preact, order, ends, *ctx.settings)
    dx, dweights, dup, dup_bias, ddown, ddown_bias = found
    with_bias = (None if tensors[4] is None else dup_bias), (None if tensors[6] is None else ddown_bias)
    return dx, None, dweights, dup, with_bias[0], ddown, with_bias[1], *([None] * 7)


torch.library.register_autograd(_EXPERTS, _experts_backward, setup_context=_experts_setup)


# One projection -------------------------------------------------------------------------------------------------------


@torch.library.impl(_LINEAR, _REFERENCE)
def _linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, transposed: bool, tuned: bool, digest: str
) -> Tensor:
    out = rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])
    if rows.shape[0] == 0:
        return out
    return _gemm(_rows(rows), _in_out(weight, transposed), out, bias=bias, cu_seqlens_m=_bounds(ends), tuned=tuned)


@torch.library.register_fake(_LINEAR)
def _linear_fake(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, transposed: bool, tuned: bool, digest: str
) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])


@torch.library.impl(_LINEAR_BACKWARD, _REFERENCE)
def _linear_gradients(
    grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool, has_bias: bool, tuned: bool
) -> tuple[Tensor, Tensor, Tensor]:
    drows, dweight, dbias = _linear_gradients_fake(grad, rows, weight, ends, transposed, has_bias, tuned)
    if rows.shape[0] == 0:
        return drows, dweight.zero_(), dbias.zero_()
    grad, bounds = _rows(grad), _bounds(ends)
    if has_bias:
        dbias = sum_expert_rows(grad, ends, dbias.dtype)
    _gemm(grad, _in_out(weight, not transposed), drows, cu_seqlens_m=bounds, dynamic_scheduler=False, tuned=tuned)
    out = _in_out(dweight, transposed)
    _gemm(_rows(rows).T, grad, out, cu_seqlens_k=bounds, dynamic_scheduler=False, tuned=tuned)
    return drows, dweight, dbias


@torch.library.register_fake(_LINEAR_BACKWARD)
def _linear_gradients_fake(
    grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool, has_bias: bool, tuned: bool
) -> tuple[Tensor, Tensor, Tensor]:
    bias_shape = (weight.shape[0], grad.shape[1]) if has_bias else (0,)
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape), weight.new_empty(bias_shape)


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, bias, ends, transposed, tuned, _ = inputs
    ctx.save_for_backward(rows, weight, ends)
    ctx.settings = transposed, bias is not None, tuned


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    drows, dweight, dbias = torch.ops.moe_sonicmoe.linear_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return drows, dweight, dbias if ctx.settings[1] else None, None, None, None, None


torch.library.register_autograd(_LINEAR, _linear_backward, setup_context=_linear_setup)


# Shared ---------------------------------------------------------------------------------------------------------------


def _gemm(a: Tensor, b: Tensor, out: Tensor, **settings: Any) -> Tensor:
    returned = load_kernel(NAME).functions["functional.forward.gemm"](a, b, out=out, **settings)
    return require_result(NAME, "gemm", returned, out)


def _in_out(weight: Tensor, transposed: bool) -> Tensor:
    """A weight as (E, in, out), a view."""
    return weight if transposed else weight.transpose(1, 2)


def _rows(tensor: Tensor) -> Tensor:
    """Rows whose features are dense."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _bounds(ends_E: Tensor) -> Tensor:
    return torch.nn.functional.pad(ends_E, (1, 0))
