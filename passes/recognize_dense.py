"""The dense form: every expert on every token, and weights that are zero for all experts but a token's own.

    scores = zeros(T, E).scatter(1, ids, weights)              rows, offsets, order = dispatch(x, ids, E)
    h = bmm(x.repeat(E, 1).view(E, T, D), w_up)           ->   h = grouped_linear(rows, w_up, None, offsets, True)
    y = bmm(gate(h), w_down)                                   y = grouped_linear(gate(h), w_down, None, ...)
    out = (y * scores.t()[..., None]).sum(0)                   out = combine(y, scores.gather(1, ids), order, dtype)

gpt-oss and Llama 4 are of this form, and so are einsums over all experts, loops that add `scores[:, e, None] *
expert(x)`, and stacks of every expert's output. It is sparse only if the weights are: they must have been scattered
from the top-k into zeros, or into minus infinity in front of a softmax or sigmoid, or be masked by the very ids. A
softmax over all experts has no zeros, and such a block keeps its code.

`gates.py` follows the matrix of weights. Where it is zero, the product with it is zero too, and so is what an expert
without biases makes of it when it multiplies the expert's input.
"""

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moe_compile.passes.block import Block, Projection, Rule, arguments, aten, is_arange, is_constant_fill, rule
from moe_compile.passes.facts import Fact, Label, is_tensor, is_tokens, same_size, shape_of
from moe_compile.passes.gates import constant
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.recognize_grouped_mm import untransposed
from moe_compile.passes.rowwise import keeps_axes, labels_of, reduced_axes, shape_equal

RULES: dict[Any, list[Rule]] = {}


# Every expert on every token -----------------------------------------------------------------------------------------


@rule(RULES, aten.repeat.default)
def _repeat(block: Block, node: Node) -> Fact | None:
    """`x.repeat(E, 1)`: all tokens once for each expert."""
    source, times = arguments(node)
    fact = block.fact(source)
    if fact is None or fact.kind != "rows" or not block.dense or not block.num_experts:
        return None
    new = len(times) - len(fact.labels)
    before = [*[None] * new, *fact.labels]
    grown = [axis for axis, count in enumerate(times) if count != 1]
    experts = block.num_experts[0][0]
    if len(grown) != 1 or times[grown[0]] != experts:
        raise NotProvenError(f"{node.name} repeats rows", node)
    axis = grown[0]
    if before[axis] == "T" and "E" not in before:
        labels: list[Label] = ["ET" if i == axis else lb for i, lb in enumerate(before)]
    else:
        turns = block.turns(node, before, [*[1] * new, *shape_of(source)])
        if turns is None:
            raise NotProvenError(f"{node.name} repeats rows", node)
        labels = turns
    block.passed[node] = source
    return replace(fact, labels=tuple(labels))


@rule(RULES, aten.bmm.default, aten.baddbmm.default)
def _all_experts_product(block: Block, node: Node) -> Fact | None:
    *bias, rows, weight = arguments(node)
    fact = block.fact(rows)
    grid = fact is not None and fact.kind == "rows" and fact.labels in (("E", "T", None), ("E", "T0", None))
    if fact is None or not grid or not block.is_outside(weight) or node.kwargs:
        return None
    block.expect_experts(shape_of(weight)[0], node)
    if bias and not _is_bias(block, bias[0], node, ("E", "T", None)):
        raise NotProvenError("baddbmm adds more than a bias per expert", node)
    stacked, transposed = untransposed(weight)
    block.projections[node] = Projection(rows, stacked, transposed, bias[0] if bias else None)
    return replace(fact, sparse=fact.sparse and not bias)


@rule(RULES, aten.add.Tensor)
def _all_experts_bias(block: Block, node: Node) -> Fact | None:
    if node.kwargs:
        return None
    for product, bias in (arguments(node)[:2], arguments(node)[1::-1]):
        projection = block.projections.get(_projected(block, product))
        if projection is None or not block.is_outside(bias) or not shape_equal(product, node):
            continue
        fact = block.facts[product]
        if "E" not in fact.labels or not _is_bias(block, bias, node, fact.labels):
            continue
        if projection.bias is not None or node.meta["val"].dtype != projection.weight.meta["val"].dtype:
            raise NotProvenError(f"{node.name} adds a second bias, or one of a wider dtype than the weight's", node)
        block.projections[node] = Projection(projection.rows, projection.weight, projection.transposed, bias)
        return replace(fact, sparse=False)
    return None


