"""Replaces a node by what a plain torch function does, as ATen operators.

    y = moe::combine(rows, weights, order)          ->          index = aten.index(rows, [order])
                                                                mul   = aten.mul(index, unsqueeze)
                                                                y     = aten.sum(mul, [1])

The function is traced with `make_fx` on the fake values of its inputs, in the graph's own fake mode, so symbolic sizes
stay symbolic. What results holds operators as autograd has yet to see them: differentiable ATen overloads alone, which
are legal in a graph from Dynamo, whose autograd follows, and in an exported program.

A model of 48 equal layers asks for the same traces 48 times. They are made once per graph and copied.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from moe_compile.errors import RewriteError
from moe_compile.passes.blocks import META_KEYS, fake_value

_COPIED_META = ("stack_trace", "nn_module_stack", "custom")

# Keyed by the root graph module: what a trace holds belongs to that graph's fake mode, and is dropped with the graph.
_TRACES: WeakKeyDictionary[GraphModule, dict[Hashable, Graph]] = WeakKeyDictionary()


def splice(
    gm: GraphModule, before: Node, function: Callable[..., Any], tensors: Sequence[Node | None], **constants: Hashable
) -> tuple[Node, ...]:
    """Inserts what `function(*tensors, **constants)` does in front of a node.

    Args:
        gm: the root graph module; traces are shared within it.
        before: where to insert; its graph may be that of a subgraph. The new nodes take its place in the source (stack
            trace, module path), and carry their fake value under the keys under which it does.
        function: a module-level torch function that returns a tensor or a tuple of them.
        tensors: the nodes of its tensor arguments, None for one that is absent.
        constants: all other arguments.

    Returns:
        The nodes of the results.
    """
    traced = _trace_once(gm, function, [None if node is None else fake_value(node) for node in tensors], constants)
    sources = iter(node for node in tensors if node is not None)
    keys = [key for key in META_KEYS if key in before.meta] or ["val"]
    context = {key: before.meta[key] for key in _COPIED_META if key in before.meta}
    copies: dict[Node, Node] = {}
    with before.graph.inserting_before(before), _without_autocast(gm, before, context):
        for node in traced.nodes:
            if node.op == "placeholder":
                copies[node] = next(sources)
            elif node.op != "output":
                copies[node] = copy = before.graph.node_copy(node, copies.__getitem__)
                copy.meta = context | dict.fromkeys(keys, node.meta["val"])
    return tuple(copies[result] for result in traced.output_node().args[0])  # type: ignore[union-attr, index, misc]


def trace(
    gm: GraphModule, function: Callable[..., Any], tensors: Sequence[Node | None], **constants: Hashable
) -> Graph:
    """What `splice` would insert, as a graph of its own: ATen operators with fake values under "val"."""
    return _trace_once(gm, function, [None if node is None else fake_value(node) for node in tensors], constants)


def replace_node(old: Node, new: Node) -> None:
    """Lets a new node take the place, and the name, of an old one, and erases that.

    The name matters to exported programs, whose signature lists outputs by it.
    """
    old.replace_all_uses_with(new)
    name, graph = old.name, old.graph
    graph.erase_node(old)
    new.name = name


@contextmanager
def _without_autocast(gm: GraphModule, before: Node, context: dict[str, Any]) -> Iterator[None]:
    """Brackets the nodes that are inserted meanwhile, if they may lie in an autocast region.

    Canonical ops are opaque to autocast and compute in the dtypes of their arguments. The operators that replace them
    are not: in the region a `bmm` of float32 would yield bfloat16, where the rest of the graph expects float32.
    """
    device_type = fake_device(before).type
    if not (torch.is_autocast_enabled(device_type) or _holds_autocast(gm)):
        yield
        return
    graph = before.graph
    settings = (device_type, torch.get_autocast_dtype(device_type), False, False)
    enter = graph.call_function(torch.amp.autocast_mode._enter_autocast, settings)
    yield
    leave = graph.call_function(torch.amp.autocast_mode._exit_autocast, (enter,))
    # Neither stands for a tensor, which the verifier of exported programs wants to be said.
    enter.meta, leave.meta = context | {"val": None}, context | {"val": None}


def _holds_autocast(gm: GraphModule) -> bool:
    targets = (torch.amp.autocast_mode._enter_autocast, wrap_with_autocast)
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    return any(graph.find_nodes(op="call_function", target=target) for graph in graphs for target in targets)


def fake_device(node: Node) -> torch.device:
    """The device of the first tensor that a node stands for."""
    return next(leaf.device for leaf in pytree.tree_leaves(fake_value(node)) if isinstance(leaf, Tensor))


def _trace_once(
    gm: GraphModule, function: Callable[..., Any], values: list[FakeTensor | None], constants: dict[str, Hashable]
) -> Graph:
    key = (function, tuple(sorted(constants.items())), tuple(map(_metadata, values)))
    traces = _TRACES.setdefault(gm, {})
    if key not in traces:
        traces[key] = _trace(function, values, constants)
    return traces[key]


def _metadata(value: FakeTensor | None) -> Hashable:
    if value is None:
        return None
    if not isinstance(value, FakeTensor):
        raise RewriteError(
            "lowering an experts block",
            f"the graph's meta holds a {type(value).__name__} instead of a fake tensor",
            "Pass a graph from torch.compile or torch.export, or run FakeTensorProp on it first",
        )
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    symbols = tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)
    return symbols, value.dtype, value.device, id(value.fake_mode)


def _trace(function: Callable[..., Any], values: list[FakeTensor | None], constants: dict[str, Hashable]) -> Graph:
    present = [value for value in values if value is not None]

    def flat(*tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        results = function(*(None if value is None else next(given) for value in values), **constants)
        return pytree.tree_leaves(results)

    # The ambient grad mode and autocast are not those in which the node will run, nor may they leave their mark here:
    # autograd traces later, and autocast acts on the operators that result.
    with (
        torch.no_grad(),
        torch.amp.autocast(present[0].device.type, enabled=False),
        preserve_node_meta(False),
        present[0].fake_mode,
    ):
        return make_fx(flat, tracing_mode="real")(*present).graph
