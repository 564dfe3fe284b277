"""The unrolled loop: for each expert, the rows routed to it, its own layers, and an addition to the tokens.

    for e in range(E):                                         rows, offsets, order = dispatch(x, ids, E)
        tok, slot = where(ids == e)                       ->   h = grouped_linear(rows, stack(w_up), ...)
        y = w_down[e] @ gate(w_up[e] @ x[tok])                 y = grouped_linear(gate(h), stack(w_down), ...)
        out.index_add_(0, tok, y * weights[tok, slot])         out = combine(y, weights, order, dtype)

Mixtral, OLMoE, Mistral's reference and DeepSeek's training branch are of this form, with masks from `one_hot` or `==`,
rows picked by indices or by the mask itself, and sums by `index_add_`, `+=` or assignment. What must hold: every mask
is a comparison of the same ids with one expert's number and nothing else; the experts are 0, 1, ... E-1, each once; and
what they compute is the same but for the weights and biases of their linear layers, which `experts_alike` proves by
walking through two experts' operators side by side. `out[tok] += y` keeps one of several rows of a token, so there the
ids of a token must be known to differ.
"""

from typing import Any

import torch
from torch.fx import Node

from moe_compile.passes.block import Block, Rule, arguments, aten, is_arange, is_constant_fill, is_uninitialised, rule
from moe_compile.passes.facts import Fact, Label, is_tensor, same_size, shape_of, token_labels
from moe_compile.passes.gather import picked_rows
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.rowwise import keeps_axes, reduced_axes, shape_equal

RULES: dict[Any, list[Rule]] = {}


@rule(RULES, aten.eq.Scalar)
def _mask_by_number(block: Block, node: Node) -> Fact | None:
    fact, number = block.fact(arguments(node)[0]), arguments(node)[1]
    if fact is None or fact.kind != "ids" or fact.clamped or not isinstance(number, int) or number < 0:
        return None
    return Fact("mask", fact.labels, expert=number)


@rule(RULES, aten.eq.Tensor)
def _onehot(block: Block, node: Node) -> Fact | None:
    ids, numbers = arguments(node)
    fact = block.fact(ids)
    if fact is None or fact.kind != "ids" or fact.clamped or fact.labels[-1] is not None or not is_tensor(numbers):
        return None
    (experts,) = shape_of(numbers)[-1:] or (1,)
    if len(shape_of(numbers)) != 1 or not is_arange(numbers, experts):
        return None
    return Fact("onehot", (*fact.labels[:-1], "E"))


@rule(RULES, aten.select.int)
def _mask_of_onehot(block: Block, node: Node) -> Fact | None:
    source, dim, number = arguments(node)
    fact = block.fact(source)
    if fact is None or fact.kind != "onehot":
        return None
    axis = int(dim) % len(fact.labels)
    if fact.labels[axis] != "E" or not isinstance(number, int):
        return None
    size = int(shape_of(source)[axis])
    return Fact("mask", tuple(lb for i, lb in enumerate(fact.labels) if i != axis), expert=number % size)


@rule(RULES, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim)
def _reshaped_onehot(block: Block, node: Node) -> Fact | None:
    """A full slice of a mask is the mask."""
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind not in ("onehot", "mask") or not shape_equal(node, arguments(node)[0]):
        return None
    return fact


@rule(RULES, aten.any.dim, aten.amax.default, aten.sum.dim_IntList)
def _mask_of_tokens(block: Block, node: Node) -> Fact | None:
    """Whether an expert is any of a token's."""
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "mask" or "K" not in fact.labels:
        return None
    axes = reduced_axes(node, len(fact.labels))
    if {fact.labels[axis] for axis in axes} != {"K"}:
        return None
    if not block.distinct:
        raise NotProvenError(f"{node.name} takes an expert once, however often a token names it", node)
    kept = keeps_axes(node)
    labels = tuple(None if axis in axes else lb for axis, lb in enumerate(fact.labels) if kept or axis not in axes)
    return Fact("mask", labels, expert=fact.expert)


