"""The gathered form: each pair with its own copy of its expert's weight.

    rows = x.repeat_interleave(K, 0); ids = ids.reshape(-1)    rows, offsets, order = dispatch(x, ids, E)
    h = bmm(w_up[ids], rows[:, :, None])[:, :, 0] + b[ids] ->  h = grouped_linear(rows, w_up, b, offsets, False)
    y = bmm(w_down[ids], gate(h)[:, :, None])[:, :, 0]         y = grouped_linear(gate(h), w_down, None, ...)
    y = y * weights.reshape(-1)[:, None]                       out = combine(y, weights, order, dtype)
    out = y.view(T, K, D).sum(1)

transformers' `batched_mm` experts are of this form. Nothing is sorted: what runs side by side along pairs belongs
together by position. Ids that were clamped send sentinels to a real expert, so their rows must become zeros later on.
"""

from typing import Any

from torch.fx import Node

from moe_compile.passes.block import Block, Projection, Rule, arguments, aten, rule
from moe_compile.passes.facts import Fact, same_size, shape_of
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.rowwise import VIEWS, labels_of

RULES: dict[Any, list[Rule]] = {}


@rule(RULES, aten.index.Tensor)
def _parameter_of_expert(block: Block, node: Node) -> Fact | None:
    base, indices = arguments(node)
    ids = block.fact(indices[0]) if indices and len(indices) == 1 else None
    if ids is None or ids.kind != "ids" or not block.is_outside(base):
        return None
    return _parameter(block, node, base, ids)


@rule(RULES, aten.index_select.default)
def _selected_parameter_of_expert(block: Block, node: Node) -> Fact | None:
    base, dim, index = arguments(node)
    ids = block.fact(index)
    if ids is None or ids.kind != "ids" or dim != 0 or not block.is_outside(base):
        return None
    return _parameter(block, node, base, ids)


def _parameter(block: Block, node: Node, base: Node, ids: Fact) -> Fact:
    if len(shape_of(base)) < 2 or not base.meta["val"].is_floating_point():
        raise NotProvenError(f"{node.name} looks the expert ids up in a table", node)
    block.expect_experts(shape_of(base)[0], node)
    if ids.clamped and ids.labels != ("S",):
        block.needs_masking.append((node, "gives the rows of ids beyond the last expert to a real one"))
    return Fact("parameter", (*ids.labels, *(None,) * (len(shape_of(base)) - 1)), base=base)


@rule(RULES, aten.add.Tensor)
def _bias(block: Block, node: Node) -> Fact | None:
    operands = arguments(node)[:2]
    sides = [(a, b) for a, b in (operands, operands[::-1]) if block.kind(b) == "parameter"]
    if len(sides) != 1:
        return None
    product, bias = sides[0]
    fact, projection = block.facts[bias], block.projections.get(squeezed(block, product))
    if projection is None or projection.bias is not None or node.kwargs.get("alpha", 1) != 1:
        raise NotProvenError("add mixes rows with a parameter that differs between experts, and is no bias", node)
    if fact.labels != labels_of(block, product) or len(fact.labels) != 2:
        raise NotProvenError(f"{node.name} adds a bias in another order than the rows", node)
    if node.meta["val"].dtype != projection.weight.meta["val"].dtype:
        raise NotProvenError(f"{node.name} adds a bias of a wider dtype than the weight's", node)
    assert fact.base is not None
    block.projections[node] = Projection(projection.rows, projection.weight, projection.transposed, fact.base)
    return Fact("rows", fact.labels)


def squeezed(block: Block, node: Node) -> Node:
    """The product behind a view that drops its axis of size one."""
    targets = (*VIEWS, aten.squeeze.dim, aten.select.int, aten.slice.Tensor)
    while node not in block.projections and node.target in targets:
        source = arguments(node)[0]
        if not same_size(source.meta["val"].numel(), node.meta["val"].numel()):
            break
        node = source
    return node


@rule(RULES, aten.bmm.default)
def _product_with_own_weight(block: Block, node: Node) -> Fact | None:
    left, right = arguments(node)
    kinds = block.kind(left), block.kind(right)
    if "parameter" not in kinds:
        return None
    weight, rows = (left, right) if kinds[0] == "parameter" else (right, left)
    column = -1 if weight is left else 1
    fact = block.facts[weight]
    if fact.labels != ("N", None, None) or kinds[0] == kinds[1]:
        raise NotProvenError(f"{node.name} multiplies weights that are not gathered one per pair", node)
    labels = labels_of(block, rows)
    if block.kind(rows) not in ("rows", None) or (block.kind(rows) == "rows" and labels != fact.labels):
        raise NotProvenError(f"{node.name} multiplies each pair's weight with rows in another order", node)
    if not same_size(shape_of(rows)[column], 1):
        raise NotProvenError(f"{node.name} multiplies each pair's weight with more than one row", node)
    # weight @ column reads (out, in) as it stands, row @ weight reads (in, out).
    assert fact.base is not None
    transposed = (weight is right) ^ fact.swapped
    block.projections[node] = Projection(rows, fact.base, transposed, column=column)
    return Fact("rows", fact.labels)
