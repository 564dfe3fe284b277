"""Rules that hold for every form: what keeps rows apart.

    chunk = aten.split(rows, F, 1)        {rows (S, None)}      ->  rows (S, None), twice
    silu = aten.silu(getitem)             elementwise           ->  rows (S, None)
    mean = aten.mean(pow, [-1], True)     over features alone   ->  rows (S, None)
    flip = aten.flip(rows, [0])           no rule               ->  nothing: the proof ends here

A gate, a norm or a cast between two projections may be anything, as long as each of its rows depends on the same row
of its operands and on values that are the same for all rows. An operator passes if it is elementwise, or works along
features alone; whatever draws random numbers does not.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moe_compile.passes.block import Block, Rule, arguments, aten, is_constant_fill, rule
from moe_compile.passes.facts import (
    Fact,
    Label,
    broadcast_labels,
    is_tensor,
    same_size,
    shape_of,
    view_labels,
)
from moe_compile.passes.match import NotProvenError

RULES: dict[Any, list[Rule]] = {}
_LABELLED = ("rows", "ids", "pair", "token", "slot", "mask", "onehot", "sentinel", "gates", "slots")
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_CASTS = (aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.alias.default, aten.contiguous.default)
_WHOLE = (torch.int32, torch.int64)
_EXACT = (*_WHOLE, torch.float32, torch.float64)


def elementwise(block: Block, node: Node) -> Fact | None:
    """Operators that torch tags as pointwise, on rows and values from outside."""
    operands = [operand for operand in node.all_input_nodes if is_tensor(operand)]
    kinds = {block.kind(operand) for operand in operands}
    if "mask" in kinds:
        expert = next(fact.expert for operand in operands if (fact := block.fact(operand)) and fact.kind == "mask")
        raise NotProvenError(f"{_name(node)} changes the mask of expert {expert}", node)
    if not kinds & {"rows", "parameter"} or "output" in kinds:
        return None
    target = node.target
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else []
    if torch.Tag.nondeterministic_seeded in tags:
        raise NotProvenError(f"{_name(node)} draws random numbers for each expert in turn", node)
    if torch.Tag.pointwise not in tags:
        raise NotProvenError(f"{_name(node)} is not known to keep rows apart", node)
    if kinds - {"rows", None}:
        other = next(operand for operand in operands if block.kind(operand) not in ("rows", None))
        raise NotProvenError(f"{_name(node)} mixes rows with {_DESCRIPTIONS[block.facts[other].kind]}", node)
    labels = broadcast_labels([(shape_of(operand), labels_of(block, operand)) for operand in operands], shape_of(node))
    if labels is None:
        raise NotProvenError(f"{_name(node)} pairs rows with values in another order", node)
    return Fact("rows", labels, sparse=_keeps_zeros(block, node, operands))


def _keeps_zeros(block: Block, node: Node, operands: list[Node]) -> bool:
    """Whether an operator yields zero wherever some rows are zero: a product does, and f(rows) if f(0) is zero."""
    sparse = [fact is not None and fact.sparse for fact in map(block.fact, operands)]
    if not any(sparse):
        return False
    return node.target is aten.mul.Tensor or (all(sparse) and value_at(node, dict.fromkeys(operands, 0.0)) == 0)


def value_at(node: Node, values: dict[Node, float]) -> float | None:
    """What an elementwise operator makes of numbers in its operands' places, None if it cannot be told."""

    def number(argument: Any) -> Any:
        return torch.tensor(values[argument], dtype=torch.float64) if isinstance(argument, Node) else argument

    try:
        result = node.target(*map(number, arguments(node)), **{k: number(v) for k, v in node.kwargs.items()})  # type: ignore[operator]
        return float(result)
    except (KeyError, RuntimeError, TypeError):
        return None


