"""`moe_compile.backend(...)`: the object that goes to `torch.compile(model, backend=...)`."""

import functools
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.fx import GraphModule

from moe_compile import decoding
from moe_compile.capture import tracing
from moe_compile.capture.sub_configs import sub_configs
from moe_compile.compilers import check_compiler, compile_graph, reset_compiler
from moe_compile.decision import OnReject, check_on_reject
from moe_compile.errors import FallbackWarning, NoExpertsWarning, SelectionError, UnseenExpertsWarning
from moe_compile.kernels.external.environment import describe_environment
from moe_compile.kernels.external.loading import registered_loaders
from moe_compile.modes import Compiler, CompileSettings, resolve_settings
from moe_compile.report import UNSEEN_REMEDY, Block, GraphSummary, Rejected, Unseen
from moe_compile.rewriter import Rewriter
from moe_compile.rules import Override, Situation
from moe_compile.selection import Experts, Selection
from moe_compile.stacking.link import linking
from moe_compile.stacking.stacks import ATTRIBUTE as STACKS
from moe_compile.tables import device_name
from moe_compile.unseen import UnseenExperts

DOCUMENTED = "documented"


def _override_of(rules: str | os.PathLike[str]) -> Override | None:
    if rules == DOCUMENTED:
        return None
    from moe_compile.compatibility.measured_rules import measured_rules  # which is not needed otherwise

    return measured_rules(rules)


