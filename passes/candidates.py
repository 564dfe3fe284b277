"""Finds where experts blocks may be: cheap, by names and shapes, proving nothing.

    ids ──► sort ──► x[order // K] ──► grouped_mm ──► [inverse] ──► sum          one root, one candidate
     └────► histc ─► cumsum ─────────────┘

A *root* is the tensor of expert ids; a *candidate* is what depends on it up to where rows become tokens again, together
with the views and casts just in front. Too much in a candidate costs time, too little costs a rewrite, and neither
costs correctness: what is in it is proven from its normal form.
"""

import heapq
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef

from moe_compile.passes.blocks import META_KEYS

GROUPED = frozenset({"grouped_mm", "_grouped_mm", "grouped_mm_fallback"})
PRODUCTS = frozenset({"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum"})
_SORTS = frozenset({"sort", "argsort"})
_COUNTS = frozenset(
    {"histc", "sum", "cumsum", "float", "bincount", "split", "chunk", "unbind", "_to_copy", "scatter", "scatter_"}
)
_READS = frozenset({"item", "_local_scalar_dense", "tolist"})
_GATHERS = frozenset({"getitem", "index", "index_select"})
# What every expert's outputs are put together by; stacked weights are not.
_COMPUTED = frozenset({"stack", "einsum", "bmm", "baddbmm", "matmul", "add"})
_MASKS = frozenset({"one_hot", "eq"})
_CASTS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16", "double", "long", "int", "_to_copy"})
_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as"})
_TRANSPOSES = frozenset({"permute", "transpose", "t", "T", "mT", "swapaxes"})
_CUTS = frozenset({"select", "slice", "split", "chunk", "unbind", "narrow", "getitem"})
_COPIES = frozenset({"contiguous", "clone", "alias", "detach", "repeat_interleave"})
VIEWS = _CASTS | _RESHAPES | _TRANSPOSES | _CUTS | _COPIES
# What leaves each pair's expert where it is; a slice of the ids, say, is other ids.
_INTEGER_STEPS = _CASTS | _RESHAPES | _COPIES - {"repeat_interleave"} | {"clamp", "clamp_"}
BUFFERS = frozenset(
    {"zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "full", "full_like", "arange"}
)
_REDUCERS = frozenset({"sum", "index_add", "index_add_", "scatter_add", "scatter_add_", "einsum", "bmm", "matmul"})
_PRELUDE_DEPTH = 8
_TAIL = 32


@dataclass(frozen=True)
class Candidate:
    """A part of a graph that may be an experts block.

    Attributes:
        form: the spelling that it looks like.
        root: the expert ids, (T, K), or (T*K,) in that order.
        num_tokens: T.
        top_k: K.
        nodes: in graph order, without the root.
        seed: the node that gave it away.
        hidden: of a dense form, the hidden states.
        experts: of a dense form, the width of its matrix of weights.
        autocast: settings that the graph itself puts it under, outermost first.
    """

    form: str
    root: Node
    num_tokens: int | torch.SymInt
    top_k: int | torch.SymInt
    nodes: tuple[Node, ...]
    seed: Node
    hidden: frozenset[Node] = frozenset()
    experts: int | torch.SymInt | None = None
    autocast: tuple[tuple[object, ...], ...] = ()


def value_of(node: Node) -> Any:
    """The fake value in a node's meta, None without one."""
    for key in META_KEYS:
        if node.meta.get(key) is not None:
            return node.meta[key]
    return None


def name_of(node: Node) -> str:
    """The bare name of what a node calls, alike for functions, methods and operators."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return str(getattr(node.target, "__name__", ""))


@dataclass
class Seeds:
    """What gives one tensor of expert ids away.

    Attributes:
        top_k: K.
        by_form: spelling -> the nodes that look like it, in graph order.
    """

    top_k: int | torch.SymInt
    by_form: dict[str, list[Node]] = field(default_factory=dict)


def behind_views(node: Node) -> Node:
    """What a value is a view or a cast of."""
    while name_of(node) in VIEWS and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def find_seeds(gm: GraphModule) -> dict[Node, Seeds]:
    """The tensors of expert ids, by what is done to them: one scan over the nodes."""
    roots: dict[Node, Seeds] = {}
    grouped = any(name_of(node) in GROUPED | _READS for node in gm.graph.nodes)
    for node in gm.graph.nodes:
        form = _form_of_seed(node, grouped)
        found = _root(_index_operand(node)) if form is not None else None
        if form is not None and found is not None:
            roots.setdefault(found[0], Seeds(found[1])).by_form.setdefault(form, []).append(node)
    return roots


def sparse_region(root: Node, form: str, top_k: int | torch.SymInt, position: dict[Node, int]) -> Candidate | None:
    """The candidate of one root, if rows are picked in it; more work only where something looks like routing."""
    region = _region(root, top_k, position)
    confirmed = _confirmed_form(form, region)
    if confirmed is None:
        return None
    return Candidate(confirmed, root, value_of(root).numel() // top_k, top_k, tuple(region), region[0])


def mutated_arguments(node: Node) -> list[Node]:
    """The tensors that a node writes to."""
    if node.op == "call_method":
        name = str(node.target)
        in_place = name.endswith("_") and not name.endswith("__")
        return [a for a in node.args[:1] if isinstance(a, Node)] if in_place else []
    if node.op != "call_function":
        return []
    if node.target is operator.setitem or _is_augmented(node):
        return [a for a in node.args[:1] if isinstance(a, Node)]
    if isinstance(node.target, torch._ops.OpOverload):
        arguments = node.target._schema.arguments
        written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        positional = [a for a, w in zip(node.args, written, strict=False) if w and isinstance(a, Node)]
        named = {a.name for a, w in zip(arguments, written, strict=True) if w}
        return positional + [v for k, v in node.kwargs.items() if k in named and isinstance(v, Node)]
    name = name_of(node)
    if isinstance(node.kwargs.get("out"), Node):
        return [node.kwargs["out"]]  # type: ignore[list-item]
    if (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True:
        return [a for a in node.args[:1] if isinstance(a, Node)]
    return []


def storage_of(node: Node) -> StorageWeakRef | None:
    """Identity of the memory behind a node's value."""
    value = value_of(node)
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())


