"""Lets a block with a symbolic token count choose its experts backend when it runs, in one graph.

    rows, offsets, order = dispatch(x, ids, E)          t = sym_size(x, 0)
    h = grouped_linear(rows, w, ...)             ->     y = cond(t <= 16, few, many, [x, ids, w, ...])
    ...                                                 few, many: the same nodes each, lowered by different backends
    y = combine(h, weights, order)

`torch.cond` on a symbolic size reads nothing on a device, adds no guard, and stays one graph in Inductor. But Inductor
takes it out of CUDA graphs; there the block becomes one `moe::switch`, an opaque op that chooses on the host, where the
token count is a number: at every call, and once per recorded graph. It has no backward.
"""

import hashlib
import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from moe_compile.kernels.switch import register_branches
from moe_compile.passes.blocks import META_KEYS, CanonicalBlock, fake_value, op_arguments
from moe_compile.passes.splice import replace_node

Steps = Sequence[tuple[int | None, str]]
"""(largest T, tag) per branch, from few tokens to many; the last one has no largest T."""


def branch_by_tokens(block: CanonicalBlock, steps: Steps, *, opaque: bool) -> bool:
    """Replaces a block by branches that hold it in canonical ops, in place.

    Args:
        block: a block of canonical ops.
        steps: where each branch ends, and the tag that its copy of the block gets.
        opaque: make it one op instead of `torch.cond`.

    Returns:
        False if the block cannot be taken out of its graph, which is then as it was.
    """
    region = _region(block)
    if region is None:
        return False
    inside, combine = set(region), block.combines[0]
    operands = list(dict.fromkeys(node for part in region for node in part.all_input_nodes if node not in inside))
    # Tensors first: an opaque op takes them and sizes as two lists.
    operands.sort(key=lambda node: not isinstance(fake_value(node), torch.Tensor))
    branches = [_copy(region, operands, block, tag) for _, tag in steps]
    limits = [last for last, _ in steps[:-1] if last is not None]
    with combine.graph.inserting_before(combine):
        tokens = _size(combine.graph, op_arguments(block.dispatch)["x"], combine)
        if opaque:
            result = _switch(block, operands, branches, tokens, limits)
        else:
            result = _cond(block.graph_module, combine.graph, operands, branches, tokens, limits, combine)
    replace_node(combine, result)
    for node in reversed(region[:-1]):
        node.graph.erase_node(node)
    return True


def _region(block: CanonicalBlock) -> list[Node] | None:
    """The block's nodes in graph order, None where something outside needs one of them or they are no plain calls."""
    if len(block.combines) != 1:
        return None
    combine = block.combines[0]
    after = {block.dispatch}
    between = []
    node = block.dispatch
    while node is not combine:
        if node in after:
            after.update(node.users)
            between.append(node)
        node = node.next
    region = [*between, combine]
    inside = set(region)
    for node in region:
        plain = node.op in ("call_function", "call_method") and not isinstance(
            node.target, torch._ops.HigherOrderOperator
        )
        if not plain or (node is not combine and any(user not in inside for user in node.users)):
            return None
    if any(fake is None for fake in map(_fake, {n for part in region for n in part.all_input_nodes})):
        return None
    return region


def _fake(node: Node) -> object:
    return next((node.meta[key] for key in META_KEYS if node.meta.get(key) is not None), None)


def _copy(region: list[Node], operands: list[Node], block: CanonicalBlock, tag: str) -> GraphModule:
    """The region as a graph of its own, its dispatch under another tag."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for operand in operands:
        copies[operand] = graph.placeholder(operand.name)
        copies[operand].meta = dict(operand.meta)
    for node in region:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    dispatch = copies[block.dispatch]
    arguments = op_arguments(block.dispatch) | {"block": tag}
    dispatch.args = tuple(
        copies.get(value, value) if isinstance(value, Node) else value for value in arguments.values()
    )
    dispatch.kwargs = {}
    graph.output((copies[region[-1]],))
    return GraphModule(torch.nn.Module(), graph)


def _cond(
    owner: GraphModule,
    graph: Graph,
    operands: list[Node],
    branches: list[GraphModule],
    tokens: Node,
    limits: list[int],
    combine: Node,
) -> Node:
    """`torch.cond` on the token count; what lies beyond the first branch is a condition of its own."""
    few, *rest = branches
    many = rest[0] if len(rest) == 1 else _nested(operands, rest, tokens, limits[1:], combine)
    few_node, many_node = (_attribute(owner, graph, module) for module in (few, many))
    predicate = _noted(graph.call_function(operator.le, (tokens, limits[0])), combine, fake_value(tokens) <= limits[0])
    cond = graph.call_function(torch.ops.higher_order.cond, (predicate, few_node, many_node, tuple(operands)))
    _noted(cond, combine, (fake_value(combine),))
    return _noted(graph.call_function(operator.getitem, (cond, 0)), combine, fake_value(combine))


def _nested(
    operands: list[Node], branches: list[GraphModule], tokens: Node, limits: list[int], combine: Node
) -> GraphModule:
    graph = Graph()
    owner = GraphModule(torch.nn.Module(), graph)
    copies = []
    for operand in operands:
        copies.append(graph.placeholder(operand.name))
        copies[-1].meta = dict(operand.meta)
    inner_tokens = _size(graph, copies[operands.index(tokens.args[0])], combine)  # type: ignore[arg-type]
    graph.output((_cond(owner, graph, copies, branches, inner_tokens, limits, combine),))
    owner.recompile()
    return owner


def _switch(
    block: CanonicalBlock, operands: list[Node], branches: list[GraphModule], tokens: Node, limits: list[int]
) -> Node:
    combine = block.combines[0]
    values = [fake_value(node) for node in operands]
    count = sum(isinstance(value, torch.Tensor) for value in values)
    described = [(str(v.dtype), str(v.shape), str(v.stride())) for v in values if isinstance(v, torch.Tensor)]
    text = repr(([branch.code for branch in branches], limits, described))
    key = hashlib.sha256(text.encode()).hexdigest()
    register_branches(key, branches)
    for index, branch in enumerate(branches):  # lowering finds canonical ops in the modules of the graph
        block.graph_module.add_module(_free_name(block.graph_module, f"moe_switch_{index}"), branch)
    out = fake_value(combine)
    arguments = (operands[:count], operands[count:], tokens, limits, key, out.shape[1], out.dtype)
    return _noted(combine.graph.call_function(torch.ops.moe.switch.default, arguments), combine, out)


def _size(graph: Graph, x: Node, like: Node) -> Node:
    return _noted(graph.call_function(torch.ops.aten.sym_size.int, (x, 0)), like, fake_value(x).shape[0])


def _attribute(owner: GraphModule, graph: Graph, module: GraphModule) -> Node:
    name = _free_name(owner, "moe_branch")
    owner.add_module(name, module)
    return graph.get_attr(name)


def _free_name(owner: GraphModule, stem: str) -> str:
    count = 0
    while hasattr(owner, f"{stem}_{count}"):
        count += 1
    return f"{stem}_{count}"


def _noted(node: Node, like: Node, value: object) -> Node:
    """Gives a new node another one's place in the source, and its value."""
    keys = [key for key in META_KEYS if key in like.meta] or ["val"]
    node.meta = {key: item for key, item in like.meta.items() if key not in META_KEYS} | dict.fromkeys(keys, value)
    return node
