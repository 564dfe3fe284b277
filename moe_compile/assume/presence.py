"""Which expert a mask, a count or a list is about, read off a traced graph.

    ids ── one_hot ── permute ── [e] ── where          mask of expert e
     ├──── == e ── any                                 the same, said otherwise
     └──── bincount ── > 0 ── nonzero                  table over the experts, list of those that were hit

A *presence* is a value that is zero, false or empty where no pair chose an expert, and is not otherwise. Questions
about such a value are the only ones that may be answered by assumption.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import _disable_current_modes

from moe_compile.passes.candidates import name_of, value_of

_SAME = frozenset(
    {
        "view",
        "reshape",
        "flatten",
        "contiguous",
        "clone",
        "alias",
        "detach",
        "to",
        "_to_copy",
        "type_as",
        "lift_fresh_copy",
    }
    | {"_unsafe_view", "view_as", "expand"}
)
_READS = frozenset({"item", "_local_scalar_dense"})
_POSITIVE = {"gt": 0, "greater": 0, "ne": 0, "not_equal": 0, "ge": 1, "greater_equal": 1}
_ZERO = {"eq": 0, "le": 0, "less_equal": 0, "lt": 1, "less": 1}


@dataclass(frozen=True)
class Presence:
    """What a value says about experts.

    Attributes:
        ids: the expert ids it was made of, behind views.
        expert: the expert, None for a table with an axis of experts.
        axis: that axis, None for one expert.
        listed: whether it is a list of the experts that were hit.
        inverted: whether it is true where the expert is absent.
    """

    ids: Node
    expert: int | None = None
    axis: int | None = None
    listed: bool = False
    inverted: bool = False


def presence(node: Any) -> Presence | None:
    """What a node of a traced graph says about experts, None where that cannot be told."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    name, operand = name_of(node), node.args[0] if node.args else None
    if name == "getitem":  # one of several results, such as `where` and `unique` return
        return presence(operand)
    made = _made_of_ids(node, name)
    if made is not None:
        return made
    found = presence(operand)
    if found is None:
        return None
    if found.listed:
        return found if name in _SAME | {"squeeze", "unbind", "select"} else None
    if name in _SAME:
        same_rank = _rank(node) == _rank(operand) and name not in ("view", "reshape", "_unsafe_view")
        return found if found.axis is None or same_rank else _reshaped(node, operand, found)
    if name in _POSITIVE and node.args[1] == _POSITIVE[name] and not found.inverted:
        return found
    if name in _ZERO and node.args[1] == _ZERO[name] and not found.inverted:
        return replace(found, inverted=True)
    if name == "logical_not" or (name == "bitwise_not" and _is_bool(node)):
        return replace(found, inverted=not found.inverted)
    if found.inverted:
        return None
    return _indexed(node, name, operand, found)


def counted_experts(graph: Graph) -> dict[sympy.Symbol, int]:
    """Whose rows the sizes count that depend on data.

    A size is an expert's if it is zero where that expert has no pair. Sizes that were read off some other tensor of
    counts, one after the other, are numbered in that order: the proof of the block has to say what they count.
    """
    found: dict[sympy.Symbol, int] = {}
    read: dict[Node, int] = {}
    for node in graph.nodes:
        values = value_of(node)
        sizes = [values] if isinstance(values, torch.SymInt) else _row_counts(values)
        fresh = [s.node.expr for s in sizes if isinstance(s.node.expr, sympy.Symbol) and s.node.expr not in found]
        if not fresh or not free_unbacked_symbols(fresh[0]):
            continue
        mask = _mask_of(node)
        about = presence(mask)
        if about is not None and about.expert is not None:
            found |= dict.fromkeys(fresh, about.expert)
        elif name_of(node) in _READS:
            table = strip(node.args[0])
            table = table.args[0] if name_of(table) in ("select", "getitem", "unbind") else table
            found[fresh[0]] = read.setdefault(table, 0)
            read[table] += 1
    return found


def listed_experts(node: Node | None) -> int | None:
    """How many experts a list of the hit ones can hold: the length of the table that it was made of, if it has one."""
    while node is not None and name_of(node) not in ("nonzero", "where", "argwhere", "nonzero_numpy"):
        node = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    size = value_of(node.args[0]).numel() if node is not None else None  # type: ignore[arg-type]
    return size if isinstance(size, int) else None


def _row_counts(value: Any) -> list[torch.SymInt]:
    if isinstance(value, tuple | list):
        return _row_counts(value[0]) if value else []
    sizes: Sequence[Any] = value.shape[:1] if isinstance(value, Tensor) else ()
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def _mask_of(node: Node) -> Any:
    """What decides how many rows a node has."""
    if name_of(node) == "index":
        masks = [index for index in node.args[1] if isinstance(index, Node) and _is_bool(index)]  # type: ignore[union-attr]
        return masks[0] if len(masks) == 1 else None
    if name_of(node) in ("masked_select", "take_along_dim"):
        return node.args[1]
    return node if name_of(node) in _READS else node.args[0] if node.args else None