class _Choice:
    """What is chosen now; compiled code is guarded by `signature`, so that `set()` is seen by the next call."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.signature = selection.signature


class MoeBackend:
    """A Dynamo backend that rewrites experts blocks and hands the graph on. Made by `backend()`.

    Two backends are equal when they would compile a model alike now: Dynamo then shares compiled code between them.
    """

    __name__ = "moe_compile"  # Dynamo asks every backend for its name

    # Modules of one class share compiled code unless their choices may differ; a report wants to see each of them.
    tells_modules_apart = False

    def __init__(
        self,
        experts: Experts,
        on_reject: OnReject,
        compiler: Compiler,
        decode: str | None = None,
        rules: str | os.PathLike[str] = DOCUMENTED,
    ) -> None:
        self.on_reject = check_on_reject(on_reject)
        self.compiler = check_compiler(compiler)
        self.rules = rules
        self.override = _override_of(rules)
        self.choice = _Choice(Selection.of(experts, decode))
        self._lock = threading.Lock()
        self._used_settings = CompileSettings()
        self._captured: WeakKeyDictionary[tracing.InstructionTranslator, dict[str, Block]] = WeakKeyDictionary()
        self._paths: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._checked: WeakSet[torch.nn.Module] = WeakSet()
        self._sub_configs: dict[str, None] = {}
        self.forget()

    def forget(self) -> None:
        """Drops the record of what was compiled."""
        self.blocks: dict[str, Block] = {}
        self.rejected: list[Rejected] = []
        self.unseen = UnseenExperts()
        self.graphs: list[GraphSummary] = []
        self._warned: set[str] = set()

    # What torch.compile calls ----------------------------------------------------------------------------------------

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: list[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Rewrites the experts blocks of a graph and compiles it.

        Args:
            gm: what Dynamo traced; it is rewritten in place.
            example_inputs: its inputs, real or fake.
            mode: a compile mode, as `torch.compile(mode=...)` passes it.
            options: Inductor options, as `torch.compile(options=...)` passes them.

        Returns:
            The compiled callable.

        Raises:
            MoeCompileError: a child of it for every combination that is not legal, before anything is compiled.
        """
        settings = self.settings(mode, options)
        translator = tracing.root_translator()
        captured = self._captured.get(translator, {}) if translator is not None else {}
        situation = situation_of(example_inputs, settings, translator is not None and translator.one_graph)
        rewriter = Rewriter(
            self.selection_now(translator, situation.device_type),
            self.on_reject,
            replace(situation, override=self.override),
            self.warn_once,
            blocks=dict(captured),
        )
        summary = rewriter.rewrite(gm)
        with self._lock:
            self._used_settings = settings
            index = len(self.graphs)
            self.graphs.append(summary)
            # Code that the model keeps may run between graphs.
            placed = {tag: b if b.keeps_own_code else replace(b, graph=index) for tag, b in rewriter.blocks.items()}
            self.blocks.update(placed)
            self.rejected += rewriter.rejected
        if translator is not None:
            self.learn_paths(tracing.root_module(translator))
            root = tracing.root_module(translator)
            # Where Dynamo split the model, this may be a part of it.
            self.check_keys(root, certain=translator.one_graph or tracing.is_whole_model(translator))
            if rewriter.blocks:
                self.unseen.reach_code(translator.f_code)
                tracing.guard_attribute(translator, self.choice, "signature")
            elif tracing.is_whole_model(translator):
                self._warn_without_experts()
        stacked = tracing.inputs_read_from(gm, STACKS)
        return linking(compile_graph(self.compiler, settings, gm, example_inputs), stacked)

    def reset(self) -> None:
        """Called by `torch._dynamo.reset()`."""
        self.forget()
        reset_compiler(self.compiler, self._used_settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MoeBackend) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((MoeBackend, self.on_reject))  # what `set()` does not change

    def _key(self) -> tuple[Any, ...]:
        return self.choice.signature, self.on_reject, self.compiler, self.override

    def __reduce__(self) -> tuple[Any, ...]:
        selection = self.choice.selection
        return MoeBackend, (dict(selection.entries), self.on_reject, self.compiler, selection.decode, self.rules)

    def __deepcopy__(self, memo: object) -> "MoeBackend":
        """Itself, as for the function that any other backend is: `CompileConfig` copies what it hands to torch."""
        return self

    def __repr__(self) -> str:
        entries = dict(self.choice.selection.entries)
        experts = entries[""] if len(entries) == 1 else entries
        decode = "" if self.choice.selection.decode is None else f", decode={self.choice.selection.decode!r}"
        rules = "" if self.rules == DOCUMENTED else f", rules={self.rules!r}"
        return (
            f"moe_compile.backend({experts!r}{decode}, on_reject={self.on_reject!r}, compiler={self.compiler!r}{rules})"
        )

    # What users call -------------------------------------------------------------------------------------------------

    def set(self, experts: Experts) -> None:
        """Chooses again, without rebuilding or recompiling by hand: the next call of the model follows.

        Code that was compiled under an earlier choice is kept and used again when that choice comes back.

        Args:
            experts: a name, or a mapping of sub-configs and module paths to names.

        Raises:
            UnknownBackendError, SelectionError: as `backend()` does; the choice then stays as it was.
        """
        selection = Selection.of(experts, self.choice.selection.decode)
        with self._lock:
            self.choice.selection = selection
            self.choice.signature = selection.signature
            self._checked.clear()  # the new keys have yet to match something

    def get(self) -> dict[str, str]:
        """The choice: one entry for the default (""), each sub-config seen so far, and each path in the mapping."""
        selection = self.choice.selection
        seen = {name: selection.name_for_sub_config(name) for name in self._sub_configs}
        return {**dict(selection.entries), **seen}

    # What capture calls, while Dynamo traces -------------------------------------------------------------------------

    def settings(self, mode: str | None, options: Mapping[str, Any] | None) -> CompileSettings:
        """What the blocks are judged by: the words of `torch.compile`, checked, and what compiles their graph.

        Raises:
            OptionError: for a mode or an option that does not exist.
        """
        return resolve_settings(mode, options, self.compiler)

    def selection_now(self, translator: tracing.InstructionTranslator | None, device_type: str) -> Selection:
        """The choice at this stage of generation, which guards the code that is being compiled."""
        selection = self.choice.selection
        if selection.decode is None or not decoding.switches_on(device_type):
            return selection
        if translator is not None:
            tracing.guard_attribute(translator, decoding.STAGE, "decoding")
        return selection.while_decoding() if decoding.STAGE.decoding else selection

    def learn_paths(self, root: torch.nn.Module | None) -> None:
        """Remembers the paths of a compiled module's children, for frames that are traced on their own later on."""
        if root is None or root in self._paths:
            return
        for path, module in root.named_modules():
            self._paths.setdefault(module, path)

    def path_of(self, module: torch.nn.Module, default: str) -> str:
        """Path of a module in the model that was compiled, else the default."""
        return self._paths.get(module, default)

    def check_keys(self, model: torch.nn.Module | None, certain: bool = True) -> None:
        """Refuses, once per model and choice, keys of the mapping that match nothing in it.

        Args:
            model: what was compiled, or what a compiled function calls.
            certain: whether it is all of what was compiled; a warning is given otherwise.

        Raises:
            SelectionError: for such a key.
        """
        # A module with a path is part of a larger model, which has been checked.
        if model is None or model in self._checked or self._paths.get(model):
            return
        self._checked.add(model)
        paths = [path for path, _ in model.named_modules()]
        try:
            self.choice.selection.check_keys(paths, sub_configs(model))
        except SelectionError as error:
            if certain:
                self._checked.discard(model)  # the next call is refused as well
                raise
            self.warn_once(str(error))

    def note_sub_config(self, name: str) -> None:
        """Remembers the name of a sub-config that a block belongs to."""
        self._sub_configs[name] = None

    def captured_blocks(self, translator: tracing.InstructionTranslator) -> dict[str, Block]:
        """The blocks captured so far in the trace that is running: tag -> block."""
        with self._lock:
            return self._captured.setdefault(translator, {})

    def note_captured(self, translator: tracing.InstructionTranslator, tag: str, block: Block) -> None:
        """Adds a block to the trace that is running."""
        self.captured_blocks(translator)[tag] = block
        with self._lock:
            self.blocks[tag] = block

    def note_attempt(self, attempt: tracing.Attempt) -> None:
        """Warns if a frame that Dynamo is done with shows that some experts never reach the compiler."""
        for module in attempt.modules:
            self.learn_paths(module)
        unseen = self.unseen.after(attempt, list(self._paths))
        if unseen is not None:
            self.warn_once(
                f"the experts of {unseen.class_name} never reach the compiler: Dynamo stops at {unseen.source} "
                f"({unseen.reason}). {UNSEEN_REMEDY}",
                UnseenExpertsWarning,
            )

    def unseen_experts(self) -> tuple[Unseen, ...]:
        """Experts that never reached the compiler."""
        return self.unseen.listing(self._paths)

    def warn_once(self, text: str, category: type[Warning] = FallbackWarning) -> None:
        """Warns, unless this backend has given the same warning before."""
        with self._lock:
            if text in self._warned:
                return
            self._warned.add(text)
        warnings.warn(text, category, stacklevel=2)

    def _warn_without_experts(self) -> None:
        if self.blocks or self.unseen_experts():
            return
        looked = "; ".join(f"{item.path or item.source}: {item.reason}" for item in self.rejected)
        self.warn_once(
            "moe_compile found no experts block in this model; it is compiled as it is"
            + (f". What looked like one: {looked}" if looked else ""),
            NoExpertsWarning,
        )


