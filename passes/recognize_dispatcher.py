"""The dispatcher's form: pairs are the entries of a matrix of weights that are not zero.

    gates = zeros(T, E).scatter(1, ids, weights)               ids = where(gates.gather(1, ids) != 0, ids, E)
    places, order = nonzero(gates).sort(0)                     rows, offsets, order = dispatch(x, ids, E)
    token = nonzero(gates)[order[:, 1], 0]                ->
    pieces = x[token].split((gates > 0).sum(0).tolist())       h = grouped_linear(rows, w_up, b_up, offsets, False)
    y = cat([expert(p) for each p]) * gates[token][...]        y = grouped_linear(...)
    out = zeros.index_add(0, token, y)                         out = combine(y, gates.gather(1, ids), order, dtype)

The dispatcher of Shazeer's 2017 paper, as it was ported to torch many times, is of this form. Sorting each column of
the positions alone looks odd, but what it returns for the experts' column is a sort of the pairs by expert. The entries
are at most a token's own experts; those that happen to be zero become sentinels, so they are left out here as there.
"""

from typing import Any

import torch
from torch.fx import Node

from moe_compile.passes.block import Block, Rule, arguments, aten, rule
from moe_compile.passes.facts import Fact
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.recognize_split import learn_size
from moe_compile.passes.rowwise import keeps_axes, reduced_axes

RULES: dict[Any, list[Rule]] = {}


@rule(RULES, aten.nonzero.default)
def _entries(block: Block, node: Node) -> Fact | None:
    marks = arguments(node)[0]
    fact = block.fact(marks)
    if fact is None or fact.kind != "gates" or fact.labels != ("T", "E") or fact.off != 0:
        return None
    if not block.keep(marks):
        raise NotProvenError(f"{node.name} lists the entries of another matrix than before", node)
    learn_size(block, node)
    return Fact("positions", ("M", None), columns=("T", "E"))


@rule(RULES, aten.sort.default, aten.sort.stable)
def _sort_each_column(block: Block, node: Node) -> tuple[Fact | None, ...] | None:
    fact = block.fact(arguments(node)[0])
    if fact is None or fact.kind != "positions" or fact.columns != ("T", "E"):
        return None
    dims = [a for a in arguments(node)[1:] if not isinstance(a, bool)]
    descending = node.kwargs.get("descending", False) or True in [a for a in arguments(node)[2:] if a is True]
    if (dims[0] if dims else node.kwargs.get("dim", -1)) not in (0, -2) or descending:
        raise NotProvenError(f"{node.name} does not sort the entries by expert", node)
    return (
        Fact("positions", ("S", None), columns=(None, "E")),
        Fact("positions", ("S", None), columns=(None, "turn")),
    )


@rule(RULES, aten.split.Tensor)
def _thick_columns(block: Block, node: Node) -> tuple[Fact | None, ...] | None:
    fact = block.fact(arguments(node)[0])
    dim = arguments(node)[2] if len(node.args) > 2 else 0
    if fact is None or fact.kind != "positions" or dim not in (1, -1) or arguments(node)[1] != 1:
        return None
    return tuple(Fact("ids", (fact.labels[0], None)) if column == "E" else None for column in fact.columns)


@rule(RULES, aten.index.Tensor)
def _in_order(block: Block, node: Node) -> Fact | None:
    """Entries, picked in the order of their experts."""
    source, indices = arguments(node)
    fact = block.fact(source)
    sorts = len(indices) == 1 and block.kind(indices[0]) == "turn"
    if not sorts or fact is None or fact.kind not in ("token", "ids") or fact.labels != ("M",):
        return None
    return Fact(fact.kind, ("S",))


@rule(RULES, aten.sum.dim_IntList)
def _entries_per_expert(block: Block, node: Node) -> Fact | None:
    """A split that these counts fit proves them right: marks of weights above zero are no more than all entries."""
    marks = arguments(node)[0]
    fact = block.fact(marks)
    if fact is None or fact.kind != "gates" or fact.labels != ("T", "E") or block.kept is None or keeps_axes(node):
        return None
    is_mark = marks.meta["val"].dtype is torch.bool and fact.off == 0
    compares = marks.target in (aten.gt.Scalar, aten.ne.Scalar) and arguments(marks)[1] == 0
    same = marks is block.kept or (compares and arguments(marks)[0] is block.kept)
    if not is_mark or not same or reduced_axes(node, 2) != {0}:
        return None
    return Fact("counts", ("E",))
