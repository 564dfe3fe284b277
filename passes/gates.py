"""Rules for the matrix of routing weights, (T, E), whatever form reads it.

    scores = zeros(T, E).scatter(1, ids, weights)              gates, 0 off the top-k
    logits.masked_fill(~marks, -inf).softmax(-1)               gates, minus infinity, then 0
    scores[:, e]                                               expert e's column
    (weights * (ids == e)).sum(-1)                             the same, from the weights themselves

It is followed through whatever is done to it, together with the number that it has off the top-k. Its other numbers are
read back with `gather`, so that they need no proof.
"""

import math
from dataclasses import replace
from typing import Any

from torch.fx import Node

from moe_compile.passes.block import Block, Rule, arguments, aten, is_constant_fill, rule
from moe_compile.passes.facts import Fact, is_tensor, is_tokens, same_size, shape_of
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.rowwise import keeps_axes, reduced_axes, shape_equal, value_at

RULES: dict[Any, list[Rule]] = {}


@rule(RULES, aten.scatter.src, aten.scatter.value)
def _scatter_weights(block: Block, node: Node) -> Fact | None:
    base, dim, ids, values = arguments(node)
    fact = block.fact(ids)
    if fact is None or fact.kind != "ids" or fact.clamped or fact.labels[-1:] != ("K",) or not block.is_outside(base):
        return None
    shape = shape_of(base)
    tokens = len(shape) == len(fact.labels) and all(map(same_size, shape[:-1], shape_of(ids)[:-1]))
    off = constant(base)
    if dim % len(shape) != len(shape) - 1 or not tokens or off is None or not block.is_open(values):
        return None
    block.expect_experts(shape[-1], node)
    _require_distinct(block, node)
    return Fact("gates", (*fact.labels[:-1], "E"), off=off)


def constant(value: Any) -> float | None:
    """The number that a value is, or is filled with."""
    if isinstance(value, int | float):
        return float(value)
    return next((number for number in (0.0, -math.inf) if is_constant_fill(value, number)), None)


def _require_distinct(block: Block, node: Node) -> None:
    if not block.distinct:
        raise NotProvenError(f"{node.name} takes an expert once, however often a token names it", node)


def _as_gates(fact: Fact) -> Fact:
    return Fact("gates", fact.labels) if fact.kind == "onehot" and "K" not in fact.labels else fact


@rule(RULES, aten.sum.dim_IntList, aten.any.dim, aten.amax.default)
def _over_slots(block: Block, node: Node) -> Fact | None:
    """A mark or weight of each pair, along tokens and experts."""
    source = arguments(node)[0]
    fact = block.fact(source)
    if fact is None or fact.kind not in ("onehot", "gates", "slots") or "K" not in fact.labels:
        return None
    axes = reduced_axes(node, len(fact.labels))
    # What one expert's numbers are is read off their source, so nothing but a sum may have been made of them.
    if {fact.labels[axis] for axis in axes} != {"K"} or (fact.base and node.target is not aten.sum.dim_IntList):
        return None
    _require_distinct(block, node)
    kept = keeps_axes(node)
    labels = [None if axis in axes else lb for axis, lb in enumerate(fact.labels) if kept or axis not in axes]
    return Fact("gates", tuple(labels), expert=fact.expert, base=fact.base)


@rule(RULES, aten.mul.Tensor, aten.div.Tensor)
def _weighted_marks(block: Block, node: Node) -> Fact | None:
    """Marks or weights times numbers from outside: zero where they were."""
    first, second = arguments(node)[:2]
    facts = [block.fact(first), block.fact(second)]
    for fact, source, other, reverse in ((facts[0], first, second, False), (facts[1], second, first, True)):
        if fact is None or fact.kind not in ("gates", "onehot", "slots", "mask") or fact.off != 0:
            continue
        if reverse and node.target is aten.div.Tensor:
            continue
        if fact.kind in ("mask", "slots"):
            found = _slots(block, node, fact, other)
            if found is not None:
                return found
            continue
        other_fact = block.fact(other)
        same = other_fact is not None and other_fact.kind in ("gates", "onehot") and other_fact.labels == fact.labels
        keeps_shape = all(map(same_size, shape_of(node), shape_of(source))) and len(shape_of(node)) == len(fact.labels)
        if keeps_shape and (not is_tensor(other) or other_fact is None or same) and fact.expert is None:
            return replace(fact, kind="gates") if "K" not in fact.labels else Fact("gates", fact.labels)
    return None


def _slots(block: Block, node: Node, fact: Fact, weights: Any) -> Fact | None:
    """`(ids == e) * weights`, with one weight per pair."""
    own = [label for label in fact.labels if label is not None]
    flat = is_tensor(weights) and block.is_outside(weights) and shape_equal(weights, node)
    if fact.kind != "mask" or own[-1:] != ["K"] or not is_tokens(tuple(own[:-1])) or not flat:
        return None
    return Fact("slots", fact.labels, expert=fact.expert, base=weights)