def situation_of(example_inputs: list[Any], settings: CompileSettings, fullgraph: bool) -> Situation:
    """What surrounds the blocks of a graph, read off its inputs."""
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    device = next((value.device for value in tensors), torch.device("cpu"))
    training = torch.is_grad_enabled() and any(value.requires_grad for value in tensors)
    return device_situation(device, settings, fullgraph, training)


def device_situation(
    device: torch.device, settings: CompileSettings, fullgraph: bool, training: bool, traces_whole: bool = False
) -> Situation:
    """A situation on a device, with its capability filled in."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Situation(
        device.type,
        capability,
        settings,
        fullgraph,
        training,
        traces_whole,
        _has_triton(),
        environment=describe_environment(capability, registered_loaders()),
        device_name=device_name(device.type),
    )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def backend(
    experts: Experts = "auto",
    *,
    decode: str | None = None,
    on_reject: OnReject = "error",
    compiler: Compiler = "inductor",
    rules: str | os.PathLike[str] = DOCUMENTED,
) -> MoeBackend:
    """Makes a backend for `torch.compile` that rewrites Mixture-of-Experts blocks.

        model = torch.compile(model, backend=moe_compile.backend("grouped_mm"))

    Args:
        experts: an experts backend's name ("grouped_mm", "batched_mm", "eager" or "auto"), or a mapping of
            sub-configs ("text_config") and globs over module paths ("model.layers.0.*") to names, with "" for the
            rest.
        decode: what runs instead of "grouped_mm" in the decode stage of transformers' `generate`, on CUDA; every other
            name stays what it is. transformers' own switch is `decode="batched_mm"`; "auto" needs none, as it goes by
            the token count.
        on_reject: what happens where that backend is not legal: "error" raises `RuleError`, "fallback" takes the next
            legal one and warns, "keep" leaves the model's own code and warns.
        compiler: what compiles the rewritten graph: "inductor" (with exactly the options that `mode=` and `options=`
            of `torch.compile` mean), another Dynamo backend's name, or a function of a graph module and its inputs.
        rules: "documented"; or "measured", where `moe-compile matrix --measure` on this machine has lifted or tightened
            them; or the path of such a matrix.

    Returns:
        A hashable, comparable object with `set()`, `get()` and `reset()`.

    Raises:
        UnknownBackendError: for an unknown name, of `experts` or `decode`.
        SelectionError: for a malformed mapping.
        OptionError: for an unknown policy or compiler, or where nothing was measured on this machine.
        ReportError: for a matrix that cannot be read or is another machine's.
    """
    from moe_compile.capture.install import install  # which imports this module

    install()  # again, for implementations that were registered since
    return MoeBackend(experts, on_reject, compiler, decode, rules)
