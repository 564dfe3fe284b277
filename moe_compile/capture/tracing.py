"""Whose trace is this? Reads the state of the Dynamo trace that is running in this thread.

Dynamo offers no public way to ask, while it traces a function, which backend the graph is for, under which options,
or which module is being traced. All reads of its internals are in this file: `InstructionTranslator.current_tx()`,
its `output.compiler_fn` (the backend, wrapped by `torch.compile`), `one_graph` (fullgraph), `symbolic_locals`, and
the guards of the trace; and, when Dynamo is done with a frame, how far it came. Tried with torch 2.11 and 2.13.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from traceback import FrameSummary
from types import CodeType, FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, GlobalSource
from torch._dynamo.symbolic_convert import InstructionTranslator as InstructionTranslator
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.utils import graph_break_reasons
from torch._dynamo.variables import ConstDictVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

log = logging.getLogger("moe_compile")
UNKNOWN = object()


@dataclass(frozen=True)
class CompilerCall:
    """The compiler of a trace: the innermost callable, and what `torch.compile` hands it beside the graph."""

    compiler: Any
    mode: str | None
    options: Mapping[str, Any] | None


def root_translator() -> InstructionTranslator | None:
    """The translator of the outermost frame that Dynamo is tracing in this thread, None outside a trace."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # the thread-local is unset until the thread's first trace
        return None


def compiler_call(translator: InstructionTranslator) -> CompilerCall:
    """Unwraps the compiler of a trace to what the user passed as `backend`."""
    return _unwrapped(translator.output.compiler_fn)


def _unwrapped(compiler: Any) -> CompilerCall:
    mode, options = None, None
    while True:
        keywords = getattr(compiler, "kwargs", None)
        if isinstance(keywords, dict):
            mode, options = keywords.get("mode", mode), keywords.get("options", options)
        for attribute in ("_torchdynamo_orig_backend", "compiler_fn"):
            inner = getattr(compiler, attribute, None)
            if inner is not None and inner is not compiler:
                compiler = inner
                break
        else:
            return CompilerCall(compiler, mode, options)


def innermost_translator() -> InstructionTranslatorBase:
    """The translator of the (possibly inlined) frame that calls a function marked `assume_constant_result`.

    `current_tx()` is the outermost frame's; the inlined one is an argument of the Dynamo function that evaluates the
    call, found by walking up the interpreter's stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        translator = frame.f_locals.get("tx")
        if isinstance(translator, InstructionTranslatorBase):
            return translator
        frame = frame.f_back  # type: ignore[assignment]
    raise AssertionError("called outside a Dynamo trace")


def local_value(translator: InstructionTranslatorBase, name: str) -> Any:
    """The Python object behind a local of a traced frame: fake for tensors, None where there is none."""
    variable = translator.symbolic_locals.get(name)
    if variable is None:
        return None
    variable = variable.realize()
    if isinstance(variable, TensorVariable):
        return variable.as_proxy().node.meta.get("example_value")
    return getattr(variable, "value", None)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Runs code in the middle of a trace as if there were none: other graphs can be traced in it."""
    with _disable_current_modes(), torch._guards.tracing(None):
        yield


def local_values(translator: InstructionTranslatorBase, name: str) -> Any:
    """Like `local_value` for a tuple, list or dict of values; `UNKNOWN` stands for what cannot be told."""
    variable = translator.symbolic_locals.get(name)
    return UNKNOWN if variable is None else _value(variable)


def _value(variable: VariableTracker) -> Any:
    variable = variable.realize()
    if isinstance(variable, TensorVariable):
        return variable.as_proxy().node.meta.get("example_value", UNKNOWN)
    if isinstance(variable, BaseListVariable):
        return variable.python_type()(_value(item) for item in variable.items)
    if isinstance(variable, ConstDictVariable):
        return {key.vt.as_python_constant(): _value(item) for key, item in variable.items.items()}
    if isinstance(variable, SymNodeVariable):
        return variable.sym_num
    return variable.as_python_constant() if variable.is_python_constant() else UNKNOWN


def module_path(translator: InstructionTranslatorBase, name: str) -> str:
    """Dotted path of the module that a local holds, relative to the traced function's argument, from its source."""
    source = getattr(translator.symbolic_locals[name].realize(), "source", None)
    return clean_path(source.name) if source is not None else ""