def _projected(block: Block, node: Any) -> Any:
    """The product behind a change of axes."""
    moves = (aten.permute.default, aten.transpose.int, aten.view.default, aten._unsafe_view.default)
    while isinstance(node, Node) and node not in block.projections and node.target in moves and node in block.facts:
        source = arguments(node)[0]
        if sorted(filter(None, block.facts[node].labels)) != sorted(filter(None, labels_of(block, source))):
            break
        if not same_size(shape_of(node)[-1], shape_of(source)[-1]):
            break
        node = source
    return node


def _is_bias(block: Block, bias: Node, node: Node, labels: tuple[Label, ...]) -> bool:
    """Whether a value has one vector of features per expert, and stands beside the experts' axis."""
    shape = shape_of(bias)
    own = labels[len(labels) - len(shape) :]
    sizes = [same_size(size, 1) for size in shape]
    beside = [axis for axis, label in enumerate(own[:-1]) if label == "E"]
    others = [axis for axis in range(len(shape) - 1) if axis not in beside]
    if len(beside) != 1 or not all(sizes[axis] for axis in others):
        return False
    experts = same_size(shape[beside[0]], block.num_experts[0][0]) if block.num_experts else False
    return block.is_outside(bias) and experts and same_size(shape[-1], shape_of(node)[-1])


@rule(RULES, aten.gather.default)
def _gather_outputs(block: Block, node: Node) -> Fact | None:
    """Of every expert's output, those of a token's own experts."""
    rows, dim, ids = arguments(node)[:3]
    fact, index = block.fact(rows), block.fact(ids)
    if fact is None or index is None or fact.kind != "rows" or index.kind != "ids" or "E" not in fact.labels:
        return None
    axis = fact.labels.index("E")
    expected = tuple("K" if label == "E" else label for label in fact.labels)
    sizes = enumerate(zip(shape_of(rows), shape_of(node), strict=True))
    whole = all(same_size(before, after) for place, (before, after) in sizes if place != axis)
    if int(dim) % len(fact.labels) != axis or index.labels != expected or not whole or index.clamped:
        raise NotProvenError(f"{node.name} picks other outputs than those of a token's own experts", node)
    block.passed[node] = rows
    return Fact("rows", expected)


@rule(RULES, aten.index.Tensor)
def _index_outputs(block: Block, node: Node) -> Fact | None:
    """`outputs[arange(T)[:, None], ids]`."""
    rows, indices = arguments(node)
    fact = block.fact(rows)
    if fact is None or fact.kind != "rows" or fact.labels[:2] != ("T", "E") or len(indices) != 2:
        return None
    token, ids = indices
    index = block.fact(ids)
    in_order = is_arange(token, block.num_tokens) and len(shape_of(token)) == 2 and same_size(shape_of(token)[1], 1)
    if index is None or index.kind != "ids" or index.labels != ("T", "K") or not in_order or index.clamped:
        raise NotProvenError(f"{node.name} picks other outputs than those of a token's own experts", node)
    block.passed[node] = rows
    return Fact("rows", ("T", "K", *fact.labels[2:]))


# Weighted, and summed ------------------------------------------------------------------------------------------------


@rule(RULES, aten.mul.Tensor)
def _weighted_rows(block: Block, node: Node) -> Fact | None:
    """Rows times their weights: zero where a token does not go to the expert."""
    for rows, weights in (arguments(node), arguments(node)[::-1]):
        fact, gates = block.fact(rows), block.fact(weights)
        if fact is None or gates is None or fact.kind != "rows" or gates.kind not in ("gates", "onehot", "mask"):
            continue
        own = (*[None] * (len(fact.labels) - len(gates.labels)), *gates.labels)
        if not shape_equal(rows, node) or any(g not in (None, f) for g, f in zip(own, fact.labels, strict=True)):
            raise NotProvenError(f"{node.name} pairs rows with weights in another order", node)
        tokens = [label for label in own if label is not None and label[0] == "T"]
        complete = is_tokens(tuple(tokens)) or "ET" in own
        if gates.off != 0 or not complete or (gates.expert is None) != bool({"E", "ET"} & set(own)):
            raise NotProvenError(f"{node.name} weighs rows by something that is not zero off the top-k", node)
        if fact.expert not in (None, gates.expert):
            raise NotProvenError(f"{node.name} weighs expert {fact.expert}'s rows as expert {gates.expert}'s", node)
        return Fact("rows", fact.labels, expert=gates.expert, sparse=True)
    return None


