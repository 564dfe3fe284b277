"""The second lock: a program is run beside its module on routings that real data seldom shows.

All pairs on one expert, most experts without a token, ids at random; one token, an odd number, none. The ids are put in
place of what the router chose, in both runs alike. This proves nothing by itself; it is there to catch what a proof may
have overlooked.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from moe_compile.assume.program import Program
from moe_compile.assume.trace import CannotAssumeError
from moe_compile.passes.candidates import name_of
from moe_compile.side_effects import undone

# What routers choose with, and which of its results holds the ids.
_CHOICES = {"topk": 1, "sort": 1, "max": 1, "argmax": None, "argsort": None}
_LARGEST_ERROR = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}


def check(program: Program, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compares a program with the module it was made of.

    Args:
        program: the program.
        module: the module, with its own forward; its buffers and the random generators are put back.
        args: real example arguments.
        kwargs: real example keyword arguments.

    Raises:
        CannotAssumeError: if the numbers differ.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # The coarsest dtype that takes part sets what rounding may do.
    floating = [value.dtype for value in state.values() if value.dtype in _LARGEST_ERROR]
    tolerance = max((_LARGEST_ERROR[dtype] for dtype in floating), default=_LARGEST_ERROR[torch.float32])
    state |= {name: torch.stack([state[path].detach() for path in paths]) for name, paths in program.stacks.items()}
    for given_args, given_kwargs in _sizes(args, kwargs):
        tensors = program.tensors(given_args, given_kwargs)
        if tensors is None:
            continue
        for ids in _routings(program, tensors):
            with torch.no_grad(), undone(module), _Forced(program, ids):
                try:
                    expected = module(*given_args, **given_kwargs)
                except Exception:  # the module's own code does not take these sizes
                    continue
            with torch.no_grad(), undone(module):
                inputs = [*("" for _ in program.matches), *(state[name] for name in program.state), *tensors]
                found = _Substituting(program.graph_module, program, ids).run(*inputs)
            if _differs(found, expected, tolerance):
                counts = "as routed" if ids is None else f"ids of shape {tuple(ids.shape)} forced"
                raise CannotAssumeError(f"the rewritten block gives other numbers than the module ({counts})", None)


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The example, and shorter ones where a single tensor has tokens."""
    yield args, kwargs
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(places) != 1 or leaves[places[0]].dim() < 2:
        return
    (place,) = places
    axis = leaves[place].dim() - 2
    for length in (1, 3, 0):
        if length < leaves[place].shape[axis]:
            shorter = list(leaves)
            shorter[place] = leaves[place].narrow(axis, 0, length)
            yield pytree.tree_unflatten(shorter, spec)


def _routings(program: Program, tensors: Sequence[Tensor]) -> Iterator[Tensor | None]:
    yield None
    if len(program.matches) != 1 or _choice(program) is None:
        return
    (match,) = program.matches
    tokens, top_k, experts = int(program.num_tokens(tensors, match)), match.spec.top_k, match.spec.num_experts
    if top_k is None or experts is None or tokens == 0:
        return
    generator = torch.Generator().manual_seed(0)
    yield torch.arange(top_k).expand(tokens, top_k)
    yield (torch.arange(top_k) + experts - top_k).expand(tokens, top_k)
    yield torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])


def _choice(program: Program) -> tuple[Node, str, int] | None:
    """The node of the program that chooses the ids, what it calls, and how many such calls come before it."""
    graph = program.graph_module.graph
    node = next(n for n in graph.nodes if n.target is torch.ops.moe.dispatch.default).args[1]
    while isinstance(node, Node) and name_of(node) not in _CHOICES:
        operands = node.all_input_nodes
        if len(operands) != 1:
            return None
        node = operands[0]
    if not isinstance(node, Node) or node.op == "placeholder":
        return None
    name = name_of(node)
    before = [n for n in graph.nodes if name_of(n) == name]
    return node, name, before.index(node)


def _put(result: Any, name: str, ids: Tensor) -> Any:
    """The result of a choice with other ids."""
    place = _CHOICES[name]
    chosen = result if place is None else result[place]
    forced = ids.to(chosen).reshape(chosen.shape)
    if place is None:
        return forced
    return type(result)((result[0], forced)) if hasattr(result, "_fields") else (result[0], forced)


class _Forced(TorchFunctionMode):
    """Puts ids in place of a module's own choice, which is found by counting calls."""

    def __init__(self, program: Program, ids: Tensor | None) -> None:
        super().__init__()
        self.ids = ids
        self.choice = _choice(program) if ids is not None else None
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.choice is None or getattr(func, "__name__", "") != self.choice[1] or isinstance(result, type(None)):
            return result
        self.calls += 1
        if self.calls != self.choice[2] + 1 or self.ids is None:
            return result
        return _put(result, self.choice[1], self.ids)


class _Substituting(Interpreter):
    """Runs a program with other ids."""

    def __init__(self, gm: GraphModule, program: Program, ids: Tensor | None) -> None:
        super().__init__(gm)
        self.ids = ids
        self.choice = _choice(program) if ids is not None else None

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if self.choice is not None and self.ids is not None and n is self.choice[0]:
            return _put(result, self.choice[1], self.ids)
        return result


def _differs(found: Any, expected: Any, tolerance: float) -> bool:
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        if not isinstance(b, Tensor):
            if a != b:
                return True
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return True
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return True
        elif b.numel() and bool((a - b).abs().max() > tolerance * b.abs().max().clamp(min=1e-3)):
            return True
    return False