_DESCRIPTIONS = {
    "parameter": "a parameter that differs between experts, other than a projection's weight or bias",
    "gates": "the matrix of routing weights",
    "slots": "the routing weights of one expert",
    "count": "a token count",
    "end": "a token count",
    "read": "what earlier experts wrote",
    "update": "what earlier experts wrote",
    "ids": "the expert ids",
    "pair": "the order of the rows",
    "token": "the token index",
    "slot": "the slot index",
    "mask": "the routing mask",
    "onehot": "the routing mask",
    "sentinel": "the mask of sentinels",
    "inverse": "the order of the rows",
    "positions": "the routing mask",
    "counts": "the token counts",
    "offsets": "the offsets",
}


def labels_of(block: Block, node: Node) -> tuple[Label, ...]:
    """An operand's labels; values from outside have none."""
    fact = block.fact(node)
    return fact.labels if fact is not None else (None,) * len(shape_of(node))


def _name(node: Node) -> str:
    target = node.target
    return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else str(target)


def _relabelled(fact: Fact, labels: Sequence[Label]) -> Fact:
    return replace(fact, labels=tuple(labels))


@rule(RULES, *_CASTS)
def _cast(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None:
        return None
    dtype = node.meta["val"].dtype
    if fact.kind in ("rows", "output", "parameter"):
        return fact
    if fact.kind in ("mask", "onehot", "sentinel", "gates", "slots"):
        return fact
    # float32 holds every expert id, but not every pair.
    exact = dtype in _WHOLE or (dtype in _EXACT and fact.kind in ("ids", "counts"))
    return fact if exact and fact.kind not in ("update", "positions") else None


@rule(RULES, aten.copy.default, aten.slice_scatter.default)
def _overwrite(block: Block, node: Node) -> Fact | None:
    """What an in-place operation left, written as a copy over all of the old value."""
    old, new = arguments(node)[:2]
    fact = block.fact(new)
    same = is_tensor(old) and shape_equal(old, new) and old.meta["val"].dtype == new.meta["val"].dtype
    if fact is None or not same or fact.kind not in ("ids", "rows"):
        return None
    block.passed[node] = new
    return fact


@rule(RULES, *VIEWS)
def _view(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind not in (*_LABELLED, "inverse", "parameter"):
        return None
    labels = view_labels(shape_of(arguments(node)[0]), fact.labels, shape_of(node), block.top_k)
    if labels is None:
        raise NotProvenError(f"{_name(node)} mixes rows", node)
    if fact.kind == "parameter":
        own = [label is None for label in fact.labels].count(True)
        keeps = all(map(same_size, shape_of(arguments(node)[0])[-own:], shape_of(node)[-own:]))
        pairs = tuple(label for label in labels if label is not None)
        same_axes = keeps and labels == (*pairs, *(None,) * own)
        return replace(fact, labels=labels) if same_axes else None
    return _relabelled(fact, labels)


@rule(RULES, aten.unsqueeze.default)
def _unsqueeze(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind not in _LABELLED:
        return None
    labels = list(fact.labels)
    labels.insert(int(arguments(node)[1]) % (len(labels) + 1), None)
    return _relabelled(fact, labels)


@rule(RULES, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind not in _LABELLED:
        return None
    dims = arguments(node)[1]
    axes = {int(d) % len(fact.labels) for d in (dims if isinstance(dims, list | tuple) else [dims])}
    gone = {axis for axis in axes if same_size(shape_of(arguments(node)[0])[axis], 1)}
    if any(fact.labels[axis] is not None for axis in gone):
        raise NotProvenError(f"{_name(node)} drops an axis that counts rows", node)
    return _relabelled(fact, [label for axis, label in enumerate(fact.labels) if axis not in gone])


@rule(RULES, aten.expand.default)
def _expand(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is not None and fact.kind == "parameter":
        return fact if shape_equal(node, arguments(node)[0]) else None
    if fact is None or fact.kind not in _LABELLED:
        return None
    before, after = shape_of(arguments(node)[0]), shape_of(node)
    new = len(after) - len(before)
    turns = block.turns(node, [*[None] * new, *fact.labels], [*[1] * new, *before])
    if turns is not None:
        return _relabelled(fact, turns)
    if any(
        label is not None and not same_size(before[axis], after[axis + new]) for axis, label in enumerate(fact.labels)
    ):
        raise NotProvenError(f"{_name(node)} repeats rows", node)
    return _relabelled(fact, [*[None] * new, *fact.labels])


@rule(RULES, aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind not in (*_LABELLED, "parameter"):
        return None
    axes = list(range(len(fact.labels)))
    if node.target is aten.permute.default:
        axes = [int(a) % len(axes) for a in arguments(node)[1]]
    else:
        first, second = (int(a) % len(axes) for a in (arguments(node)[1:] or (0, 1)))
        axes[first], axes[second] = axes[second], axes[first]
    if fact.kind == "parameter":
        identity = list(range(len(axes)))
        exchanged = [*identity[:-2], *identity[:-3:-1]]
        if axes not in (identity, exchanged) or len(axes) != 3:
            return None
        return Fact("parameter", fact.labels, base=fact.base, swapped=fact.swapped ^ (axes == exchanged))
    return _relabelled(fact, [fact.labels[axis] for axis in axes])


@rule(RULES, aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def _cut(block: Block, node: Node) -> Fact | tuple[Fact | None, ...] | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "rows":
        return None
    position = 2 if node.target in (aten.split.Tensor, aten.split_with_sizes.default) else 1
    dim = arguments(node)[position] if len(node.args) > position else 0
    axis = int(dim) % len(fact.labels)
    if fact.labels[axis] is not None:
        if node.target is aten.slice.Tensor and shape_equal(node, arguments(node)[0]):
            return fact
        raise NotProvenError(f"{_name(node)} leaves rows out", node)
    drops = node.target in (aten.select.int, aten.unbind.int)
    cut = replace(fact, labels=tuple(lb for i, lb in enumerate(fact.labels) if i != axis or not drops))
    values = node.meta["val"]
    return cut if isinstance(values, torch.Tensor) else (cut,) * len(values)


def shape_equal(left: Any, right: Any) -> bool:
    """Whether two values have the same shape for every input."""
    return len(shape_of(left)) == len(shape_of(right)) and all(map(same_size, shape_of(left), shape_of(right)))


@rule(RULES, aten.select_scatter.default)
def _put_back(block: Block, node: Node) -> Fact | None:
    """What an in-place operation on `rows[:, 0]` leaves of `rows`, if there was nothing else in it."""
    base, rows, dim = arguments(node)[:3]
    fact = block.fact(rows)
    if fact is None or fact.kind != "rows":
        return None
    axis = dim % len(shape_of(base))
    if not block.is_leading(base, 1, axis):
        raise NotProvenError(f"{_name(node)} writes into rows that were computed before", node)
    return Fact("rows", (*fact.labels[:axis], None, *fact.labels[axis:]))


@rule(RULES, aten.cat.default, aten.stack.default)
def _join(block: Block, node: Node) -> Fact | None:
    operands = list(arguments(node)[0])
    if not any(block.kind(operand) == "rows" for operand in operands):
        return None
    stacks = node.target is aten.stack.default
    first = labels_of(block, operands[0])
    dim = int(arguments(node)[1]) if arguments(node)[1:] else 0
    axis = dim % (len(first) + stacks)
    alike = all(block.kind(operand) == "rows" and labels_of(block, operand) == first for operand in operands)
    if not alike or (not stacks and first[axis] is not None):
        raise NotProvenError(f"{_name(node)} joins rows of different kinds", node)
    return Fact("rows", (*first[:axis], None, *first[axis:]) if stacks else first)


_REDUCTIONS = (
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var.correction,
    aten.linalg_vector_norm.default,
    aten.sum.dim_IntList,
    aten.logsumexp.default,
)


def reduced_axes(node: Node, rank: int) -> set[int]:
    """The axes that a reduction runs over."""
    dims = _named_argument(node, "dim", None)
    if isinstance(dims, int):
        dims = [dims]
    return {int(d) % rank for d in dims} if dims else set(range(rank))


def keeps_axes(node: Node) -> bool:
    """Whether a reduction leaves axes of size one behind."""
    return bool(_named_argument(node, "keepdim", False))


def _named_argument(node: Node, name: str, default: Any) -> Any:
    assert isinstance(node.target, torch._ops.OpOverload)
    index = next(i for i, argument in enumerate(node.target._schema.arguments) if argument.name == name)
    return arguments(node)[index] if len(node.args) > index else node.kwargs.get(name, default)


@rule(RULES, *_REDUCTIONS)
def _reduce(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "rows":
        return None
    axes = reduced_axes(node, len(fact.labels))
    if any(fact.labels[axis] is not None for axis in axes):
        if node.target is aten.sum.dim_IntList and {fact.labels[axis] for axis in axes} <= {"K"}:
            return None
        raise NotProvenError(f"{_name(node)} reduces over rows", node)
    if keeps_axes(node):
        return Fact("rows", fact.labels)
    return Fact("rows", tuple(label for axis, label in enumerate(fact.labels) if axis not in axes))


@rule(RULES, aten._softmax.default, aten._log_softmax.default, aten.cumsum.default)
def _along_one_axis(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "rows":
        return None
    if fact.labels[int(arguments(node)[1]) % len(fact.labels)] is not None:
        raise NotProvenError(f"{_name(node)} runs across rows", node)
    return fact


@rule(RULES, aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _norm(block: Block, node: Node) -> tuple[Fact | None, ...] | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "rows":
        return None
    normalised = len(arguments(node)[1])
    if any(label is not None for label in fact.labels[len(fact.labels) - normalised :]):
        raise NotProvenError(f"{_name(node)} runs across rows", node)
    return (fact, *(None for _ in node.meta["val"][1:]))


@rule(RULES, aten.mm.default)
def _shared_product(block: Block, node: Node) -> Fact | None:
    rows, weight = arguments(node)
    if block.kind(rows) == "rows" and block.is_outside(weight) and block.facts[rows].labels[1] is None:
        return Fact("rows", (block.facts[rows].labels[0], None))
    raise NotProvenError(f"mm multiplies {_operand_kinds(block, rows, weight)}", node)


def _operand_kinds(block: Block, *operands: Node) -> str:
    """What a product takes that is neither rows nor from outside."""
    other = [block.facts[o].kind for o in operands if block.kind(o) not in (None, "rows")]
    return _DESCRIPTIONS[other[0]] if other else "across rows"


@rule(RULES, aten.addmm.default)
def _shared_affine(block: Block, node: Node) -> Fact | None:
    bias, rows, weight = arguments(node)
    if node.kwargs or not block.is_outside(bias) or len(shape_of(bias)) != 1:
        raise NotProvenError("addmm adds more than a bias", node)
    if block.kind(rows) == "rows" and block.is_outside(weight) and block.facts[rows].labels[1] is None:
        return Fact("rows", (block.facts[rows].labels[0], None))
    raise NotProvenError(f"addmm multiplies {_operand_kinds(block, rows, weight)}", node)


@rule(RULES, aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _fill_sentinels(block: Block, node: Node) -> Fact | None:
    rows, mask, value = arguments(node)
    if block.kind(mask) != "sentinel":
        return None
    if not (value == 0 or is_constant_fill(value, 0)):
        raise NotProvenError("masked_fill gives sentinels another value than zero", node)
    if block.kind(rows) not in ("rows", None):
        return None
    operands = [(shape_of(n), labels_of(block, n)) for n in (rows, mask)]
    labels = broadcast_labels(operands, shape_of(node))
    if labels is None:
        raise NotProvenError("masked_fill pairs rows with a mask in another order", node)
    block.passed[node] = rows
    return Fact("rows", labels)
