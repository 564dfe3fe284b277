"""A module's forward with its experts blocks in canonical ops: what is traced instead of the module's own code."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

import moe_compile.ops  # noqa: F401  registers torch.ops.moe
from moe_compile.assume.discharge import discharge
from moe_compile.assume.settings import Setting
from moe_compile.assume.trace import CannotAssumeError, Occupied, Traced, trace_assuming
from moe_compile.passes.candidates import value_of
from moe_compile.passes.describe import source_line
from moe_compile.passes.match import Match
from moe_compile.passes.recognize import apply, recognize
from moe_compile.stacking.inputs import stack_inputs

_RESULTS = (tuple, list, dict)


@dataclass(frozen=True)
class Program:
    """What a module computes, proven, for one state of it.

    Attributes:
        graph_module: called with one tag per block, then the tensors of `state`, then the tensors among the arguments;
            returns what the module returns.
        matches: the experts blocks.
        traced: the trace that it was made from.
        state: names of the parameters and buffers that it reads, and of its stacks.
        stacks: name -> the parameters, one of each expert, that it reads as one tensor (E, ...).
    """

    graph_module: GraphModule
    matches: tuple[Match, ...]
    traced: Traced
    state: tuple[str, ...]
    stacks: Mapping[str, tuple[str, ...]]

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Plain attributes of the module that it was made for."""
        return self.traced.settings

    def tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
        """The tensors among some arguments, None if the program is not for arguments like these."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.traced.in_spec:
            return None
        for leaf, example in zip(leaves, self.traced.leaves, strict=True):
            same = example is None if isinstance(leaf, Tensor) else type(leaf) is type(example) and leaf == example
            if not same:
                return None
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return tensors if self._fits(tensors) else None

    def num_tokens(self, tensors: Sequence[Tensor], match: Match) -> Any:
        """T of a block, for arguments of these sizes."""
        count = match.num_tokens
        return count if isinstance(count, int) else self._evaluate(count.node.expr, tensors)

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        sizes: dict[Any, Any] = {}
        for tensor, fake in zip(tensors, self.traced.examples, strict=True):
            if tensor.dtype != fake.dtype or tensor.dim() != fake.dim() or tensor.device != fake.device:
                return False
            for size, example in zip(tensor.shape, fake.shape, strict=True):
                expected = sizes.setdefault(_symbol(example), size) if isinstance(example, torch.SymInt) else example
                if expected is not size and size != expected:
                    return False
        return all(bool(self._evaluate(e, tensors)) == bool(truth) for e, truth in self.traced.conditions)

    def _evaluate(self, expression: Any, tensors: Sequence[Tensor]) -> Any:
        sizes = {
            _symbol(example): size
            for tensor, fake in zip(tensors, self.traced.examples, strict=True)
            for size, example in zip(tensor.shape, fake.shape, strict=True)
            if isinstance(example, torch.SymInt)
        }
        return sympy_interp(PythonReferenceAnalysis, sizes, expression)


def _symbol(size: Any) -> Any:
    """The symbol that a size was made with, even if the module has fixed it since."""
    return size.node._expr


def make_program(module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any], num_experts: int) -> Program:
    """Traces a module, proves its experts blocks and what was assumed, and writes the blocks in canonical ops.

    Args:
        module: the module; it is not run.
        args: example arguments, real or fake.
        kwargs: example keyword arguments.
        num_experts: E.

    Raises:
        CannotAssumeError: with the reason why its own code has to stay.
    """

    def trace(occupied: Occupied) -> Traced:
        return trace_assuming(module, args, kwargs, num_experts, occupied)

    traced = trace_assuming(module, args, kwargs, num_experts)
    matches, rejections = recognize(traced.graph_module)
    if not matches:
        if rejections:
            raise CannotAssumeError(rejections[0].reason, rejections[0].source)
        raise CannotAssumeError("no experts block was recognised in it", None)
    discharge(traced, num_experts, trace)
    gm = _rewritten(traced, matches)
    left = next(_data_dependent(gm.graph), None)
    if left is not None:
        raise CannotAssumeError(f"`{left.name}` depends on data outside the experts block", source_line(left))
    parameters = {name for name, _ in module.named_parameters()}
    state, stacks = _with_stacks(gm, len(matches), traced.state, parameters)
    return Program(gm, tuple(matches), traced, state, stacks)


def _with_stacks(
    gm: GraphModule, tags: int, state: Sequence[str], parameters: set[str]
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Lets a program read each stack of parameters as one; returns the names of all that it reads, and the stacks."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"][tags : tags + len(state)]
    stacks = stack_inputs(gm.graph, dict(zip(inputs, state, strict=True)), parameters)
    gm.graph.lint()
    gm.recompile()
    kept = {node for node in gm.graph.nodes if node.op == "placeholder"}
    own = [name for node, name in zip(inputs, state, strict=True) if node in kept]
    return (*own, *stacks), stacks


def _rewritten(traced: Traced, matches: list[Match]) -> GraphModule:
    """A copy of a trace with its blocks in canonical ops, their tags as arguments, and the module's kind of result."""
    gm = traced.graph_module
    names = [f"block_{index}" for index in range(len(matches))]
    apply(gm, list(zip(matches, names, strict=True)))
    graph = gm.graph
    flat = graph.output_node().args[0]
    result = pytree.tree_unflatten(list(flat), traced.out_spec)  # type: ignore[arg-type]
    if not _is_plain(result):
        raise CannotAssumeError(f"it returns a {type(result).__name__}", None)
    graph.output_node().args = (result,)
    graph.set_codegen(torch.fx.graph.CodeGen())
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        tags = {name: graph.placeholder(name) for name in names}
    for node in graph.nodes:
        if node.target is torch.ops.moe.dispatch.default:
            node.args = (*node.args[:3], tags[node.args[3]])
    graph.eliminate_dead_code()
    graph.lint()
    return GraphModule(gm, graph)


def _is_plain(result: Any) -> bool:
    if isinstance(result, dict):
        return type(result) is dict and all(_is_plain(value) for value in result.values())
    if isinstance(result, tuple | list):
        return type(result) in _RESULTS and all(_is_plain(value) for value in result)
    return isinstance(result, Node | int | float | str | bool) or result is None


def _data_dependent(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        value = value_of(node)
        values = value if isinstance(value, tuple | list) else [value]
        sizes = [s for v in values for s in (v.shape if isinstance(v, Tensor) else [v])]
        if any(
            isinstance(size, torch.SymInt | torch.SymBool | torch.SymFloat) and free_unbacked_symbols(size)
            for size in sizes
        ):
            yield node