@rule(RULES, aten.where.self, aten.where.ScalarOther)
def _masked_rows(block: Block, node: Node) -> Fact | None:
    """`where(mask, expert(x), 0)`."""
    mask, rows, other = arguments(node)
    fact, gates = block.fact(rows), block.fact(mask)
    zero = constant(other) == 0
    if fact is None or gates is None or fact.kind != "rows" or gates.kind != "mask" or not shape_equal(rows, node):
        return None
    own = (*[None] * (len(fact.labels) - len(gates.labels)), *gates.labels)
    if (
        not zero
        or own != tuple(lb if own[axis] else None for axis, lb in enumerate(fact.labels))
        or not _along_tokens(own)
    ):
        return None
    block.passed[node] = rows
    return Fact("rows", fact.labels, expert=gates.expert, sparse=True)


@rule(RULES, aten.stack.default)
def _stack(block: Block, node: Node) -> Fact | None:
    """Every expert's output side by side."""
    operands = list(arguments(node)[0])
    facts = [block.fact(operand) for operand in operands]
    first = facts[0]
    if first is None or first.kind != "rows" or "E" in first.labels or not _along_tokens(first.labels):
        return None
    same = all(fact is not None and fact.kind == "rows" and fact.labels == first.labels for fact in facts)
    if not same or not block.dense:
        return None
    numbers = [fact.expert for fact in facts if fact is not None]
    if numbers != [None] * len(operands) and numbers != list(range(len(operands))):
        raise NotProvenError(f"{node.name} stacks the experts in another order than the weights", node)
    block.expect_experts(len(operands), node)
    axis = (int(arguments(node)[1]) if arguments(node)[1:] else 0) % (len(first.labels) + 1)
    block.fills[node] = tuple(enumerate(operands))
    sparse = all(fact is not None and fact.sparse for fact in facts)
    return Fact("rows", (*first.labels[:axis], "E", *first.labels[axis:]), sparse=sparse)


def _along_tokens(labels: tuple[Label, ...]) -> bool:
    return is_tokens(tuple(label for label in labels if label is not None))


@rule(RULES, aten.sum.dim_IntList)
def _sum_over_experts(block: Block, node: Node) -> Fact | None:
    source = arguments(node)[0]
    fact = block.fact(source)
    if fact is None or fact.kind != "rows" or keeps_axes(node):
        return None
    axes = reduced_axes(node, len(fact.labels))
    if {fact.labels[axis] for axis in axes} != {"E"}:
        return None
    if not fact.sparse:
        reason = f"{node.name} sums every expert's output, with weights that are not zero off the top-k"
        raise NotProvenError(reason, node)
    return Fact("output", tuple(lb for axis, lb in enumerate(fact.labels) if axis not in axes), parts=((-1, source),))


@rule(RULES, aten.add.Tensor)
def _add_expert(block: Block, node: Node) -> Fact | None:
    """`out + scores[:, e, None] * expert(x)`."""
    if node.kwargs:
        return None
    for base, rows in (arguments(node)[:2], arguments(node)[1::-1]):
        fact = block.fact(rows)
        if fact is None or fact.kind != "rows" or not fact.sparse or fact.expert is None:
            continue
        if not is_tensor(base):
            if base == 0:
                block.passed[node] = rows
                return fact
            continue
        if not shape_equal(node, rows):
            continue
        before = block.fact(base)
        if before is not None and before.kind == "rows" and before.sparse and before.expert is not None:
            parts: tuple[tuple[int, Node], ...] = ((before.expert, block.passed.get(base, base)),)
            start = None
        elif before is not None and before.kind == "output" and before.labels == fact.labels:
            parts, start = before.parts, before.base
        elif block.is_outside(base) and shape_equal(base, rows):
            parts, start = (), None if is_constant_fill(base, 0) else base
        else:
            continue
        if any(expert == fact.expert for expert, _ in parts):
            raise NotProvenError(f"{node.name} takes expert {fact.expert} a second time", node)
        return Fact("output", fact.labels, base=start, parts=(*parts, (fact.expert, rows)))
    return None
