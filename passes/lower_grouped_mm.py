"""Lowers a canonical block to a sort and one grouped matrix product per projection.

    rows, offsets, order = dispatch(x, ids, E)   ->   sorted, order = sort(ids); offsets = searchsorted(sorted, 0..E-1)
                                                      rows = x[order // K]
    h = grouped_linear(rows, w, bias, offsets)   ->   h = grouped_mm(rows, w^T, offsets) + bias[sorted]
    y = combine(h, weights, order)               ->   y = (h[inverse] * weights).view(T, K, O).sum(1)

Each projection is the native kernel if its real preconditions hold (`native_reasons`), else `grouped_mm_fallback`,
which computes the same. Nothing here reads a value on the host.

The native kernel leaves rows past the last offset uninitialised, in its output and in the gradient of its rows. Both
are masked with `where`, which drops a NaN where a product with zero would keep it; Inductor fuses the masks into the
gather, the gate and the combine.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moe_compile.kernels.grouped_mm_fallback import grouped_mm_fallback
from moe_compile.kernels.native_grouped_mm import describe_call, native_reasons
from moe_compile.ops import drop_sentinel_rows, invert, weighted_sum
from moe_compile.passes.blocks import CanonicalBlock, Lowered, fake_value, needs_gradient, op_arguments
from moe_compile.passes.splice import replace_node, splice
from moe_compile.spec import ExpertsSpec

NATIVE = "grouped_mm"
FALLBACK = "grouped_mm_fallback"


@dataclass(frozen=True)
class GroupedMMOutcome:
    """What the projections of a block are lowered to.

    Attributes:
        name: "grouped_mm", or "grouped_mm_fallback" if any projection takes the fallback.
        reasons: per projection, in graph order, why the native kernel cannot run it; empty where it does.
    """

    name: str
    reasons: tuple[tuple[str, ...], ...]


def predict_grouped_mm(block: CanonicalBlock) -> GroupedMMOutcome:
    """Says what `lower_grouped_mm` will do to a block, from the graph's metadata alone; changes nothing."""
    reasons = tuple(map(_reasons, block.linears))
    return GroupedMMOutcome(FALLBACK if any(reasons) else NATIVE, reasons)


def predict_from_spec(
    spec: ExpertsSpec, *, device_type: str, capability: tuple[int, int] | None = None, training: bool = False
) -> GroupedMMOutcome | None:
    """Says what would become of a block that is only described, with contiguous weights, on any device.

    Args:
        spec: the block.
        device_type: "cpu", "cuda", ...
        capability: CUDA compute capability, None elsewhere.
        training: whether gradients will be asked for.

    Returns:
        The outcome under torch.compile with this torch, or None if the spec leaves a size or the dtype open.
    """
    if None in (spec.num_experts, spec.hidden_size, spec.intermediate_size, spec.weight_dtype):
        return None
    experts, hidden, inner = cast(tuple[int, int, int], (spec.num_experts, spec.hidden_size, spec.intermediate_size))
    reasons = []
    for size_in, size_out in ((hidden, 2 * inner if spec.gated else inner), (inner, hidden)):
        stored = (experts, size_in, size_out) if spec.transposed else (experts, size_out, size_in)
        weight = torch.empty(stored, dtype=spec.weight_dtype, device="meta")
        call = describe_call(weight, transposed=spec.transposed, training=training)
        reasons.append(native_reasons(replace(call, device_type=device_type, capability=capability)))
    return GroupedMMOutcome(FALLBACK if any(reasons) else NATIVE, tuple(reasons))


