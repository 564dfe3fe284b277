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

from moe_compile.passes.candidates import mutated_arguments, name_of, value_of
from moe_compile.passes.einsum import SPELLERS
from moe_compile.passes.iterations import Rounds, copy_rounds, find_rounds
from moe_compile.passes.match import NotProvenError

Autocast = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class NormalForm:
    """A part of a graph as functional ATen operators.

    Attributes:
        graph: the operators; placeholders are the part's inputs.
        inputs: placeholder -> the node it stands for.
        finals: node of the part -> its value in `graph` after the part has run, writes included.
        origins: operator -> the node of the part that it came from.
        nodes: the nodes that were normalised.
        failures: why others were not; what depends on those counts as coming from outside.
    """

    graph: Graph
    inputs: dict[Node, Node]
    finals: dict[Node, Node]
    origins: dict[Node, Node]
    nodes: tuple[Node, ...]
    failures: tuple[NotProvenError, ...]


def normalize(nodes: Sequence[Node], autocast: Autocast = ()) -> NormalForm:
    """Normalises some nodes of a graph.

    Args:
        nodes: in graph order.
        autocast: settings under which they run, outermost first, beyond those of the caller.

    Returns:
        Their normal form.

    Raises:
        NotProvenError: if the graph carries no fake tensors, or the nodes write to a tensor that others own.
    """
    rounds = find_rounds(nodes)
    form = _normalized(nodes, rounds, autocast) if rounds is not None else None
    return form or _normalized(nodes, None, autocast)  # type: ignore[return-value]


def _normalized(nodes: Sequence[Node], rounds: Rounds | None, autocast: Autocast) -> NormalForm | None:
    """The normal form, with most rounds of a loop copied; None if they cannot be."""
    copied = {node for nodes in rounds.copied for node in nodes} if rounds is not None else set()
    stand_ins = rounds.stand_ins() if rounds is not None else {}
    inside = set(nodes)
    inputs = list(dict.fromkeys(o for node in nodes for o in node.all_input_nodes if o not in inside))
    values = [_input_value(node) for node in inputs]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        raise NotProvenError("the graph carries no fake tensors", nodes[0])
    owner: dict[Node, Node] = {}
    done: list[Node] = []
    returned: list[Node] = []
    failures: list[NotProvenError] = []

    def run(*given: Any) -> list[Tensor]:
        env: dict[Node, Any] = dict(zip(inputs, given, strict=True))
        for node in nodes:
            if node in copied:
                if stand_ins.get(node) in env:
                    env[node] = env[stand_ins[node]]
                continue
            if any(operand not in env for operand in node.all_input_nodes):
                continue
            try:
                _step(node, env, owner)
            except NotProvenError as failure:
                if mutated_arguments(node):
                    raise
                failures.append(failure)
                continue
            done.append(node)
            if isinstance(env[node], Tensor):
                returned.append(node)
        return [env[node] for node in returned]

    with ExitStack() as stack:
        for context in _tracing_contexts(mode):
            stack.enter_context(context)
        for device, dtype, enabled, _ in autocast:
            stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
        traced = make_fx(functionalize(run), tracing_mode="real")(*values).graph
    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    by_placeholder = dict(zip(placeholders, inputs, strict=True))
    _require_own_writes(traced, by_placeholder)
    results = next(iter(reversed(traced.nodes))).args[0]
    finals = {node: result for node, result in zip(returned, results, strict=True) if isinstance(result, Node)}
    if rounds is not None:
        normal = finals | {node: placeholder for placeholder, node in by_placeholder.items()}
        if failures or not copy_rounds(rounds, traced, normal, finals, owner):
            return None
        ran = {*done, *copied}
        done = [node for node in nodes if node in ran]
    return NormalForm(traced, by_placeholder, finals, owner, tuple(done), tuple(failures))


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
    if is_random(node):
        raise NotProvenError(f"{name_of(node)} draws random numbers", node)
    proxies = get_proxy_mode()
    assert proxies is not None
    graph = proxies.tracer.graph
    before = graph._root._prev
    args, kwargs = map_arg(node.args, env.__getitem__), map_arg(node.kwargs, env.__getitem__)
    try:
        speller = SPELLERS.get(name_of(node))
        spelled = speller(*args) if speller is not None and not kwargs else None
        if spelled is not None:
            env[node] = spelled
        elif node.op == "call_function":
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        elif node.op == "call_method":
            env[node] = _call_method(str(node.target), args, kwargs)
        else:
            raise NotProvenError(f"{node.name} is a {node.op}", node)
    except NotProvenError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise NotProvenError(f"{node.name} cannot be traced alone: {what}", node) from error
    new = graph._root._prev
    while new is not before:
        owner[new] = node
        new = new._prev


def _call_method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return getattr(args[0], name)(*args[1:], **kwargs)
    except RuntimeError:
        # Functionalisation has no symbolic sizes for some in-place methods (clamp_ in 2.13).
        twin = getattr(args[0], name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
        if twin is None:
            raise
        return args[0].copy_(twin(*args[1:], **kwargs))


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers, from its name: dropout cannot be functionalised apart from autograd."""
    name = name_of(node)
    if "dropout" in name:
        training = node.kwargs.get("training", node.kwargs.get("train", node.args[2] if len(node.args) > 2 else True))
        return training is not False
    return name.startswith("rand") or name in ("bernoulli", "bernoulli_", "multinomial", "normal_", "uniform_")


def _require_own_writes(traced: Graph, inputs: dict[Node, Node]) -> None:
    for node in traced.nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0] in inputs:
            written = inputs[node.args[0]]
            raise NotProvenError(f"the block writes to {written.name}, which it did not create", written)