def _is_augmented(node: Node) -> bool:
    """Whether a function of the operator module is the in-place twin of another, as `iadd` is of `add`."""
    if getattr(node.target, "__module__", "") != "_operator":
        return False
    name = name_of(node)
    return name.startswith("i") and hasattr(operator, name[1:]) and name not in ("invert", "index", "is_", "is_not")


def _form_of_seed(node: Node, grouped: bool) -> str | None:
    name = name_of(node)
    if name in _SORTS:
        return "grouped_mm" if grouped and not _is_order(_integer_operand(node)) else None
    if name in _MASKS:
        return "expert_loop"
    if name == "gather" and isinstance(value_of(node), Tensor) and value_of(node).dim() > 2:
        return "dense"
    if name in ("scatter", "scatter_") and isinstance(value_of(node), Tensor) and value_of(node).dim() > 1:
        return "dense" if value_of(node).is_floating_point() or value_of(node).dtype is torch.bool else None
    if name in _GATHERS and node.args and isinstance(node.args[0], Node):
        base = value_of(node.args[0])
        if isinstance(base, Tensor) and base.is_floating_point() and base.dim() >= 3:
            form = "dense" if name_of(behind_views(node.args[0])) in _COMPUTED else "batched_mm"
            return form if _integer_operand(node) is not None else None
    return None


def _is_order(node: Node | None) -> bool:
    """Whether a tensor is what a sort of integers returned second: sorting it again inverts it."""
    source = node.args[0] if node is not None and name_of(node) == "getitem" else node
    return isinstance(source, Node) and name_of(source) in _SORTS and _integer_operand(source) is not None


