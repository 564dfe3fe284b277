"""Makes a lowering of one function: a user's kernel for the grouped product, or for a whole experts block.

    def linear(rows_NI, weight, bias, offsets_E, transposed): ...       lower_linears("mine", linear)
    def experts(x_TD, ids_TK, weights_TK, up, up_bias, ...): ...        lower_block("mine", experts)

The function is traced where the block stands, like every other lowering: a `torch.library` op in it stays one node of
the graph, anything else is seen by the compiler. What it returns is checked there, on fake tensors, against what the
block needs.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moe_compile.errors import KernelResultError, RewriteError
from moe_compile.ops import drop_sentinel_rows
from moe_compile.passes.blocks import CanonicalBlock, Lowered, fake_value, is_quantised, needs_gradient, op_arguments
from moe_compile.passes.lower_grouped_mm import combine_sorted, dispatch_sorted
from moe_compile.passes.match_gate import Gate, match_gate
from moe_compile.passes.region import find_region
from moe_compile.passes.splice import replace_node, splice

Linear = Callable[[Tensor, Tensor, Tensor | None, Tensor, bool], Tensor]
Lowering = Callable[[GraphModule, CanonicalBlock], Lowered]


def lower_linears(name: str, linear: Linear) -> Lowering:
    """Lowers each projection to a function; rows are sorted and summed as for `grouped_mm`.

    Args:
        name: the experts backend, for reports and errors.
        linear: maps rows (N, I) in the weight's dtype, sorted by expert, the weight (E, O, I), or (E, I, O) when
            `transposed`, the bias (E, O) or None, and where each expert's rows end (E,) int32, to (N, O) in the
            weight's dtype. What it leaves past the last end is masked. A module-level function.
    """

    def lower(gm: GraphModule, block: CanonicalBlock) -> Lowered:
        dispatch = op_arguments(block.dispatch)
        inputs = dispatch["x"], dispatch["ids"]
        tensors: tuple[Node | None, ...]
        rows, offsets, order, ids = splice(
            gm, block.dispatch, dispatch_sorted, inputs, num_experts=dispatch["num_experts"]
        )
        for node in block.linears:
            given = op_arguments(node)
            tensors = given["rows"], given["weight"], given["bias"], offsets
            (product,) = splice(gm, node, _checked_linear, tensors, linear=linear, transposed=given["transposed"])
            require_like(name, product, node)
            replace_node(node, product)
        for node in block.combines:
            given = op_arguments(node)
            tensors = given["rows"], given["weights"], order, None if given["offsets"] is None else offsets
            (summed,) = splice(gm, node, combine_sorted, tensors, dtype=given["dtype"])
            replace_node(node, summed)
        for getitems, result in ((block.rows, rows), (block.offsets, offsets), (block.order, order)):
            for node in getitems:
                node.replace_all_uses_with(result)
                node.graph.erase_node(node)
        for node in (block.dispatch, ids):
            node.graph.erase_node(node)
        return Lowered(name)

    return lower


def lower_block(name: str, experts: Callable[..., Tensor]) -> Lowering:
    """Lowers a whole block, dispatch to combine, to one function.

    Args:
        name: the experts backend, for reports and errors.
        experts: maps x (T, D), ids (T, K), routing weights (T, K), both projections and their biases (or None) to
            (T, D), with the keywords `gate` ("silu", "gelu", "gelu_tanh", "relu"), `concatenated`, `transposed`,
            `dtype`, that of the result, and `training`. A module-level function.

    Returns:
        A lowering that raises `RewriteError` for blocks with anything else between or behind the projections.
    """

    def lower(gm: GraphModule, block: CanonicalBlock) -> Lowered:
        region = find_region(block)
        gate = region if isinstance(region, str) else match_gate(gm, region)
        if isinstance(gate, Gate) and gate.limit is not None:
            gate = f"the gate clamps its parts to {gate.limit}"
        if any(map(is_quantised, block.linears)):
            gate = "its weights are quantised"
        if isinstance(region, str) or isinstance(gate, str):
            raise RewriteError(
                f"lowering an experts block to {name}",
                f"{name} runs the whole block in one kernel, and {gate}",
                "Use an experts backend that lowers projection by projection, such as grouped_mm",
            )
        (combine,) = block.combines
        dispatch, up, down, last = map(op_arguments, (block.dispatch, region.up, region.down, combine))
        matrices = up["weight"], up["bias"], down["weight"], down["bias"]
        tensors = dispatch["x"], dispatch["ids"], last["weights"], *matrices
        (result,) = splice(
            gm,
            combine,
            experts,
            tensors,
            gate=gate.kind,
            concatenated=gate.concatenated,
            transposed=up["transposed"],
            dtype=last["dtype"],
            training=needs_gradient(region.up),
        )
        require_like(name, result, combine)
        replace_node(combine, result)
        erase_block(block, region.nodes)
        return Lowered(name)

    return lower


def erase_block(block: CanonicalBlock, between: tuple[Node, ...]) -> None:
    """Erases what is left of a block once nothing reads its result; `between` are the nodes between its projections."""
    up, down = block.linears
    for node in (down, *reversed(between), up, *block.rows, *block.offsets, *block.order, block.dispatch):
        node.graph.erase_node(node)


def require_like(name: str, result: Node, wanted: Node) -> None:
    """Holds what a kernel's function returns against the node that it replaces.

    Raises:
        KernelResultError: if shape, dtype or device differ.
    """
    found, needed = fake_value(result), fake_value(wanted)
    same_shape = found.dim() == needed.dim() and all(
        _is_same_size(a, b) for a, b in zip(found.shape, needed.shape, strict=True)
    )
    if same_shape and found.dtype == needed.dtype and found.device == needed.device:
        return
    raise KernelResultError(
        f"the kernel of {name}",
        f"it returns {tuple(found.shape)} {found.dtype} on {found.device} where the experts block needs "
        f"{tuple(needed.shape)} {needed.dtype} on {needed.device}",
        "Repair its fake function and what it returns",
    )


def _is_same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes agree, without adding a guard: T may be one symbol for the tokens and another for their ids."""
    hints = [size.node.hint if isinstance(size, torch.SymInt) else size for size in (a, b)]
    return statically_known_true(a == b) or (isinstance(a, torch.SymInt) and hints[0] == hints[1] is not None)


def _checked_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, offsets_E: Tensor, linear: Linear, transposed: bool
) -> Tensor:
    out = linear(rows.to(weight.dtype), weight, bias, offsets_E, transposed)
    return drop_sentinel_rows(out, offsets_E) if out.dim() == 2 else out