def clean_path(source_name: str) -> str:
    """`L['self']._modules['model'].layers[0]` -> `model.layers.0`; a closure's variable is a root as well."""
    _, _, steps = source_name.partition("]")
    steps = steps.rpartition(".cell_contents")[2]
    steps = steps.replace("._modules", "").replace("[", ".").replace("]", "")
    return ".".join(step.strip("'\"") for step in steps.split(".") if step.strip("'\""))


def root_module(translator: InstructionTranslator) -> torch.nn.Module | None:
    """The module whose method is the outermost traced frame, None for a plain function."""
    value = translator.f_locals.get("self", translator.f_locals.get("fn"))  # "fn" where Dynamo wraps torch's modules
    return value if isinstance(value, torch.nn.Module) else None


def outermost_module(translator: InstructionTranslatorBase, name: str) -> torch.nn.Module | None:
    """The first module on the way from the compiled function's variables to a local, such as a model in a closure."""
    steps: list[Any] = [getattr(translator.symbolic_locals[name].realize(), "source", None)]
    while steps[-1] is not None:
        steps.append(getattr(steps[-1], "base", None))
    frame = translator.output.root_tx
    for source in reversed(steps[:-1]):
        try:
            value = source.get_value({"G": frame.f_globals, "L": frame.f_locals}, {}, {})
        except Exception:  # a source that only compiled code can evaluate
            continue
        if isinstance(value, torch.nn.Module):
            return value
    return None


def transform() -> str | None:
    """Name of the `torch.func` transform that the traced code runs in ("vmap", "grad", "jvp"), None outside any."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return None if interpreter is None else interpreter.key().name.lower()


def is_whole_model(translator: InstructionTranslator) -> bool:
    """Whether the graph that is being compiled is all of what the user compiled, as far as can be seen.

    It is not where Dynamo split the traced function, and where it had to run a module's code as Python on the way to
    the function: that module's frame is then still on the interpreter's stack.
    """
    reason = translator.output.compile_subgraph_reason
    if translator.f_code.co_name.startswith("torch_dynamo_resume_in") or (reason is not None and reason.graph_break):
        return False
    root = root_module(translator)
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and getattr(module, "_orig_mod", module) is not root:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return True


def guard_attribute(translator: InstructionTranslator, holder: object, attribute: str) -> None:
    """Makes Dynamo compile again when an attribute of a Python object differs from what it is now."""
    name = translator.output.install_global_by_id("__moe_compile", holder)
    install_guard(AttrSource(GlobalSource(name), attribute).make_guard(GuardBuilder.CONSTANT_MATCH))


def guard_attribute_of_local(translator: InstructionTranslatorBase, name: str, *attributes: str) -> None:
    """Makes Dynamo compile again when an attribute of an attribute of a local differs from what it is now.

    Unlike `guard_attribute` it follows the local: compiled code that serves several modules reads each one's own.
    """
    source = translator.symbolic_locals[name].realize().source
    assert source is not None
    for attribute in attributes:
        source = AttrSource(source, attribute)
    install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))


def inputs_read_from(gm: GraphModule, attribute: str) -> list[int]:
    """Numbers of a graph's inputs that were read through an attribute of this name."""
    found = []
    for number, node in enumerate(node for node in gm.graph.nodes if node.op == "placeholder"):
        argument = node.meta.get("grapharg")
        if argument is not None and attribute in argument.source.name:
            found.append(number)
    return found


def guard_identity(translator: InstructionTranslatorBase, name: str) -> None:
    """Makes Dynamo compile again when a local is another object: layers that share code may then differ."""
    variable = translator.symbolic_locals[name].realize()
    if variable.source is not None:
        install_guard(variable.make_guard(GuardBuilder.ID_MATCH))


@dataclass(frozen=True)
class Stop:
    """A place where Dynamo could not follow the model's Python.

    Attributes:
        reason: Dynamo's words, the first line.
        stack: the user's frames, the outermost first.
    """

    reason: str
    stack: tuple[FrameSummary, ...]


