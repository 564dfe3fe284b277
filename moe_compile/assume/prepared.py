"""Swaps a prepared module's forward for its program, only inside traces for our backend.

forward(self, ...)      outside of a trace, or in a trace for somebody else: the class's own
                        in a trace of ours: the program that was proven for the module's state, if there is one
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from moe_compile.assume.program import Program, make_program
from moe_compile.assume.settings import hold
from moe_compile.assume.trace import CannotAssumeError
from moe_compile.capture import tracing
from moe_compile.capture.plan import Interface, plan, traces_for_us
from moe_compile.stacking import stack, stacked

ATTRIBUTE = "_moe_compile_prepared"
_MOST_PROGRAMS = 8  # of one module: one for each dtype, mode and kind of arguments that it is called with

_lock = threading.RLock()


@dataclass(frozen=True)
class _State:
    """What a program is proven for, beside its arguments."""

    training: tuple[bool, ...]
    grad: bool
    autocast: tuple[Any, ...]
    parameters: tuple[Any, ...]

    @classmethod
    def of(cls, module: torch.nn.Module, device: torch.device) -> "_State":
        named = [*module.named_parameters(), *module.named_buffers()]
        autocast = torch.is_autocast_enabled(device.type)
        return cls(
            tuple(child.training for child in module.modules()),
            torch.is_grad_enabled(),
            (autocast, torch.get_autocast_dtype(device.type) if autocast else None),
            tuple((name, tuple(value.shape), value.dtype, value.device) for name, value in named),
        )


class Prepared:
    """The programs of one module, made when a trace first needs them.

    Copies of the module share them, which is right because a program holds nothing of the module.

    Attributes:
        programs: name -> program.
        failures: why a state of the module has none.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.programs: dict[str, Program] = {}
        self.failures: list[CannotAssumeError] = []
        self._states: dict[str, _State] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Prepared":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Prepared, (self.num_experts,)

    def find(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Name of the program for a module as it is now, made if need be; "" if there can be none."""
        leaves = pytree.tree_leaves((args, kwargs))
        if any(leaf is tracing.UNKNOWN for leaf in leaves):
            return ""
        if altered(module) is not None:
            return ""
        state = _State.of(module, _device(leaves))
        with _lock:
            for name, program in self.programs.items():
                fits = self._states[name] == state and hold(module, program.settings)
                if fits and program.tensors(args, kwargs) is not None:
                    return name
            if len(self.programs) + len(self.failures) >= _MOST_PROGRAMS:
                return ""
            try:
                program = make_program(module, *_examples(args, kwargs), self.num_experts)
            except CannotAssumeError as error:
                self.failures.append(error)
                return ""
            return self._keep(program, state)

    def keep(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program) -> None:
        """Adds a program that was made for a module as it is now."""
        self._keep(program, _State.of(module, _device(pytree.tree_leaves((args, kwargs)))))

    def _keep(self, program: Program, state: _State) -> str:
        name = f"program_{len(self.programs)}"
        self.programs[name] = program
        self._states[name] = state
        return name


def prepared_of(module: torch.nn.Module) -> Prepared | None:
    """The programs of a module, None if it was not prepared."""
    return module.__dict__.get(ATTRIBUTE)


def altered(module: torch.nn.Module) -> str | None:
    """Why the code of a module's class is not all that runs: hooks, or a forward of the instance's own."""
    for path, part in module.named_modules():
        if "forward" in part.__dict__:
            return f"the forward of {path or 'the module'} was replaced on the instance"
        if path and (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks):
            return f"{path} has hooks, which a rewritten block would not run"
    return None


def install(module: torch.nn.Module, prepared: Prepared) -> None:
    """Prepares one module, in place."""
    with _lock:
        cls = type(module)
        if "_moe_compile_users" not in cls.__dict__:
            _wrap(cls)
        cls._moe_compile_users.add(module)  # type: ignore[attr-defined]
        module.__dict__[ATTRIBUTE] = prepared


def uninstall(module: torch.nn.Module) -> None:
    """Undoes `install`; the class is as it was once none of its modules is prepared."""
    with _lock:
        cls = type(module)
        module.__dict__.pop(ATTRIBUTE, None)
        users = cls.__dict__.get("_moe_compile_users")
        if users is None:
            return
        users.discard(module)
        if not users:
            inherited = cls.__dict__["_moe_compile_inherited"]
            own = cls.__dict__["forward"]._moe_compile_own
            for name in ("forward", "_moe_compile_users", "_moe_compile_inherited"):
                delattr(cls, name)
            if not inherited:
                cls.forward = own


def _wrap(cls: type[torch.nn.Module]) -> None:
    own = cls.forward
    cls._moe_compile_inherited = "forward" not in cls.__dict__  # type: ignore[attr-defined]
    cls._moe_compile_users = WeakSet()  # type: ignore[attr-defined]
    cls.forward = _swapping(own)  # type: ignore[method-assign]


def _swapping(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and ATTRIBUTE in self.__dict__:
            choice = _planned()
            # Read here so that the compiled code is guarded by what the program was chosen for.
            if self.training is not None and choice:
                name, *tags = choice.split("\n")
                prepared: Prepared = self._moe_compile_prepared  # type: ignore[assignment]
                program = prepared.programs[name]
                if hold(self, program.settings):
                    return _run(program, tags, self, args, kwargs)
        return own(self, *args, **kwargs)

    forward._moe_compile_own = own  # type: ignore[attr-defined]
    return forward


def _run(
    program: Program, tags: list[str], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    state = [stacked(module, name) if name in program.stacks else _fetch(module, name) for name in program.state]
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return program.graph_module(*tags, *state, *tensors)


def _fetch(module: torch.nn.Module, path: str) -> Tensor:
    *parents, last = path.split(".")
    for name in parents:
        module = getattr(module, name)
    return getattr(module, last)  # type: ignore[no-any-return]


@torch._dynamo.assume_constant_result
def _planned() -> str:
    """The program's name and the tags of its blocks, joined; "" where the module's own code runs."""
    if not traces_for_us():
        return ""
    frame = tracing.innermost_translator()
    module = tracing.local_value(frame, "self")
    prepared = prepared_of(module)
    assert prepared is not None
    args, kwargs = tracing.local_values(frame, "args"), tracing.local_values(frame, "kwargs")
    with tracing.suspended():
        name = prepared.find(module, args, kwargs)
        if not name:
            return ""
        program = prepared.programs[name]
        if program.stacks:
            stack(module, program.stacks)
    tensors = program.tensors(args, kwargs)
    assert tensors is not None
    tags = []
    for match in program.matches:
        interface = Interface(
            form=lambda module, form=match.form: form,  # type: ignore[misc]
            inputs=None,
            spec=lambda module, inputs, spec=match.spec: spec,  # type: ignore[misc]
            own_code=lambda module: type(module).forward._moe_compile_own,  # type: ignore[attr-defined]
            found="prepared",
        )
        tags.append(plan(interface, program.num_tokens(tensors, match)))
    return "\n".join([name, *tags]) if all(tags) else ""


def _device(leaves: list[Any]) -> torch.device:
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))


def _examples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the sizes that Dynamo saw, in place of its own fake tensors."""
    with FakeTensorMode():
        return pytree.tree_map_only(Tensor, _example, (args, kwargs))  # type: ignore[no-any-return]


def _example(tensor: Tensor) -> Tensor:
    sizes = [_hint(size) for size in tensor.shape]
    strides = [_hint(stride) for stride in tensor.stride()]
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size
