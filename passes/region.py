"""What stands between two projections of a canonical block, as a function of the first one's rows.

    up   = moe::grouped_linear(rows, ...)
    gate, linear = up.chunk(2, -1)          }
    act  = silu(gate)                       }   region: rows (N, 2F) -> (N, F)
    hidden = act * linear                   }
    down = moe::grouped_linear(hidden, ...)

The canonical ops promise that each row goes through on its own. So the function may be applied to other rows, such as
padded ones, and its operators say which gate it is.
"""

from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from moe_compile.passes.blocks import CanonicalBlock, op_arguments


@dataclass(frozen=True)
class Region:
    """The nodes between two projections.

    Attributes:
        function: rows of the first projection, and `others`, to what enters the second.
        up: the first projection.
        down: the second.
        others: nodes from outside that the function reads, such as the scale of a norm.
        nodes: the nodes, in graph order.
    """

    function: GraphModule
    up: Node
    down: Node
    others: tuple[Node, ...]
    nodes: tuple[Node, ...]


def find_region(block: CanonicalBlock) -> Region | str:
    """The region of a block of two projections, dispatch and combine, or why it is not of this shape."""
    if len(block.linears) != 2 or len(block.combines) != 1:
        return f"it has {len(block.linears)} projections and {len(block.combines)} sums over experts"
    up, down = block.linears
    if op_arguments(up)["rows"] not in block.rows or any(set(node.users) - {up} for node in block.rows):
        return "something else than the first projection reads the sorted rows"
    if set(down.users) != set(block.combines) or op_arguments(block.combines[0])["rows"] is not down:
        return "something stands between the second projection and the sum over experts"
    readers = {*block.linears, *block.combines}
    if any(user not in readers for node in (*block.offsets, *block.order) for user in node.users):
        return "something else reads where the experts' rows end"
    nodes, inside = [], {up}
    node = up.next
    while node is not down:
        if node.op == "output" or node is node.graph._root:
            return "the second projection does not follow the first"
        if any(operand in inside for operand in node.all_input_nodes):
            inside.add(node)
            nodes.append(node)
        node = node.next
    result = op_arguments(down)["rows"]
    if result not in inside or result is up:
        return "the second projection does not read the first"
    for node in (up, *nodes):
        if any(user not in inside and user is not down for user in node.users):
            return f"something else reads {node.name}"
    return _extract(block, up, down, result, tuple(nodes))


def _extract(block: CanonicalBlock, up: Node, down: Node, result: Node, nodes: tuple[Node, ...]) -> Region:
    graph, copies = Graph(), {}
    copies[up] = graph.placeholder("rows")
    inside = {up, *nodes}
    others = tuple(dict.fromkeys(o for node in nodes for o in node.all_input_nodes if o not in inside))
    for other in others:
        copies[other] = graph.placeholder(other.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result])
    return Region(GraphModule(block.graph_module, graph), up, down, others, nodes)