@dataclass(frozen=True)
class Attempt:
    """A frame that Dynamo is done with, whatever came of it.

    Attributes:
        code: of the frame, which Dynamo may have made itself to go on after a graph break.
        compiler: what the frame was traced for.
        modules: those that the frame's variables hold.
        one_graph: whether fullgraph=True was asked for.
        gave_up: whether the frame runs as uncompiled Python from now on.
        stops: what stood in the way.
    """

    code: CodeType
    compiler: CompilerCall
    modules: tuple[torch.nn.Module, ...]
    one_graph: bool
    gave_up: bool
    stops: tuple[Stop, ...]

    @property
    def resumes(self) -> bool:
        """Whether the frame is the rest of one that was split."""
        return self.code.co_name.startswith("torch_dynamo_resume_in")


_listeners: list[Callable[[Attempt], None]] = []
_last_break: Any = None
_given_up: WeakSet[CodeType] = WeakSet()


def listen(listener: Callable[[Attempt], None]) -> None:
    """Calls a function after every frame that Dynamo attempts; more than once is as good as once.

    What it raises, a warning turned into an error for instance, is logged. It must not compile: Dynamo holds a lock.
    """
    if listener not in _listeners:
        _listeners.append(listener)
    if not isinstance(callback_handler.end_callbacks, _Callbacks):
        callback_handler.end_callbacks = _Callbacks([*callback_handler.end_callbacks, _after_attempt])


class _Callbacks(list[Any]):
    """Dynamo's callbacks, of which ours outlives `torch._dynamo.reset()`: nothing calls us to put it back."""

    def clear(self) -> None:
        self[:] = [_after_attempt]


def _after_attempt(_: object) -> None:
    breaks = _new_breaks()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _compiles_a_frame(frame):
        frame = frame.f_back
    if frame is None:
        return
    found = frame.f_locals
    stops = [Stop(_first_line(reason.reason), tuple(reason.user_stack)) for reason in breaks]
    error = sys.exc_info()[1]
    gave_up = isinstance(error, Unsupported | UserError | GuardOnDataDependentSymNode)
    if gave_up:
        stops.append(Stop(_first_line(error), tuple(getattr(error, "real_stack", ()))))
    values = (*found["locals"].values(), *(cell.cell_contents for cell in found["closure"] or () if _is_filled(cell)))
    attempt = Attempt(
        code=found["code"],
        compiler=_unwrapped(found["compiler_fn"]),
        modules=tuple(value for value in values if isinstance(value, torch.nn.Module)),
        one_graph=found["one_graph"],
        gave_up=gave_up,
        stops=tuple(stops),
    )
    if gave_up:
        _given_up.add(attempt.code)
    for listener in _listeners:
        try:
            listener(attempt)
        except Exception as error:  # Dynamo would count this compilation as running for ever
            log.error("%s", error, exc_info=not isinstance(error, Warning))


def look_again() -> None:
    """Lets Dynamo try once more what it gave up on, which it otherwise never looks at again, for whatever backend."""
    for code in list(_given_up):
        if not _debug_get_cache_entry_list(code):
            reset_code(code)
    _given_up.clear()


def forget_compiled(codes: Iterable[CodeType], compiler: object) -> None:
    """Drops what Dynamo compiled for a compiler, from among the frames of these codes; what others compiled stays.

    An entry between those of others can only be emptied, and goes on counting as one.
    """
    for code in codes:
        entries = _debug_get_cache_entry_list(code)
        ours = [entry for entry in entries if _unwrapped(entry.backend).compiler is compiler]
        if len(ours) == len(entries):
            reset_code(code)
            continue
        for entry in ours:
            state = entry.guard_manager.extra_state
            if state is not None:
                state.invalidate(entry, DeletedGuardManagerWrapper("it served a report"))


def _new_breaks() -> list[Any]:
    """Graph breaks since the last call: Dynamo only appends to its list, until a reset empties it."""
    global _last_break
    told = next((i + 1 for i, reason in enumerate(graph_break_reasons) if reason is _last_break), 0)
    if graph_break_reasons:
        _last_break = graph_break_reasons[-1]
    return list(graph_break_reasons[told:])


def _compiles_a_frame(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame"


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # an empty cell
        return False


def _first_line(words: object) -> str:
    return str(words).strip().partition("\n")[0]