@rule(RULES, aten.nonzero.default)
def _positions(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is not None and fact.kind == "gates" and fact.expert is not None and fact.labels == ("T",):
        row = block.kept_rows(arguments(node)[0])
        return Fact("positions", (row, None), expert=fact.expert, columns=("T",)) if row is not None else None
    if fact is None or fact.kind != "mask":
        return None
    named = tuple(label for label in fact.labels if label is not None)
    if named not in (("T", "K"), ("N",), ("K", "T"), ("T",)) or len(named) != len(fact.labels):
        raise NotProvenError(f"{node.name} finds the rows of an expert in a mask of unknown axes", node)
    # Slots first lists the same pairs in another order, so those rows must not meet rows in the usual one.
    rows = f"R{fact.expert}" + ("'" if named == ("K", "T") else "")
    return Fact("positions", (rows, None), expert=fact.expert, columns=named)


@rule(RULES, aten.unbind.int)
def _columns(block: Block, node: Node) -> tuple[Fact | None, ...] | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "positions" or (arguments(node)[1:] or (0,))[0] not in (1, -1):
        return None
    return tuple(_column(fact, column) for column in fact.columns)


@rule(RULES, aten.select.int)
def _one_column(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "positions" or arguments(node)[1] not in (1, -1):
        return None
    return _column(fact, fact.columns[int(arguments(node)[2])])


@rule(RULES, aten.squeeze.dim, aten.squeeze.default, aten.view.default)
def _only_column(block: Block, node: Node) -> Fact | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "positions" or len(fact.columns) != 1 or len(shape_of(node)) != 1:
        return None
    return _column(fact, fact.columns[0])


def _column(fact: Fact, label: Label) -> Fact | None:
    kinds: dict[Label, Any] = {"T": "token", "K": "slot", "N": "pair", "E": "ids", "turn": "turn"}
    return Fact(kinds[label], (fact.labels[0],), expert=fact.expert) if label in kinds else None


@rule(RULES, aten.any.default)
def _hit(block: Block, node: Node) -> Fact | None:
    """Whether an expert has tokens, which a module asks before it runs it."""
    fact = block.fact(arguments(node)[0])
    return Fact("hit", ()) if fact is not None and fact.kind in ("mask", "gates") else None


@rule(RULES, aten.index_add.default)
def _add_rows(block: Block, node: Node) -> Fact | None:
    base, dim, index, rows = arguments(node)
    if dim != 0 or node.kwargs.get("alpha", 1) != 1 or not block.is_token(index):
        return None
    return _added(block, node, base, index, rows)


@rule(RULES, aten.scatter_add.default, aten.scatter_reduce.two)
def _scatter_rows(block: Block, node: Node) -> Fact | None:
    """Sums by a token index that was repeated for every feature."""
    base, dim, index, rows = arguments(node)[:4]
    fact = block.fact(index)
    if fact is None or dim != 0 or fact.kind != "token" or any(fact.labels[1:]):
        return None
    if node.target is aten.scatter_reduce.two:
        includes = arguments(node)[5] if len(node.args) > 5 else node.kwargs.get("include_self", True)
        if arguments(node)[4] != "sum" or not (includes or is_constant_fill(base, 0)):
            raise NotProvenError(f"{node.name} reduces by something else than a sum", node)
    if not all(map(same_size, shape_of(index), shape_of(rows))):
        raise NotProvenError(f"{node.name} adds fewer features than the rows have", node)
    return _added(block, node, base, index, rows)


@rule(RULES, aten.index_put.default)
def _put_rows(block: Block, node: Node) -> Fact | None:
    base, indices, rows = arguments(node)[:3]
    accumulates = bool(arguments(node)[3]) if len(arguments(node)) > 3 else False
    index = indices[0] if len(indices) == 1 else None
    update = block.fact(rows)
    if block.is_token(index) and accumulates:
        return _added(block, node, base, index, rows)
    if update is not None and update.kind == "update":
        if update.base is not base or not block.is_token(index):
            raise NotProvenError(f"{node.name} writes what was read from another tensor", node)
        if not block.distinct:
            raise NotProvenError(f"{node.name} keeps one of several rows of a token, and the ids may repeat", node)
        (part,) = update.parts
        return _added(block, node, base, index, part[1])
    if block.is_token(index) and block.top_k == 1 and not accumulates and block.kind(rows) == "rows":
        # A token's one expert writes where there were zeros.
        before = block.fact(base)
        if is_constant_fill(base, 0) or (before is not None and before.kind == "output" and before.base is None):
            return _added(block, node, base, index, rows)
    return _filled(block, node, base, indices, rows) if not accumulates else None


@rule(RULES, aten.add.Tensor)
def _read_and_add(block: Block, node: Node) -> Fact | None:
    """`out[tok] + y`, on its way back to `out[tok]`."""
    if node.kwargs.get("alpha", 1) != 1:
        return None
    for read, rows in (arguments(node)[:2], arguments(node)[1::-1]):
        base = _read_from(block, read)
        if base is None or block.kind(rows) != "rows" or block.facts[rows].labels != block.facts[read].labels:
            continue
        return Fact("update", block.facts[read].labels, base=base, parts=((-1, rows),))
    return None


def _read_from(block: Block, read: Any) -> Node | None:
    """The buffer, of zeros or sums so far, that a value was picked from by token."""
    if block.kind(read) == "read":
        return block.facts[read].base
    if read not in block.leaves or read.target is not aten.index.Tensor:
        return None
    base, indices = arguments(read)
    by_token = len(indices) == 1 and block.is_token(indices[0]) and block.runs_along_tokens(base)
    return base if by_token and is_constant_fill(base, 0) else None


def _added(block: Block, node: Node, base: Any, index: Any, rows: Any) -> Fact | None:
    fact = block.facts[index]
    expert = fact.expert
    if expert is None:
        return None
    row = fact.labels[0] if fact.kind in ("token", "pair") else picked_rows(block, [index])[1]
    if block.kind(rows) != "rows" or block.facts[rows].labels != (row, None):
        raise NotProvenError(f"{node.name} adds something else than the rows of expert {expert}", node)
    whole = fact.kind in ("mask", "gates") or len(shape_of(base)) == 2
    if not whole or not block.runs_along_tokens(base) or not same_size(shape_of(base)[-1], shape_of(rows)[1]):
        raise NotProvenError(f"{node.name} adds to a buffer that has not one row per token", node)
    before = block.fact(base)
    if before is not None and (before.kind != "output" or any(e < 0 for e, _ in before.parts)):
        raise NotProvenError(f"{node.name} adds expert {expert} to something that is no sum over experts", node)
    start = before.base if before is not None else None if is_constant_fill(base, 0) else base
    labels = (*token_labels(shape_of(base)[:-1]), None)
    return Fact("output", labels, base=start, parts=_extended(before, expert, rows, node))


def _extended(before: Fact | None, expert: int, rows: Node, node: Node) -> tuple[tuple[int, Node], ...]:
    parts = before.parts if before is not None else ()
    if any(expert == earlier for earlier, _ in parts):
        raise NotProvenError(f"{node.name} takes expert {expert} a second time", node)
    return (*parts, (expert, rows))


def _filled(block: Block, node: Node, base: Node, indices: list[Node | None], rows: Node) -> Fact | None:
    """`out[ids == e] = y`, with one row per pair: rows again, once every expert has written."""
    facts = [block.fact(index) for index in indices]
    kinds = [fact.kind if fact is not None else "" for fact in facts]
    first = facts[0]
    if kinds not in (["mask"], ["pair"], ["token", "slot"]) or block.kind(rows) != "rows" or first is None:
        return None
    if kinds == ["mask"] and arguments(node)[1][0].meta["val"].dtype is not torch.bool:
        raise NotProvenError(f"{node.name} takes a mask for indices", node)
    expert = first.expert
    if expert is None:
        return None
    counted: tuple[str, ...] = ("T", "K") if len(facts) == 2 else ("N",)
    if kinds == ["mask"]:
        counted = tuple(label or "" for label in first.labels)
    sizes = {"T": block.num_tokens, "K": block.top_k, "N": block.pairs}
    label = f"R{expert}" if kinds == ["mask"] else first.labels[0]
    features = len(shape_of(base)) - len(counted)
    fits = counted in (("N",), ("T", "K")) and all(
        same_size(size, sizes[name]) for size, name in zip(shape_of(base), counted, strict=False)
    )
    if not fits or block.facts[rows].labels != (label, *(None,) * features):
        raise NotProvenError(f"{node.name} writes expert {expert}'s rows to other places than its own", node)
    before = block.fact(base)
    if before is not None and base not in block.fills:
        raise NotProvenError(f"{node.name} writes into rows that were computed before", node)
    if before is None and not (is_uninitialised(base) or is_constant_fill(base, 0)):
        raise NotProvenError(f"{node.name} writes into a buffer that holds other values", node)
    block.fills[node] = _extended(Fact("output", (), parts=block.fills.get(base, ())), expert, rows, node)
    return Fact("rows", (*counted, *(None,) * features))
