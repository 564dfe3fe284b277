"""Finds what belongs to a dense form: every expert on every token, and a matrix of weights.

    ids ──► scatter ──► scores (T, E) ──►  * ──► sum        forward: what the weights touch, up to the sum
     ▲                                     ▲
    router ◄── x ──► repeat ──► bmm ──► ... ┘               back: what they multiply, up to where the router looks

The experts' outputs do not depend on the ids, so they are found from the other end: from the products with the weights
back to the values that the router reads as well, which are the hidden states.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moe_compile.passes.candidates import (
    BUFFERS,
    PRODUCTS,
    VIEWS,
    Candidate,
    behind_views,
    find_seeds,
    mutated_arguments,
    name_of,
    sparse_region,
    value_of,
)

_FORMS = ("grouped_mm", "batched_mm", "expert_loop", "dense")
_WEIGHS = frozenset({"mul", "mul_", "imul", "where", "einsum", "bmm", "matmul"})
_PICKS = frozenset({"gather", "getitem", "index", "take_along_dim"})
MATRICES = frozenset({"scatter", "scatter_", "one_hot"})


def find_candidates(gm: GraphModule) -> list[Candidate]:
    """All candidates of a graph: at most one for each tensor of expert ids.

    A loop that picks rows and one that masks them begin with the same comparisons; the former is looked for first.
    """
    position = {node: index for index, node in enumerate(gm.graph.nodes)}
    candidates = []
    for root, seeds in find_seeds(gm).items():
        form = next(form for form in _FORMS if form in seeds.by_form)
        found = None if form == "dense" else sparse_region(root, form, seeds.top_k, position)
        marks = [node for form in ("expert_loop", "dense") for node in seeds.by_form.get(form, ())]
        picks = found is not None and (form != "expert_loop" or any(map(_is_unbacked, found.nodes)))
        if not picks and marks and isinstance(seeds.top_k, int):
            region = dense_region(root, marks, seeds.top_k, position)
            if region is not None:
                tokens = value_of(root).numel() // seeds.top_k
                nodes, hidden = region[0], frozenset(region[1])
                width = {_last_size(mark) for mark in marks if name_of(mark) in MATRICES}
                experts = width.pop() if len(width) == 1 else None
                found = Candidate("dense", root, tokens, seeds.top_k, tuple(nodes), marks[0], hidden, experts)
        if found is None:
            # The rows may be picked by what was made of the weights.
            others = (sparse_region(root, form, seeds.top_k, position) for form in ("grouped_mm", "expert_loop"))
            found = next((other for other in others if other is not None and any(map(_is_unbacked, other.nodes))), None)
        if found is not None:
            first = next(iter(seeds.by_form.get(form, ())), found.seed)
            candidates.append(replace(found, seed=first if found.form != "dense" else found.seed))
    return candidates


def _is_unbacked(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and any(
        isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for size in value.shape
    )


def dense_region(
    root: Node, seeds: Sequence[Node], top_k: int, position: dict[Node, int]
) -> tuple[list[Node], set[Node]] | None:
    """The nodes of a dense form and the hidden states in front of it.

    Args:
        root: the expert ids.
        seeds: the nodes that mark or weigh tokens by expert.
        top_k: K.
        position: node -> its place in the graph.

    Returns:
        The nodes in graph order and the hidden states; None if the weights multiply nothing that experts computed.
    """
    pairs = _numel(root)
    widths = [1, *(_last_size(seed) for seed in seeds if name_of(seed) in MATRICES)]
    numbers = {_key(count * width) for count in (pairs, pairs // top_k) for width in widths}
    picks = [seed for seed in seeds if name_of(seed) in _PICKS]
    weights, touched = _weights([root, *(seed for seed in seeds if seed not in picks)], numbers)
    touched = [*dict.fromkeys((*touched, *picks))]
    forward = _sums(touched, weights, numbers, position)
    back, hidden = _experts(forward, weights, root, numbers, position)
    names = {name_of(node) for node in (*forward, *back)}
    if not touched or not names & PRODUCTS:
        return None
    if not hidden:
        # Ids that come from elsewhere than the router: a loop over experts all the same, if there are several.
        compared = [seed for seed in seeds if name_of(seed) == "eq"]
        return (sorted({*weights, *touched} - {root}, key=position.__getitem__), set()) if len(compared) > 1 else None
    found = {*weights, *forward, *back} - {root}
    found |= set(_buffers(found))
    return sorted(found, key=position.__getitem__), hidden


def _numel(node: Node) -> int | torch.SymInt:
    value = value_of(node)
    return value.numel() if isinstance(value, Tensor) else 0


def _last_size(node: Node) -> int | torch.SymInt:
    value = value_of(node)
    return value.shape[-1] if isinstance(value, Tensor) and value.dim() else 1


def _key(number: int | torch.SymInt) -> object:
    return number.node.expr if isinstance(number, torch.SymInt) else number


def _weights(seeds: Sequence[Node], numbers: set[object]) -> tuple[set[Node], list[Node]]:
    """What is made of the weights alone, by its size, and what else reads that."""
    weights, touched = set(seeds), []
    stack = list(seeds)
    while stack:
        for user in [*stack.pop().users]:
            if user in weights or user.op not in ("call_function", "call_method"):
                continue
            value = value_of(user)
            is_number = isinstance(value, Tensor) and _key(value.numel()) in numbers and value.dim() > 0
            if is_number or (isinstance(value, tuple | list) and name_of(user) in VIEWS):
                weights.add(user)
                stack.append(user)
            elif isinstance(value, Tensor) and value.is_floating_point() and name_of(user) in _WEIGHS:
                touched.append(user)
    return weights, touched


def _sums(touched: Sequence[Node], weights: set[Node], numbers: set[object], position: dict[Node, int]) -> set[Node]:
    """From the products with weights on, as long as nothing new comes in but parameters and numbers per pair."""
    found: set[Node] = set()
    queue = [(position[node], node.name, node) for node in dict.fromkeys(touched)]
    heapq.heapify(queue)
    queued = set(touched)
    while queue:
        node = heapq.heappop(queue)[2]
        outer = [o for o in node.all_input_nodes if o not in found and o not in weights and not _is_given(o)]
        news = [o for o in outer if _key(_numel(o)) not in numbers]
        if node not in touched and news:
            continue
        found.add(node)
        # A buffer that was written in place is read under its own name.
        sources = [node, *(target for target in mutated_arguments(node))]
        for user in (user for source in sources for user in source.users):
            if user not in queued and position[user] > position[node] and user.op in ("call_function", "call_method"):
                queued.add(user)
                heapq.heappush(queue, (position[user], user.name, user))
    return found


def _is_given(node: Node) -> bool:
    """Whether a value is an input of the graph, a view of one, or a fresh buffer."""
    node = behind_views(node)
    return node.op in ("placeholder", "get_attr") or name_of(node) in BUFFERS or not isinstance(value_of(node), Tensor)


def _experts(
    forward: set[Node], weights: set[Node], root: Node, numbers: set[object], position: dict[Node, int]
) -> tuple[set[Node], set[Node]]:
    """Back from the products, up to values that the ids were made of as well: (nodes, those values)."""
    found: set[Node] = set()
    hidden: set[Node] = set()
    routers: set[Node] = set()
    rows: set[Node] = set()
    queue: list[tuple[int, str, Node]] = []

    def push(nodes: Iterable[Node], side: set[Node]) -> None:
        for node in nodes:
            if node not in side and node not in forward and node not in weights:
                if node not in rows and node not in routers:
                    heapq.heappush(queue, (-position[node], node.name, node))
                elif _is_float_matrix(node):
                    hidden.add(node)
                side.add(node)

    read = [o for node in forward for o in node.all_input_nodes]
    push((o for o in read if _key(_numel(o)) not in numbers), rows)
    push((o for o in read if _key(_numel(o)) in numbers), routers)
    push([root, *root.all_input_nodes, *(o for node in weights for o in node.all_input_nodes)], routers)
    waiting = {node for node in rows if node.op not in ("placeholder", "get_attr")}
    while queue and (waiting or not hidden):
        node = heapq.heappop(queue)[2]
        waiting.discard(node)
        if node in rows and node in routers:
            continue
        side = rows if node in rows else routers
        if node in rows and node.op in ("call_function", "call_method"):
            found.add(node)
            waiting |= {o for o in node.all_input_nodes if o.op in ("call_function", "call_method")} - forward - weights
        push(node.all_input_nodes, side)
    return found, hidden


def _is_float_matrix(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def _buffers(nodes: Iterable[Node]) -> Iterable[Node]:
    """Fresh buffers, and views of them, that some nodes read."""
    for operand in [o for node in nodes for o in node.all_input_nodes]:
        chain = [operand]
        while name_of(chain[-1]) in VIEWS and chain[-1].args and isinstance(chain[-1].args[0], Node):
            chain.append(chain[-1].args[0])
        if name_of(chain[-1]) in BUFFERS:
            yield from chain


def find_mixtures(gm: GraphModule) -> Iterable[Node]:
    """Stacks of every expert's output that are weighted by a softmax over all experts: there is no sparsity in them."""
    for node in gm.graph.nodes:
        if name_of(node) != "stack" or not isinstance(node.args[0], tuple | list) or len(node.args[0]) < 2:
            continue
        products = all(isinstance(part, Node) and name_of(behind_views(part)) in PRODUCTS for part in node.args[0])
        for user in _through_views(node) if products else ():
            others = [behind_views(o) for o in user.all_input_nodes if behind_views(o) is not node]
            if name_of(user) in _WEIGHS and any(name_of(o) == "softmax" for o in others):
                yield node
                break


def find_lookups(gm: GraphModule) -> Iterable[Node]:
    """Experts of one hidden unit each, kept in embeddings that are looked up by the same ids."""
    first: dict[object, Node] = {}
    for node in gm.graph.nodes:
        if name_of(node) != "embedding":
            continue
        index, weight = (o for o in node.all_input_nodes[:2])
        ids = index if not value_of(index).is_floating_point() else weight
        multiplied = any(name_of(user) in _WEIGHS for user in _through_views(node))
        if multiplied and value_of(ids).dim() > 1 and first.setdefault(ids, node) is not node:
            yield node


def _through_views(node: Node) -> Iterable[Node]:
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if name_of(user) in VIEWS:
                stack.append(user)
            else:
                yield user