def _is_integer(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    if isinstance(value, tuple | list):
        return bool(value) and isinstance(value[-1], Tensor) and _is_integer(value[-1])
    return isinstance(value, torch.SymInt | torch.SymBool)


def _index_operand(node: Node) -> Node | None:
    """The integers that an operation looks at; those of a scatter and a gather stand in a place of their own."""
    if name_of(node) in ("gather", "scatter", "scatter_"):
        index = node.args[2] if len(node.args) > 2 else node.kwargs.get("index")
        return index if isinstance(index, Node) else None
    if name_of(node) in ("getitem", "index") and len(node.args) > 1 and isinstance(node.args[1], tuple | list):
        indices = [i for i in node.args[1] if isinstance(i, Node) and _is_integer(value_of(i))]
        return indices[-1] if indices else None
    return _integer_operand(node)


def _integer_operand(node: Node) -> Node | None:
    for operand in node.all_input_nodes:
        value = value_of(operand)
        if isinstance(value, Tensor) and _is_integer(value):
            return operand
    return None


def _root(node: Node | None) -> tuple[Node, int | torch.SymInt] | None:
    """Walks from an integer tensor back to the expert ids that it was made of.

    Returns:
        The ids, flat or with one axis of tokens and one of slots, and the number of slots.
    """
    chain: list[Node] = []
    while node is not None:
        value = value_of(node)
        if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() > 0:
            chain.append(node)
        operand = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if name_of(node) not in _INTEGER_STEPS or operand is None or not _steps_on_integers(operand):
            break
        node = operand
    if not chain:
        return None
    end = value_of(chain[-1])
    top_k = end.shape[-1] if end.dim() > 1 else 1
    if end.dim() <= 2:
        return chain[-1], top_k
    # Tokens of several sequences: what the model itself made of them first.
    by_rank = [[n for n in reversed(chain) if value_of(n).dim() == rank] for rank in (2, 1)]
    two = next((n for n in by_rank[0] if value_of(n).shape[-1] == top_k), None)
    return two or next(iter(by_rank[1]), None) or chain[-1], top_k


def _steps_on_integers(node: Node) -> bool:
    value = value_of(node)
    if isinstance(value, Tensor):
        return _is_integer(value)
    return name_of(node) in _INTEGER_STEPS and _is_integer(value)


def _region(root: Node, top_k: int | torch.SymInt, position: dict[Node, int]) -> list[Node]:
    """What depends on the ids, until rows become tokens again, and the views in front."""
    nodes, routing = _depending(root, value_of(root).numel(), top_k, position)
    if not nodes:
        return []
    last_routed = max((position[n] for n in nodes if any(o in routing for o in n.all_input_nodes)), default=-1)
    kept: list[Node] = []
    tail = 0
    for node in nodes:
        tail += position[node] > last_routed
        if tail > _TAIL:
            break
        kept.append(node)
    region = set(kept) | set(_prelude(kept, {root, *nodes}))
    return sorted(region, key=position.__getitem__)


def _depending(
    root: Node, pairs: int | torch.SymInt, top_k: int | torch.SymInt, position: dict[Node, int]
) -> tuple[list[Node], set[Node]]:
    """Nodes that read the ids, rows of them, or what was written by such.

    Returns:
        The nodes, in order, and those that hold integers made of the ids.
    """
    routing = {root}
    order: list[Node] = []
    queue: list[tuple[int, int]] = []
    by_position: dict[int, Node] = {}
    seen: set[Node] = set()

    def push(users: Iterable[Node]) -> None:
        for user in users:
            if user not in seen and user.op in ("call_function", "call_method") and not _holds_graphs(user):
                seen.add(user)
                by_position[position[user]] = user
                heapq.heappush(queue, (position[user], 0))

    push(root.users)
    while queue:
        node = by_position[heapq.heappop(queue)[0]]
        order.append(node)
        value = value_of(node)
        for target in mutated_arguments(node):
            if _is_row_like(value_of(target), pairs, top_k):
                push(user for user in target.users if position[user] > position[node])
        # Dynamo keeps no value of an entry that the host reads next.
        if (value is None or _is_integer(value)) and any(o in routing for o in node.all_input_nodes):
            routing.add(node)
            push(node.users)
        elif _is_row_like(value, pairs, top_k) or name_of(node) in GROUPED:
            push(node.users)
        elif name_of(node) in _REDUCERS:
            push(_casts(node))
        elif name_of(node) in _COUNTS:
            routing.add(node)
            push(node.users)
    return order, routing


def _holds_graphs(node: Node) -> bool:
    """Whether a node runs subgraphs, which are searched on their own."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _is_row_like(value: Any, pairs: int | torch.SymInt, top_k: int | torch.SymInt) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and _is_row_like(value[0], pairs, top_k)
    if not isinstance(value, Tensor) or value.dim() == 0:
        return False
    if any(isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for size in value.shape):
        return True
    if _is_pairs(value.shape[0], pairs):
        return True
    return value.dim() > 1 and value.shape[1] == top_k and _is_pairs(value.shape[0] * top_k, pairs)


def _is_pairs(size: int | torch.SymInt, pairs: int | torch.SymInt) -> bool:
    left, right = (s.node.expr if isinstance(s, torch.SymInt) else s for s in (size, pairs))
    return bool(left == right)


def _casts(node: Node) -> Iterator[Node]:
    return (user for user in node.users if name_of(user) in _CASTS)


def _prelude(nodes: list[Node], inside: set[Node]) -> Iterator[Node]:
    """Views, casts and fresh buffers directly in front of a region: what they show is part of the proof."""
    seen = set(inside)
    front = [(operand, 0) for node in nodes for operand in node.all_input_nodes]
    while front:
        node, depth = front.pop()
        if node in seen or depth >= _PRELUDE_DEPTH or name_of(node) not in VIEWS | BUFFERS | {"size"}:
            continue
        if name_of(node) == "getitem" and not _is_view_of(node.args[0]):
            continue
        seen.add(node)
        yield node
        front += [(operand, depth + 1) for operand in node.all_input_nodes]


def _is_view_of(base: Any) -> bool:
    """Whether taking an item of this is a view in front of a region, and not the result of some other operation."""
    return isinstance(base, Node) and (isinstance(value_of(base), Tensor) or name_of(base) in VIEWS)


def _confirmed_form(form: str, region: list[Node]) -> str | None:
    """The form that a region looks like once its nodes are known, None if it holds no experts."""
    names = [name_of(node) for node in region]
    if any(name in GROUPED for name in names):
        return "grouped_mm"
    masks = sum(name in ("where", "nonzero", "nonzero_numpy", "index", "getitem") for name in names)
    products = sum(name in PRODUCTS for name in names)
    if not masks or not products:
        return None
    if form == "grouped_mm":
        return "expert_split" if any(name in _READS for name in names) else None
    return form