def lower_grouped_mm(gm: GraphModule, block: CanonicalBlock) -> Lowered:
    """Replaces a block's canonical ops in place; the caller lints and recompiles.

    Args:
        gm: the root graph module.
        block: a block of it.

    Returns:
        The outcome that `predict_grouped_mm` predicts, with why the native kernel does not run where it does not.
    """
    outcome = predict_grouped_mm(block)
    dispatch = op_arguments(block.dispatch)
    inputs = dispatch["x"], dispatch["ids"]
    rows, offsets, order, ids = splice(gm, block.dispatch, dispatch_sorted, inputs, num_experts=dispatch["num_experts"])
    for linear, reasons in zip(block.linears, outcome.reasons, strict=True):
        arguments = op_arguments(linear)
        weight, bias = arguments["weight"], arguments["bias"]
        tensors = arguments["rows"], weight, bias, offsets, None if bias is None else ids
        layout = {"transposed": arguments["transposed"], "training": needs_gradient(linear)}
        (product,) = splice(gm, linear, _fallback if reasons else _native, tensors, **layout)
        replace_node(linear, product)
    for combine in block.combines:
        arguments = op_arguments(combine)
        tensors = arguments["rows"], arguments["weights"], order, None if arguments["offsets"] is None else offsets
        (summed,) = splice(gm, combine, combine_sorted, tensors, dtype=arguments["dtype"])
        replace_node(combine, summed)
    for getitems, result in ((block.rows, rows), (block.offsets, offsets), (block.order, order)):
        for node in getitems:
            node.replace_all_uses_with(result)
            node.graph.erase_node(node)
    block.dispatch.graph.erase_node(block.dispatch)
    if not ids.users:  # without a bias; exported programs run what is dead
        ids.graph.erase_node(ids)
    refused = dict.fromkeys(reason for reasons in outcome.reasons for reason in reasons)
    return Lowered(outcome.name, {NATIVE: "; ".join(refused)} if refused else {})


def dispatch_sorted(x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, top_k = ids_TK.shape
    ids_N = ids_TK.reshape(num_tokens * top_k)
    sentinel_N = (ids_N < 0) | (ids_N >= num_experts)
    # int32 keys: half the passes of a radix sort.
    sorted_N, order_N = torch.sort(ids_N.masked_fill(sentinel_N, num_experts).int(), stable=True)
    # Where each expert's rows end, from the sorted ids: exact integers, without atomics or a pass through floats, and
    # sentinels, which sort behind every expert, are left out by themselves.
    experts_E = torch.arange(num_experts, dtype=torch.int32, device=ids_N.device)
    offsets_E = torch.searchsorted(sorted_N, experts_E, right=True, out_int32=True)
    return x_TD[order_N // top_k], offsets_E, order_N, sorted_N.clamp(max=num_experts - 1)


def _native(
    rows_NI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets_E: Tensor,
    ids_N: Tensor | None,
    transposed: bool,
    training: bool,
) -> Tensor:
    rows_NI = rows_NI.to(weight.dtype)
    if training:
        rows_NI = drop_sentinel_rows(rows_NI, offsets_E)  # for the derivative of `where`, which masks the gradient
    weight_EIO = weight if transposed else weight.transpose(1, 2)
    out_NO = torch.nn.functional.grouped_mm(_contiguous(rows_NI), weight_EIO, offs=offsets_E)
    if bias is not None:
        out_NO = out_NO + bias[ids_N]
    out_NO = drop_sentinel_rows(out_NO, offsets_E)
    return _with_contiguous_gradient(out_NO) if training else out_NO


def _fallback(
    rows_NI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets_E: Tensor,
    ids_N: Tensor | None,
    transposed: bool,
    training: bool,
) -> Tensor:
    out_NO = grouped_mm_fallback(rows_NI.to(weight.dtype), weight if transposed else weight.transpose(1, 2), offsets_E)
    if bias is None:
        return out_NO
    return drop_sentinel_rows(out_NO + bias[ids_N], offsets_E)


def combine_sorted(
    rows_NO: Tensor, weights_TK: Tensor, order_N: Tensor, offsets_E: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if offsets_E is not None:
        rows_NO = drop_sentinel_rows(rows_NO, offsets_E)
    return weighted_sum(rows_NO, weights_TK, invert(order_N), dtype)


def _contiguous(rows: Tensor) -> Tensor:
    """Copies rows that are not known to be contiguous: `where` keeps the order of its input's strides.

    `Tensor.contiguous` would ask, and so guard on, symbolic sizes.
    """
    known = statically_known_true(rows.stride(1) == 1) and statically_known_true(rows.stride(0) == rows.shape[1])
    return rows if known else rows.clone(memory_format=torch.contiguous_format)


def _with_contiguous_gradient(out: Tensor) -> Tensor:
    """Views that cancel out, but whose derivative reshapes, and so copies a gradient of any other strides.

    The kernel refuses a transposed or expanded gradient, and what follows the projection decides which one comes.
    """
    return out.view(-1).view(out.shape)


def _reasons(linear: Node) -> tuple[str, ...]:
    arguments = op_arguments(linear)
    weight = fake_value(arguments["weight"])
    training = needs_gradient(linear)
    return native_reasons(describe_call(weight, transposed=arguments["transposed"], training=training))
