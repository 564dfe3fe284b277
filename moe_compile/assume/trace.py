"""Traces a module whose Python asks for data, under recorded assumptions.

    if tok.numel() > 0:            answered "not empty", and written down
    for e in hit.nonzero():        runs over every expert
    counts.tolist()                sizes without a value

`make_fx` runs the module with symbolic numbers of tokens. Only questions whether an expert has tokens at all are
answered, and `discharge` has to justify every answer before anything is made of the graph; any other question that
depends on data ends the trace with the line that asked.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from moe_compile.assume.presence import counted_experts, listed_experts, presence
from moe_compile.assume.settings import Setting, read_settings
from moe_compile.side_effects import Attributes

# Frames that keep sizes; the question comes from whoever called them.
_HOST_SIDE = ("symbolic_shapes.py", "sym_node.py", "recording.py", "proxy_tensor.py", "torch/__init__.py", __file__)
# Says of an expert whether it is taken to have tokens.
Occupied = Callable[[int], bool]


@dataclass(frozen=True)
class Assumption:
    """One question that the module asked of its data, and the answer that the trace went on with.

    Attributes:
        kind: "not empty" for a test of emptiness, "every expert hit" for a loop over the experts that were hit.
        expression: the question, in words of the trace.
        source: `file.py:line` that asked.
        expert: which expert was asked about; -1 for a list of all.
    """

    kind: Literal["not empty", "every expert hit"]
    expression: str
    source: str
    expert: int


class CannotAssumeError(Exception):
    """The module asked for data in a way that no assumption covers, or does what cannot be traced.

    Args:
        reason: what it asked.
        source: `file.py:line` that asked, None if unknown.
    """

    def __init__(self, reason: str, source: str | None) -> None:
        super().__init__(f"{reason} ({source or 'unknown line'})")
        self.reason = reason
        self.source = source


@dataclass
class Traced:
    """A module as a graph.

    Attributes:
        graph_module: ATen operators before autograd, with fake values; placeholders are the parameters and buffers in
            the order of `state`, then the tensors among the arguments. The graph's output is a flat tuple.
        state: names of the parameters and buffers.
        in_spec: tree of `(args, kwargs)`.
        leaves: the flat arguments, with None where a tensor goes.
        examples: the fake tensors among the arguments.
        out_spec: tree of the result.
        assumptions: in the order in which they were made.
        conditions: what the module asked of the sizes of its arguments, and the answers; symbols stand for axes of
            `examples`.
        settings: plain attributes that the module read.
    """

    graph_module: GraphModule
    state: tuple[str, ...]
    in_spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    examples: tuple[Tensor, ...]
    out_spec: pytree.TreeSpec
    assumptions: tuple[Assumption, ...]
    conditions: tuple[tuple[Any, Any], ...]
    settings: tuple[Setting, ...]


@dataclass
class _Session:
    """What one trace has been asked so far."""

    num_experts: int
    occupied: Occupied
    assumptions: list[Assumption] = field(default_factory=list)
    conditions: list[tuple[Any, Any]] = field(default_factory=list)
    tracer: Any = None

    def answer(self, assumption: Assumption) -> bool:
        """Whether the expert in question is taken to have tokens."""
        self.assumptions.append(assumption)
        return self.occupied(assumption.expert)

    def node_of(self, tensor: Tensor) -> Node | None:
        slot = get_proxy_slot(tensor, self.tracer, None)
        return slot.proxy.node if slot is not None else None


def every_expert(expert: int) -> bool:
    """The answer of the main trace: nothing is empty."""
    return True


def trace_assuming(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_experts: int,
    occupied: Occupied = every_expert,
) -> Traced:
    """Traces a module with symbolic token counts, assuming that every expert has tokens.

    Args:
        module: any module; it is not run on data and not changed.
        args: example arguments. All axes but the last are symbolic, equal ones alike; so is the only axis of integers.
        kwargs: example keyword arguments.
        num_experts: E; what a loop over the hit experts runs over where the graph does not say it.
        occupied: which experts are taken to have tokens; questions and lists of hit experts are answered accordingly.

    Returns:
        The graph and what was assumed.

    Raises:
        CannotAssumeError: if the module asks for data in any other way.
    """
    session = _Session(num_experts, occupied)
    mode = FakeTensorMode(shape_env=_AssumingShapeEnv(session))
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    fake_state = [mode.from_tensor(value, static_shapes=True) for value in state.values()]
    fake_inputs = [_symbolic(mode, tensor) for tensor in tensors]
    fixed = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    out_spec: list[pytree.TreeSpec] = []

    def run(values: list[Tensor], inputs: list[Tensor]) -> list[Any]:
        given = iter(inputs)
        flat = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call_args, call_kwargs = pytree.tree_unflatten(flat, in_spec)
        with _HostReads(session):
            result = torch.func.functional_call(
                module, dict(zip(state, values, strict=True)), call_args, call_kwargs, tie_weights=False
            )
        outputs, spec = pytree.tree_flatten(result)
        out_spec.append(spec)
        return outputs

    attributes = Attributes(module)
    try:
        traced = make_fx(run, tracing_mode="symbolic", pre_dispatch=True, record_stack_traces=True)
        with read_settings(module) as settings:
            gm = traced(fake_state, fake_inputs)
        changed = attributes.changed()
        if changed:
            raise CannotAssumeError(f"its forward sets the attribute {changed[0]}", None)
    except CannotAssumeError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise CannotAssumeError(reason, _line_of(error)) from error
    finally:
        attributes.restore()
    lengths: list[Any] = [size for fake in fake_inputs for size in fake.shape]
    sizes = [length.node for length in lengths if isinstance(length, torch.SymInt)]
    # What became of a symbol while the module was traced, such as a length that `len()` has fixed.
    fixed_sizes = [(sympy.Eq(node._expr, node.expr), sympy.true) for node in sizes if node.expr != node._expr]
    conditions = tuple(dict.fromkeys([*session.conditions, *fixed_sizes]))
    examples = tuple(fake_inputs)
    assumptions = tuple(session.assumptions)
    return Traced(gm, tuple(state), in_spec, fixed, examples, out_spec[0], assumptions, conditions, tuple(settings))


class _AssumingShapeEnv(ShapeEnv):
    """Answers tests of emptiness on sizes that depend on data."""

    def __init__(self, session: _Session) -> None:
        # Sizes of zero and one are like all others: what depends on them becomes a condition.
        super().__init__(specialize_zero_one=False)
        self._session = session

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        frame = _asking_frame()
        try:
            result = super().evaluate_expr(orig_expr, *args, **kwargs)
            # What torch asks for itself decides strides; what the module's Python asks decides what is computed.
            if isinstance(orig_expr, sympy.logic.boolalg.Boolean) and orig_expr.free_symbols and not _is_torch(frame):
                self._session.conditions.append((orig_expr, result))
            return result
        except GuardOnDataDependentSymNode:
            if _is_torch(frame):
                return _for_torch(orig_expr)
            source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if not is_emptiness_test(orig_expr):
                raise CannotAssumeError(f"asks data for `{orig_expr}`", source) from None
            (symbol,) = orig_expr.free_symbols
            expert = counted_experts(self._session.tracer.graph).get(symbol)
            if expert is None:
                raise CannotAssumeError(f"asks `{orig_expr}` of a size that is no expert's", source) from None
            occupied = self._session.answer(Assumption("not empty", str(orig_expr), source, expert))
            return orig_expr.subs(symbol, int(occupied))


class _HostReads(TorchFunctionMode):
    """Stands in for what Python reads off tensors: flags, lists of hit experts, counts."""

    def __init__(self, session: _Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args and isinstance(args[0], FakeTensor) else None
        name = getattr(func, "__name__", "")
        if tensor is not None:
            if self.session.tracer is None:
                proxies = get_proxy_mode()
                assert proxies is not None
                self.session.tracer = proxies.tracer
            if name == "__bool__" and tensor.constant is None:
                return self._flag(tensor)
            if name in ("unbind", "tolist", "numpy", "__array__") and tensor.dim() > 0:
                if not tensor.is_floating_point() and _unknown(tensor.shape[0]):
                    return self._hit_experts(tensor, name)
                if name != "unbind" and tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64):
                    return [tensor[i].item() for i in range(tensor.shape[0])]
            if name == "cpu":
                return tensor
            if name == "__getitem__":
                return _plainly_indexed(func, tensor, args[1])
        return func(*args, **kwargs)

    def _flag(self, tensor: FakeTensor) -> bool:
        source = _source(_asking_frame())
        node = self.session.node_of(tensor)
        found = presence(node)
        if node is None or found is None or found.expert is None:
            raise CannotAssumeError(
                "asks data for the truth of a tensor that is no test for an expert's tokens", source
            )
        assumption = Assumption("not empty", f"bool({node.name})", source, found.expert)
        return self.session.answer(assumption) != found.inverted

    def _hit_experts(self, tensor: FakeTensor, name: str) -> list[Any]:
        source = _source(_asking_frame())
        node = self.session.node_of(tensor)
        found = presence(node)
        if found is None or not found.listed:
            raise CannotAssumeError("reads a list of unknown length that is not the list of the hit experts", source)
        self.session.assumptions.append(Assumption("every expert hit", f"iter({node})", source, -1))
        hit = [e for e in range(listed_experts(node) or self.session.num_experts) if self.session.occupied(e)]
        if name != "unbind":
            return hit
        return [torch.tensor(e, dtype=tensor.dtype).reshape(tensor.shape[1:]) for e in hit]


def is_emptiness_test(expression: Any) -> bool:
    """Whether a condition on one count says nothing but whether it is zero, such as `u > 0`, `u != 0`, `1 <= u`."""
    if not isinstance(expression, sympy.core.relational.Relational) or len(expression.free_symbols) != 1:
        return False
    (symbol,) = expression.free_symbols
    if {expression.lhs, expression.rhs} - {symbol} == {expression.lhs, expression.rhs}:
        return False
    (other,) = {expression.lhs, expression.rhs} - {symbol}
    if not other.is_Integer:
        return False
    truths = [bool(expression.subs(symbol, n)) for n in range(abs(int(other)) + 3)]
    return truths[0] != truths[1] and len(set(truths[1:])) == 1


def _for_torch(expression: Any) -> Any:
    """What torch itself asks of a size that depends on data: the general case, which holds for every size."""
    if not isinstance(expression, sympy.logic.boolalg.Boolean):
        raise CannotAssumeError(f"asks data for the number `{expression}`", _source(_user_frame()))
    if isinstance(expression, sympy.Eq) and len(expression.free_symbols) > 2:
        return sympy.true  # sizes of a split add up: torch checks it
    return sympy.simplify(expression.subs(dict.fromkeys(expression.free_symbols, 7)))


def _symbolic(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    fixed = 1 if tensor.dim() > 0 and (tensor.is_floating_point() or tensor.dim() > 1) else 0
    # Axes of equal length are one symbol, so that hidden states and ids agree in T.
    sizes = [DimDynamic.DUCK] * (tensor.dim() - fixed) + [DimDynamic.STATIC] * fixed
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def _unknown(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def _plainly_indexed(func: Callable[..., Any], tensor: Tensor, index: Any) -> Any:
    """Indexing by a tensor that holds one known integer, said with the integer: the same values."""
    value = _known_integer(index)
    if value is not None:
        picked = func(tensor, value)
        return picked if index.dim() == 0 else picked.unsqueeze(0)
    if isinstance(index, tuple) and sum(isinstance(item, Tensor | list) for item in index) == 1:
        known = [_known_integer(item) for item in index]
        place = next((i for i, value in enumerate(known) if value is not None), None)
        if place is not None:
            value = known[place]
            assert value is not None
            plain = value if index[place].dim() == 0 else slice(value, value + 1)
            return func(tensor, (*index[:place], plain, *index[place + 1 :]))
    return func(tensor, index)


def _known_integer(index: Any) -> int | None:
    constant = getattr(index, "constant", None)
    if not isinstance(constant, Tensor) or constant.dim() > 1 or constant.numel() != 1:
        return None
    return int(constant) if constant.dtype in (torch.int32, torch.int64) and int(constant) >= 0 else None


def _asking_frame() -> Any:
    """The frame that asked: the first that is neither part of how torch keeps sizes nor of this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_HOST_SIDE):
        frame = frame.f_back
    return frame


def _user_frame() -> Any:
    frame = sys._getframe(1)
    while frame.f_back is not None and (_is_torch(frame) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame


def _is_torch(frame: Any) -> bool:
    """Whether a frame is torch's own; its modules and functionals choose what to compute, as a user's code does."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] == "torch" and not name.startswith(("torch.nn.", "torch.functional"))


def _source(frame: Any) -> str:
    while frame.f_back is not None and _is_torch(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _line_of(error: BaseException) -> str | None:
    """The user's innermost line in an error's traceback."""
    found, trace = None, error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if not _is_torch(frame) and frame.f_code.co_filename != __file__:
            found = f"{frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