def strip(node: Any) -> Any:
    """The node behind views and casts."""
    while isinstance(node, Node) and node.args and name_of(node) in _SAME | {"squeeze", "unsqueeze", "long"}:
        node = node.args[0]
    return node


def _made_of_ids(node: Node, name: str) -> Presence | None:
    operand = node.args[0] if node.args else None
    if not isinstance(operand, Node) or not _is_integer(operand):
        return None
    if name == "one_hot":
        return Presence(strip(operand), axis=_rank(node) - 1)
    if name in ("eq", "__eq__") and isinstance(node.args[1], int) and presence(operand) is None:
        return Presence(strip(operand), expert=node.args[1])
    if name == "eq" and isinstance(node.args[1], Node) and name_of(strip(node.args[1])) == "arange":
        return _compared_with_all(node)
    if name in ("bincount", "histc"):
        return Presence(strip(operand), axis=0)
    if name in ("unique", "_unique2", "unique_dim", "unique_consecutive") and presence(operand) is None:
        return Presence(strip(operand), listed=True)
    if name in ("scatter", "scatter_") and name_of(strip(operand)) in ("zeros", "new_zeros", "zeros_like"):
        return Presence(strip(node.args[2]), axis=int(node.args[1])) if node.args[3] == 1 else None  # type: ignore[arg-type]
    return None


def _compared_with_all(node: Node) -> Presence | None:
    """`ids.unsqueeze(-1) == arange(E)`: a table whose last axis counts the experts."""
    experts = value_of(node.args[1])  # type: ignore[arg-type]
    steps = strip(node.args[1])
    starts_at_zero = len(steps.args) == 1 or steps.args[0] == 0
    if not starts_at_zero or experts.dim() == 0:
        return None
    wide = [axis for axis, size in enumerate(experts.shape) if not (isinstance(size, int) and size == 1)]
    if len(wide) != 1:
        return None
    axis = _rank(node) - experts.dim() + wide[0]
    ids = value_of(node.args[0])  # type: ignore[arg-type]
    position = axis - (_rank(node) - ids.dim())
    if position >= 0 and not (isinstance(ids.shape[position], int) and ids.shape[position] == 1):
        return None
    return Presence(strip(node.args[0]), axis=axis)


def _indexed(node: Node, name: str, operand: Any, found: Presence) -> Presence | None:
    """Steps that move, drop or pick axes."""
    rank = _rank(operand)
    if name in ("permute", "transpose", "t", "squeeze", "unsqueeze"):
        return found if found.axis is None else _moved(node, name, operand, found)
    if name in ("any", "sum", "count_nonzero", "amax"):
        given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        axes = range(rank) if given is None or given == [] else given if isinstance(given, list | tuple) else [given]
        dropped = {int(axis) % rank for axis in axes} if rank else set()
        if found.axis is None:
            return found
        if found.axis in dropped:
            return None
        keeps = bool(node.kwargs.get("keepdim", len(node.args) > 2 and node.args[2]))
        return replace(found, axis=found.axis if keeps else found.axis - sum(axis < found.axis for axis in dropped))
    if name == "select" and found.axis is not None:
        axis, index = int(node.args[1]) % rank, node.args[2]  # type: ignore[arg-type, call-overload]
        if axis == found.axis:
            return replace(found, axis=None, expert=index) if isinstance(index, int) and index >= 0 else None
        return None
    if name == "slice" and found.axis is not None:
        start: Any
        axis, start, stop = (*node.args[1:4], 0, 0, None)[:3]  # type: ignore[assignment]
        if axis == found.axis and isinstance(start, int) and isinstance(stop, int) and stop == start + 1 > 0:
            return replace(found, axis=None, expert=start)
        return None
    if name in ("nonzero", "where", "nonzero_numpy", "argwhere") and len(node.args) == 1:
        alone = found.axis is not None and rank == 1
        return found if found.axis is None else replace(found, axis=None, listed=True) if alone else None
    if name in _READS:
        return found
    return None


def _moved(node: Node, name: str, operand: Node, found: Presence) -> Presence | None:
    """Follows an axis of experts through a step by watching where it goes in a tensor of known sizes."""
    assert found.axis is not None
    sizes = [2 if axis != found.axis else 3 for axis in range(_rank(operand))]
    value = value_of(operand)
    sizes = [1 if isinstance(real, int) and real == 1 else size for real, size in zip(value.shape, sizes, strict=True)]
    if sizes[found.axis] != 3:
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        moved = node.target(torch.empty(sizes, device="meta"), *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return replace(found, axis=list(moved.shape).index(3))


def _reshaped(node: Node, operand: Any, found: Presence) -> Presence | None:
    """A view keeps an axis of experts if the sizes on both sides of it, taken together, stay."""
    before, after = value_of(operand).shape, value_of(node).shape
    assert found.axis is not None
    if found.axis == len(before) - 1 and after and after[-1] == before[-1]:
        return replace(found, axis=len(after) - 1)
    if found.axis == 0 and after and after[0] == before[0]:
        return found
    return None


def _rank(node: Any) -> int:
    value = value_of(node)
    return value.dim() if isinstance(value, Tensor) else 0


def _is_integer(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64)


def _is_bool(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype is torch.bool