@rule(RULES, aten.where.self, aten.where.ScalarOther)
def _chosen_weights(block: Block, node: Node) -> Fact | None:
    """`where(mask, weights, 0)`."""
    mask, weights, other = arguments(node)
    fact = block.fact(mask)
    off = (
        other
        if isinstance(other, int | float)
        else next((v for v in (0.0, -math.inf) if is_constant_fill(other, v)), None)
    )
    if fact is None or off is None or fact.off != 0:
        return None
    if fact.kind == "mask" and off == 0:
        return _slots(block, node, fact, weights)
    fact = _as_gates(fact)
    is_matrix = fact.kind == "gates" and fact.expert is None and shape_equal(mask, node) and block.is_open(weights)
    return replace(fact, off=off) if is_matrix else None


@rule(RULES, aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _filled_weights(block: Block, node: Node) -> Fact | None:
    """`weights.masked_fill(~mask, -inf)`."""
    weights, mask, value = arguments(node)
    fact = block.fact(mask)
    off = (
        value
        if isinstance(value, int | float)
        else next((v for v in (0.0, -math.inf) if is_constant_fill(value, v)), None)
    )
    if fact is None or fact.kind != "gates" or fact.off != 1 or off is None or not shape_equal(mask, node):
        return None
    return replace(fact, off=off) if block.is_open(weights) and fact.expert is None else None


@rule(
    RULES,
    aten.bitwise_not.default,
    aten.logical_not.default,
    aten.sigmoid.default,
    aten.exp.default,
    aten.gt.Scalar,
    aten.ne.Scalar,
    aten.eq.Scalar,
    aten.relu.default,
    aten.sub.Tensor,
    aten.add.Tensor,
    aten.rsub.Scalar,
)
def _mapped(block: Block, node: Node) -> Fact | None:
    """One number after the other, with nothing beside them."""
    tensors = [operand for operand in node.all_input_nodes if is_tensor(operand)]
    fact = block.fact(tensors[0]) if len(tensors) == 1 else None
    if fact is None or fact.kind not in ("gates", "onehot") or fact.expert is not None or "K" in fact.labels:
        return None
    if node.target in (aten.bitwise_not.default, aten.logical_not.default):
        off: float | None = float(not fact.off)
    else:
        off = value_at(node, {tensors[0]: fact.off})
    return None if off is None or math.isnan(off) else Fact("gates", fact.labels, off=off)


@rule(RULES, aten._softmax.default)
def _softmax(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "gates" or fact.off != -math.inf:
        return None
    return replace(fact, off=0.0) if fact.labels[int(arguments(node)[1]) % len(fact.labels)] == "E" else None


@rule(RULES, aten.select.int)
def _column(block: Block, node: Node) -> Fact | None:
    """One expert's weights, as a column of the matrix."""
    source, dim, number = arguments(node)
    fact = block.fact(source)
    if fact is None or fact.kind != "gates" or fact.expert is not None or fact.off != 0 or "K" in fact.labels:
        return None
    axis = int(dim) % len(fact.labels)
    if fact.labels[axis] != "E" or not isinstance(number, int):
        return None
    labels = tuple(lb for i, lb in enumerate(fact.labels) if i != axis)
    return Fact("gates", labels, expert=number % int(shape_of(source)[axis]), base=source)


@rule(RULES, aten.slice.Tensor)
def _thick_column(block: Block, node: Node) -> Fact | None:
    source = arguments(node)[0]
    fact = block.fact(source)
    if fact is None or fact.kind != "gates":
        return None
    if shape_equal(node, source):
        return fact
    axis, start = int(arguments(node)[1]) % len(fact.labels), arguments(node)[2]
    single = fact.labels[axis] == "E" and same_size(shape_of(node)[axis], 1) and isinstance(start, int)
    if not single or fact.expert is not None or fact.off != 0:
        return None
    labels = tuple(None if i == axis else lb for i, lb in enumerate(fact.labels))
    return Fact("gates", labels, expert=start % int(shape_of(source)[axis]), base=source)


@rule(RULES, aten.unbind.int, aten.split.Tensor)
def _columns(block: Block, node: Node) -> tuple[Fact | None, ...] | None:
    source = arguments(node)[0]
    fact = block.fact(source)
    if fact is None or fact.kind != "gates" or fact.expert is not None or fact.off != 0:
        return None
    unbinds = node.target is aten.unbind.int
    dims = arguments(node)[1 if unbinds else 2 :]
    axis = int(dims[0] if dims else 0) % len(fact.labels)
    if fact.labels[axis] != "E" or (not unbinds and arguments(node)[1] != 1):
        return None
    labels = tuple(None if i == axis else lb for i, lb in enumerate(fact.labels) if i != axis or not unbinds)
    return tuple(Fact("gates", labels, expert=e, base=source) for e in range(len(node.meta["val"])))
