"""Brings a part of a graph into the one form that recognisers read: ATen, functional, before autograd.

    final.index_add_(0, tok, out.to(h.dtype))   ->   index_add = aten.index_add(zeros, 0, getitem_3, mul_5)
    (Dynamo: functions, methods, writes)             (values only; later readers of `final` see index_add)

The part is run once with `make_fx` under functionalisation, in the graph's own fake mode, so sizes keep their symbols.
The graph itself is not touched. Two maps lead back: what each of its nodes is worth once the whole part has run, and
which of its nodes each operator came from.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functionalize
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta

from moe_compile.passes.candidates import storage_of, value_of
from moe_compile.passes.match import NotProvenError


@dataclass(frozen=True)
class NormalForm:
    """A part of a graph as functional ATen operators.

    Attributes:
        graph: the operators; placeholders are the part's inputs.
        inputs: placeholder -> the node it stands for.
        finals: node of the part -> its value in `graph` after the part has run, writes included.
        origins: operator -> the node of the part that it came from.
    """

    graph: Graph
    inputs: dict[Node, Node]
    finals: dict[Node, Node]
    origins: dict[Node, Node]


def normalize(nodes: Sequence[Node]) -> NormalForm:
    """Normalises some nodes of a graph.

    Args:
        nodes: in graph order.

    Returns:
        Their normal form.

    Raises:
        NotProvenError: if a node cannot be run apart from its graph, or writes to a tensor that others own.
    """
    inside = set(nodes)
    inputs = list(dict.fromkeys(o for node in nodes for o in node.all_input_nodes if o not in inside))
    values = [_input_value(node) for node in inputs]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        raise NotProvenError("the graph carries no fake tensors", nodes[0])
    owner: dict[Node, Node] = {}
    returned: list[Node] = []

    def run(*given: Any) -> list[Tensor]:
        env: dict[Node, Any] = dict(zip(inputs, given, strict=True))
        returned.clear()
        for node in nodes:
            _step(node, env, owner)
            if isinstance(env[node], Tensor):
                returned.append(node)
        return [env[node] for node in returned]

    with ExitStack() as stack:
        for context in _tracing_contexts(mode):
            stack.enter_context(context)
        traced = make_fx(functionalize(run), tracing_mode="real")(*values).graph
    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    _require_own_writes(traced, dict(zip(placeholders, inputs, strict=True)))
    results = next(iter(reversed(traced.nodes))).args[0]
    return NormalForm(
        graph=traced,
        inputs=dict(zip(placeholders, inputs, strict=True)),
        finals={node: result for node, result in zip(returned, results, strict=True) if isinstance(result, Node)},
        origins=owner,
    )


def _tracing_contexts(mode: FakeTensorMode) -> Iterator[Any]:
    """What keeps a trace from leaving marks: no autograd, no copied metadata, no fresh symbols to answer for."""
    yield torch.no_grad()
    yield preserve_node_meta(False)
    yield mode
    if mode.shape_env is not None:
        yield mode.shape_env.ignore_fresh_unbacked_symbols()


def trace(function: Any, values: Sequence[Any]) -> Graph:
    """Traces a function of fake values into ATen operators, in their own fake mode."""
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    with ExitStack() as stack:
        for context in _tracing_contexts(mode):
            stack.enter_context(context)
        return make_fx(function, tracing_mode="real")(*values).graph


def probe(function: Any, mode: FakeTensorMode) -> Any:
    """Runs a function on fake values, tracing nothing."""
    with ExitStack() as stack:
        for context in _tracing_contexts(mode):
            stack.enter_context(context)
        return function()


def _input_value(node: Node) -> Any:
    value = value_of(node)
    if value is None:
        raise NotProvenError(f"{node.name} carries no fake value", node)
    if not isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
        raise NotProvenError(f"{node.name} is a {type(value).__name__} that the block takes apart", node)
    return value


def _step(node: Node, env: dict[Node, Any], owner: dict[Node, Node]) -> None:
    proxies = get_proxy_mode()
    assert proxies is not None
    graph = proxies.tracer.graph
    before = graph._root._prev
    args, kwargs = map_arg(node.args, env.__getitem__), map_arg(node.kwargs, env.__getitem__)
    try:
        if node.op == "call_function":
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        elif node.op == "call_method":
            env[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            raise NotProvenError(f"{node.name} is a {node.op}", node)
    except NotProvenError:
        raise
    except Exception as error:
        raise NotProvenError(f"{node.name} cannot be traced alone ({type(error).__name__})", node) from error
    new = graph._root._prev
    while new is not before:
        owner[new] = node
        new = new._prev


def _require_own_writes(traced: Graph, inputs: dict[Node, Node]) -> None:
    for node in traced.nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0] in inputs:
            written = inputs[node.args[0]]
            raise NotProvenError(f"the block writes to {written.name}, which it did not create", written)


def aliases(nodes: Sequence[Node], of: Node) -> list[Node]:
    """The nodes whose values share memory with one."""
    storage = storage_of(of)
    return [node for node in nodes if storage is not None and storage_of(node) == storage]
