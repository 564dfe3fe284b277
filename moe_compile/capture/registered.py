"""`register_experts`: capture of classes that transformers does not know."""

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_compile.capture.experts_block import experts_block
from moe_compile.capture.plan import Inputs, Interface, plan
from moe_compile.errors import OptionError
from moe_compile.modes import nearest
from moe_compile.spec import ExpertsSpec

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
}

_lock = threading.Lock()


def register_experts(cls: type[torch.nn.Module], spec_or_function: ExpertsSpec | Callable[..., Any]) -> None:
    """Makes a class of experts known, so that its modules are rewritten in traces for our backend.

    Everywhere else (uncompiled calls, other backends) the class behaves as before. Registering a class again replaces
    its earlier registration.

    Args:
        cls: a module class.
        spec_or_function: either an `ExpertsSpec` that names the parameters and the layout, for a class whose forward
            takes hidden states (T, D), expert ids (T, K) and routing weights (T, K), in this order; or a function with
            the signature of the class's forward (the module first) that returns what it returns, spelled with
            `moe_compile.experts_block`.

    Raises:
        OptionError: if `cls` is no module class, or the spec names a gate that has no formula here.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise OptionError(
            f"register_experts({cls!r}, ...)", "this is not a module class", "Pass a torch.nn.Module class"
        )
    if not isinstance(spec_or_function, ExpertsSpec) and not callable(spec_or_function):
        raise OptionError(
            f"register_experts({cls.__name__}, {spec_or_function!r})",
            "this is neither an ExpertsSpec nor a function",
            "Pass one of the two",
        )
    if isinstance(spec_or_function, ExpertsSpec):
        _gate_of(spec_or_function)
    with _lock:
        own = getattr(cls.__dict__.get("forward"), "_moe_compile_previous", None) or cls.forward
        names = list(inspect.signature(own).parameters)[1:4]
        if isinstance(spec_or_function, ExpertsSpec):
            forward = _capturing_spec(own, spec_or_function, names)
        else:
            forward = _capturing_function(own, spec_or_function)
        cls.forward = forward  # type: ignore[method-assign]


def unregister_experts(cls: type[torch.nn.Module]) -> None:
    """Undoes `register_experts`; does nothing for a class that is not registered."""
    with _lock:
        own = getattr(cls.__dict__.get("forward"), "_moe_compile_previous", None)
        if own is not None:
            cls.forward = own  # type: ignore[method-assign]


def _capturing_function(own: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is traced as the user's function, and otherwise is the class's own."""
    interface = Interface(form=_form, inputs=None, spec=_spec_of_function, own_code=lambda module: own)

    @torch._dynamo.assume_constant_result
    def plan_block() -> str:
        return plan(interface)

    @functools.wraps(own)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and plan_block():
            return function(self, *args, **kwargs)
        return own(self, *args, **kwargs)

    forward._moe_compile_previous = own  # type: ignore[attr-defined]
    return forward


def _capturing_spec(own: Callable[..., Any], layout: ExpertsSpec, names: list[str]) -> Callable[..., Any]:
    """A forward that is traced by its layout, and otherwise is the class's own.

    Args:
        own: the class's own forward.
        layout: which parameters to use, and how.
        names: what `own` calls hidden states, expert ids and routing weights.
    """
    interface = Interface(
        form=_form,
        inputs=("hidden_states", "top_k_index", "top_k_weights"),
        spec=functools.partial(_filled, layout),
        own_code=lambda module: own,
    )
    gate = _gate_of(layout)

    @torch._dynamo.assume_constant_result
    def plan_block() -> str:
        return plan(interface)

    def planned(
        self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor | None:
        block = plan_block()
        if not block:
            return None
        return experts_block(
            hidden_states,
            top_k_index,
            top_k_weights,
            up=getattr(self, layout.up),
            up_bias=getattr(self, layout.up_bias) if layout.up_bias else None,
            gate=gate,
            down=getattr(self, layout.down),
            down_bias=getattr(self, layout.down_bias) if layout.down_bias else None,
            transposed=layout.transposed,
            block=block,
        )

    @functools.wraps(own)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            values = args + tuple(kwargs[name] for name in names[len(args) :])
            result = planned(self, *values)
            if result is not None:
                return result
        return own(self, *args, **kwargs)

    forward._moe_compile_previous = own  # type: ignore[attr-defined]
    return forward


def _form(module: torch.nn.Module) -> str:
    return f"registered.{type(module).__name__}"


def _gate_of(layout: ExpertsSpec) -> Callable[[Tensor], Tensor]:
    """The gate that a layout names, as a function of the first projection's rows (N, O)."""
    activation = _ACTIVATIONS.get(layout.gate.kind)
    if activation is None:
        raise OptionError(
            f"ExpertsSpec(gate={layout.gate!r})",
            f"there is no formula for this gate{nearest(layout.gate.kind, list(_ACTIVATIONS))}",
            f"Use one of {', '.join(_ACTIVATIONS)}, or register a function",
        )
    if not layout.gated:
        return activation

    def gated(rows: Tensor) -> Tensor:
        if layout.concatenated:
            gate, up = rows.chunk(2, dim=-1)
        else:
            gate, up = rows[..., ::2], rows[..., 1::2]
        return activation(gate) * up

    return gated


def _require_tensor(module: torch.nn.Module, field: str, name: str | None) -> None:
    """Refuses a layout that names what a module of its class does not have."""
    if name is None or isinstance(getattr(module, name, None), Tensor):
        return
    known = [known for known, _ in module.named_parameters()]
    raise OptionError(
        f"ExpertsSpec({field}={name!r}) for {type(module).__name__}",
        f"the module has no such parameter{nearest(name, known)}",
        f"Its parameters are {', '.join(known) or 'none'}",
    )


def _filled(layout: ExpertsSpec, module: torch.nn.Module, inputs: Inputs) -> ExpertsSpec:
    """The layout with the sizes and dtypes of a module's parameters and inputs."""
    for field in ("up", "down", "up_bias", "down_bias"):
        _require_tensor(module, field, getattr(layout, field))
    down = getattr(module, layout.down)
    hidden, intermediate = (down.shape[2], down.shape[1]) if layout.transposed else (down.shape[1], down.shape[2])
    return replace(
        layout,
        num_experts=down.shape[0],
        top_k=inputs.ids.shape[-1] if inputs.ids is not None else None,
        hidden_size=hidden,
        intermediate_size=intermediate,
        weight_dtype=down.dtype,
        activation_dtype=inputs.hidden.dtype if inputs.hidden is not None else None,
        routing_dtype=inputs.weights.dtype if inputs.weights is not None else None,
    )


def _spec_of_function(module: torch.nn.Module, inputs: Inputs) -> ExpertsSpec:
    """What can be said before a user's function is traced: the dtype of the module's parameters."""
    return ExpertsSpec(weight_dtype=next((p.dtype for p in module.parameters() if p.is_floating_point()), None))
