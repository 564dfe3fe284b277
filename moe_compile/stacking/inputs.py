"""Makes one input of each stack of parameters that a graph builds.

p0, p1, p2 = placeholders                          w = placeholder "experts.*.w1.weight"
w = aten.stack([p0, p1, p2])              ->       y = moe.grouped_linear(rows, w, ...)
y = moe.grouped_linear(rows, w, ...)
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.fx import Graph, Node


def stack_inputs(graph: Graph, names: Mapping[Node, str], parameters: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Replaces stacks of parameters by placeholders that come right after the parameters' own.

    Placeholders that nothing reads any more are erased. A parameter that is in two different stacks can lie in one
    buffer only; the second stack stays.

    Args:
        graph: changed in place.
        names: placeholder -> name of the parameter or buffer that it stands for, in order.
        parameters: which of the names are parameters.

    Returns:
        Name of each new placeholder's group -> the parameters in it.
    """
    groups: dict[str, tuple[str, ...]] = {}
    placeholders: dict[tuple[str, ...], Node] = {}
    taken: set[str] = set()
    last = list(names)[-1] if names else None
    for node in graph.nodes:
        paths = _stacked(node, names)
        if paths is None or last is None or len({*paths} & {*parameters}) < len(paths):
            continue
        if paths not in placeholders:
            if taken & {*paths}:
                continue
            taken |= {*paths}
            name = _common(paths)
            groups[name if name not in groups else ", ".join(paths)] = paths
            with graph.inserting_after(last):
                last = placeholders[paths] = graph.placeholder(f"stacked_{len(groups)}")
            last.meta = dict(node.meta)
        node.replace_all_uses_with(placeholders[paths])
        graph.erase_node(node)
    for node in names:
        if groups and not node.users:
            graph.erase_node(node)
    return groups


def _stacked(node: Node, names: Mapping[Node, str]) -> tuple[str, ...] | None:
    """Names of the parameters that a node stacks along a new first axis; None for any other node."""
    if node.target is not torch.ops.aten.stack.default or (len(node.args) > 1 and node.args[1] != 0):
        return None
    parts = node.args[0]
    if node.kwargs or not isinstance(parts, Sequence):
        return None
    found = [names[part] for part in parts if isinstance(part, Node) and part in names]
    return tuple(found) if len(found) == len(parts) and len(found) > 1 else None


def _common(paths: Sequence[str]) -> str:
    """`experts.0.w1.weight`, `experts.1.w1.weight` -> `experts.*.w1.weight`."""
    steps = [path.split(".") for path in paths]
    if len({len(step) for step in steps}) > 1:
        return ", ".join(paths)
    return ".".join(here[0] if len({*here}) == 1 else "*" for here in zip(*steps, strict=True))
