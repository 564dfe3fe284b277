"""The stacked weights of a module: made once, checked at every call, made again where something has changed.

    stack(module, {"experts.*.w1.weight": ["experts.0.w1.weight", "experts.1.w1.weight", ...]})
    weight = stacked(module, "experts.*.w1.weight")         (E, ...): one input of the graph

Compiled code is guarded by `Stacks.state`, a property. Dynamo reads it before it chooses compiled code, at every call;
reading it compares every parameter with what was stacked (the same object in the same place, at the same address) and
stacks again what differs. What may change the compiled code (dtype, device, shape, whether gradients are wanted) is the
property's value.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, getitem
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from moe_compile.capture import tracing
from moe_compile.errors import StackingError
from moe_compile.stacking.link import link, make_linkable
from moe_compile.stacking.memory import convert, lay_out, mismatch, obstacle, take_out
from moe_compile.stacking.weight import StackedWeight

ATTRIBUTE = "_moe_compile_stacks"

_lock = threading.RLock()
# id of a parameter -> the stacks whose window it is. No weak references to parameters: `swap_tensors` forbids them.
_owners: dict[int, ref["Stacks"]] = {}
_requires_grad = attrgetter("requires_grad")


class Stacks:
    """The stacked weights of one module.

    Attributes:
        groups: name -> dotted names of E parameters below the module, in the order of the experts.
        buffers: name -> stacked weight (E, ...), a leaf that wants gradients if any of its parameters does.
        refusals: name -> why the weights are copied at every call.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.groups: dict[str, tuple[str, ...]] = {}
        self.buffers: dict[str, torch.nn.Parameter] = {}
        self.refusals: dict[str, str] = {}
        self._module = ref(module)
        self._forget_layout()

    def _forget_layout(self) -> None:
        self._parameters: dict[str, list[Any]] = {}
        self._holders: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._held: list[Any] = []
        self._windows: list[Any] = []
        self._addresses: list[int] = []
        self._elements = 0
        self._state = ""

    # A copy of a module has parameters of its own, which are stacked when it runs.
    def __getstate__(self) -> dict[str, Any]:
        return {"groups": self.groups, "module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.groups, self.buffers, self.refusals = state["groups"], {}, {}
        self._module = ref(state["module"])
        self._forget_layout()

    @property
    def state(self) -> str:
        """What compiled code depends on. Reading it makes the stacked weights right; Dynamo does, before each call."""
        try:
            return self.make_right()
        except StackingError as error:  # no compiled code fits; the trace that follows raises it
            return str(error)

    def make_right(self) -> str:
        """Checks every parameter, stacks again what has changed, and returns what compiled code depends on.

        Raises:
            StackingError: if the parameters are not alike any more.
        """
        with _lock:
            if self.refusals or not self._is_intact():
                self._renew()
            elif torch.is_grad_enabled():
                self._note_gradients()
            return self._state

    def release(self) -> None:
        """Gives the parameters memory of their own."""
        with _lock:
            for name in self.buffers.keys() - self.refusals.keys():
                take_out([p for p in self._parameters[name] if self._owns(p) and p.data_ptr() in self._addresses])
                for parameter in self._parameters[name]:
                    _owners.pop(id(parameter), None)
            self.buffers.clear()
            self._forget_layout()

    def convert(self, function: Callable[[Tensor], Tensor]) -> None:
        """Takes the stacked weights to another dtype or device as a whole, before the module takes each parameter."""
        with _lock:
            if not self._is_intact():
                return
            for name in self.buffers.keys() - self.refusals.keys():
                values = convert(self.buffers[name], self._parameters[name], function)
                if values is None:
                    return
                self._put(name, values, self._parameters[name])
            self._note_layout()

    def parameters_of(self, buffer: Tensor) -> Sequence[Tensor]:
        """The parameters that lie in a stacked weight."""
        return next(self._parameters[name] for name, other in self.buffers.items() if other is buffer)

    def _owns(self, parameter: Tensor) -> bool:
        return any(parameter is window for window in self._windows)

    def _is_intact(self) -> bool:
        """Whether every parameter is the one that was stacked, and lies where it was put."""
        if not self._held:
            return False
        try:
            # Lists compare by identity first. A tensor that is another one raises or differs, as one-element weights,
            # whose comparison could be true, are never stacked.
            if list(map(getitem, self._holders, self._names)) != self._held:
                return False
            return (
                list(map(Tensor.data_ptr, self._windows)) == self._addresses
                and sum(map(Tensor.numel, self._windows)) == self._elements
                and all(map(Tensor.is_contiguous, self._windows))
            )
        except (KeyError, RuntimeError, TypeError):
            return False

    def _renew(self) -> None:
        """Stacks what is not stacked, from the parameters that the module has now."""
        module = self._module()
        assert module is not None
        edges: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        parameters = {name: [_find(module, path, edges) for path in paths] for name, paths in self.groups.items()}
        for name, group in parameters.items():
            self._renew_group(name, group)
        self._parameters = parameters
        self._holders, self._names, self._held = map(list, zip(*edges.values(), strict=True))
        self._note_layout()

    def _note_layout(self) -> None:
        self._windows = [p for name, group in self._parameters.items() if name not in self.refusals for p in group]
        self._addresses = [parameter.data_ptr() for parameter in self._windows]
        self._elements = sum(parameter.numel() for parameter in self._windows)
        self._describe()

    def _renew_group(self, name: str, parameters: list[Any]) -> None:
        difference = mismatch(parameters)
        if difference is not None:
            raise StackingError(
                f"the experts' weights {name}", f"they are not alike: {difference}", "Give all experts equal weights"
            )
        old = self.buffers.get(name)
        if old is not None and name not in self.refusals and _lie_in(parameters, old):
            self._own(parameters)
            return
        reason = obstacle(parameters)
        if reason is None and any(_owner(parameter) not in (None, self) for parameter in parameters):
            reason = "the weights are stacked for another module"
        if reason is None:
            self.refusals.pop(name, None)
            values = lay_out(parameters)
            self._own(parameters)
        else:
            self.refusals[name] = reason
            with torch.inference_mode(False), torch.no_grad():
                values = torch.stack([parameter.detach() for parameter in parameters])
        self._put(name, values, parameters)

    def _put(self, name: str, values: Tensor, parameters: list[Any]) -> None:
        buffer = torch.nn.Parameter(values, any(map(_requires_grad, parameters)))
        # Tells Dynamo that the address stays, so that CUDA graphs read the weight where it is.
        torch._dynamo.mark_static_address(buffer, guard=False)
        self.buffers[name] = buffer
        make_linkable(buffer, self.parameters_of)

    def _own(self, parameters: list[Any]) -> None:
        for parameter in parameters:
            _owners[id(parameter)] = ref(self)

    def _note_gradients(self) -> None:
        changed = False
        for name, buffer in self.buffers.items():
            wanted = any(map(_requires_grad, self._parameters[name]))
            if wanted != buffer.requires_grad:
                buffer.requires_grad_(wanted)
                changed = True
        if changed:
            self._describe()

    def _describe(self) -> None:
        self._state = "; ".join(
            f"{name}: {tuple(b.shape)} {b.dtype} {b.device} {b.requires_grad}" for name, b in self.buffers.items()
        )


class _Apply:
    """Stands in for a module's `_apply`, which `.to()` calls: converting each parameter would take all memory twice."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = ref(module)

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        module = self._module()
        assert module is not None
        module.__dict__[ATTRIBUTE].convert(function)
        return type(module)._apply(module, function, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._module = ref(state["module"])


def stack(module: torch.nn.Module, groups: Mapping[str, Sequence[str]]) -> None:
    """Lays groups of a module's parameters next to each other in memory, each group in one buffer.

    The parameters stay the same objects. Groups that cannot be moved (see `obstacle`) are copied at every call.

    Args:
        module: the module.
        groups: name -> dotted names of E parameters of equal shape, dtype and device below the module.

    Raises:
        StackingError: if the parameters of a group differ, or a name is none of a parameter. Nothing is changed then.
    """
    with _lock:
        old = module.__dict__.get(ATTRIBUTE)
        groups = {**(old.groups if old is not None else {}), **{name: tuple(paths) for name, paths in groups.items()}}
        for name, paths in groups.items():
            difference = mismatch([_find(module, path, {}) for path in paths])
            if difference is not None:
                raise StackingError(f"stack({name!r})", f"the weights differ: {difference}", "Stack equal weights")
        stacks = old if old is not None else Stacks(module)
        if stacks.groups != groups:
            stacks.groups = groups
            stacks._forget_layout()
        module.__dict__[ATTRIBUTE] = stacks
        module.__dict__["_apply"] = _Apply(module)
        stacks.make_right()


def unstack(module: torch.nn.Module) -> None:
    """Undoes `stack`: the parameters have memory of their own again. Does nothing for other modules."""
    stacks = module.__dict__.pop(ATTRIBUTE, None)
    if stacks is not None:
        del module.__dict__["_apply"]
        stacks.release()


def stacked(module: torch.nn.Module, name: str) -> Tensor:
    """A group's weights as one tensor (E, ...), without a copy; gradients reach each parameter.

    In a trace for a `moe_compile` backend it is one input of the graph, with a guard that checks the parameters.

    Args:
        module: a module that was given to `stack`.
        name: of the group.

    Raises:
        StackingError: if the parameters are not alike any more.
    """
    if torch.compiler.is_dynamo_compiling():
        _watch()
        return module._moe_compile_stacks.buffers[name]  # type: ignore[index, union-attr]
    stacks = module.__dict__[ATTRIBUTE]
    stacks.make_right()
    return link(stacks.buffers[name])


def stacked_weights(module: torch.nn.Module) -> tuple[StackedWeight, ...]:
    """The stacked weights of a module, none if it was not given to `stack`."""
    stacks = module.__dict__.get(ATTRIBUTE)
    if stacks is None:
        return ()
    return tuple(
        StackedWeight(name, buffer.shape[0], buffer.nbytes, stacks.refusals.get(name))
        for name, buffer in stacks.buffers.items()
    )


@torch._dynamo.assume_constant_result
def _watch() -> None:
    """Called at trace time by `stacked`, whose `module` is on the stack: guards the trace by the stacks' state."""
    frame = tracing.innermost_translator()
    module = tracing.local_value(frame, "module")
    with tracing.suspended():
        module.__dict__[ATTRIBUTE].make_right()
    tracing.guard_attribute_of_local(frame, "module", ATTRIBUTE, "state")


def _owner(parameter: Tensor) -> Stacks | None:
    found = _owners.get(id(parameter))
    owner = None if found is None else found()
    return owner if owner is not None and owner._owns(parameter) else None


def _lie_in(parameters: list[Any], buffer: Tensor) -> bool:
    if (len(parameters), *parameters[0].shape) != tuple(buffer.shape) or parameters[0].dtype != buffer.dtype:
        return False
    step = parameters[0].nbytes
    return all(
        p.data_ptr() == buffer.data_ptr() + number * step and p.is_contiguous() for number, p in enumerate(parameters)
    )


def _find(module: torch.nn.Module, path: str, edges: dict[tuple[int, str], tuple[dict[str, Any], str, Any]]) -> Any:
    """A parameter by its dotted name; notes each step on the way: the dictionary, the name in it, what it holds."""
    *parents, last = path.split(".")
    at = module
    for name in parents:
        edges[id(at._modules), name] = (at._modules, name, at._modules.get(name))
        at = at._modules.get(name)  # type: ignore[assignment]
        if at is None:
            break
    found = None if at is None else at._parameters.get(last)
    if found is None:
        raise StackingError(f"the weight {path}", "the module has no such parameter", "Prepare the model again")
    edges[id(at._parameters), last] = (at._parameters, last, found)
    return found
