"""Lowers a canonical block to DeepGEMM's grouped products.

    rows, offsets, order = dispatch(x, ids, E)   ->  padded, layout, position, ends = moe_deepgemm::dispatch(x, ...)
    h = grouped_linear(rows, w, bias, offsets)   ->  h = moe_deepgemm::grouped_gemm(padded, w, layout, ends)
    ... gate(h)                                  ->  the same operators, on padded rows
    y = grouped_linear(gate(h), w, bias, ...)    ->  y = moe_deepgemm::grouped_gemm(...)
    combine(y, weights, order)                   ->  moe_deepgemm::combine(y, weights, position)

Rows stay at their padded places from the dispatch to the combine, so tokens are copied once and nothing is copied back:
what stands between the projections treats each row on its own. Where something else reads the rows (a routing weight on
the input, a second use), each projection pads and unpads for itself.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from moe_compile.errors import RewriteError
from moe_compile.kernels.external import deepgemm
from moe_compile.passes.blocks import CanonicalBlock, Lowered, fake_value, is_quantised, op_arguments
from moe_compile.passes.lower_with_kernel import erase_block, lower_linears, require_like
from moe_compile.passes.region import Region, find_region
from moe_compile.passes.splice import replace_node, splice

_RESHAPING = ("view", "reshape", "flatten", "as_strided")


def lower_deepgemm(gm: GraphModule, block: CanonicalBlock) -> Lowered:
    """Replaces a block's canonical ops in place; the caller lints and recompiles.

    Args:
        gm: the root graph module.
        block: a block of it.

    Returns:
        The outcome "deepgemm".

    Raises:
        RequirementError, KernelLoadError: if DeepGEMM cannot be loaded, which happens here at first.
    """
    deepgemm.alignment()
    region = find_region(block)
    if not isinstance(region, str) and _takes_other_rows(block, region) and _lower_padded(gm, block, region):
        return Lowered(deepgemm.NAME)
    if any(map(is_quantised, block.linears)):
        raise RewriteError(
            "lowering a quantised experts block to deepgemm",
            region if isinstance(region, str) else "what stands between its projections depends on the number of rows",
            "Leave it to the model's own code, with experts='eager'",
        )
    return lower_linears(deepgemm.NAME, _linear)(gm, block)


def _takes_other_rows(block: CanonicalBlock, region: Region) -> bool:
    """Whether nothing between the projections speaks of the number of pairs N or of tokens T."""
    dispatch = op_arguments(block.dispatch)
    num_tokens, top_k = fake_value(dispatch["ids"]).shape
    counts = (num_tokens, num_tokens * top_k)
    for other in region.others:
        value = fake_value(other)
        if not isinstance(value, Tensor) or any(statically_known_true(s == n) for s in value.shape for n in counts):
            return False
    # A view could turn a constant number of rows into features; any other use of it fails to fit the padded rows.
    reshaping = [node for node in region.nodes if any(word in str(node.target) for word in _RESHAPING)]
    return not any(isinstance(a, int) and a in counts for node in reshaping for a in pytree.tree_leaves(node.args))


def _lower_padded(gm: GraphModule, block: CanonicalBlock, region: Region) -> bool:
    dispatch, down = map(op_arguments, (block.dispatch, region.down))
    (combine,) = block.combines
    last = op_arguments(combine)
    graph = combine.graph
    existing = set(graph.nodes)
    padded, layout, position, ends = splice(
        gm,
        region.up,
        _dispatch,
        (dispatch["x"], dispatch["ids"]),
        num_experts=dispatch["num_experts"],
        dtype=torch.bfloat16,
    )
    (h,) = _splice_linear(gm, region.up, padded, layout, ends)
    try:
        (hidden,) = splice(gm, region.down, region.function, (h, *region.others))
    except (RuntimeError, ValueError, TypeError):  # it does depend on the number of rows
        hidden = None
    if hidden is None or not _is_padded(hidden, padded, down):
        for node in [node for node in graph.nodes if node not in existing][::-1]:
            graph.erase_node(node)
        return False
    (y,) = _splice_linear(gm, region.down, hidden, layout, ends)
    (result,) = splice(gm, combine, deepgemm.combine, (y, last["weights"], position), dtype=last["dtype"])
    require_like(deepgemm.NAME, result, combine)
    replace_node(combine, result)
    erase_block(block, region.nodes)
    return True


def _splice_linear(gm: GraphModule, linear: Node, padded: Node, layout: Node, ends: Node) -> tuple[Node, ...]:
    given = op_arguments(linear)
    if is_quantised(linear):
        tensors = padded, given["weight"], given["scale"], layout, ends
        return splice(gm, linear, deepgemm.quantised_gemm, tensors)
    tensors = padded, given["weight"], given["bias"], layout, ends
    return splice(gm, linear, _padded_linear, tensors, transposed=given["transposed"])


def _is_padded(hidden: Node, padded: Node, down: dict[str, object]) -> bool:
    size = fake_value(down["rows"]).shape[1]  # type: ignore[arg-type]
    shape, wanted = fake_value(hidden).shape, (fake_value(padded).shape[0], size)
    return len(shape) == 2 and all(statically_known_true(a == b) for a, b in zip(shape, wanted, strict=True))


def _dispatch(x_TD: Tensor, ids_TK: Tensor, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return deepgemm.dispatch(x_TD, ids_TK, num_experts, deepgemm.alignment(), dtype)


def _padded_linear(
    padded: Tensor, weight: Tensor, bias: Tensor | None, layout_M: Tensor, ends_E: Tensor, transposed: bool
) -> Tensor:
    padded = padded.to(weight.dtype)
    if not statically_known_true(padded.stride(1) == 1) or not statically_known_true(
        padded.stride(0) == padded.shape[1]
    ):
        padded = padded.clone(memory_format=torch.contiguous_format)
    out = deepgemm.grouped_gemm(padded, weight, layout_M, ends_E, transposed)
    return out if bias is None else out + bias[layout_M.clamp(min=0).long()]


def _at(rows_MO: Tensor, position_N: Tensor) -> Tensor:
    """The rows at some places; zero for the place -1, as what stands there may be uninitialised."""
    picked = rows_MO[position_N.clamp(min=0).long()]
    return torch.where((position_N >= 0).unsqueeze(1), picked, 0)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets_E: Tensor, transposed: bool) -> Tensor:
    padded, layout, position, ends = deepgemm.pad(rows, offsets_E, deepgemm.alignment(), weight.dtype)
    return _at(_padded_linear(padded, weight, bias, layout, ends, transposed), position)
