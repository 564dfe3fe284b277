"""Capture of transformers 5: every class under `@use_experts_implementation`, whatever implementation it is set to.

Such a class looks its forward up in a registry by name at each call. Each name there, and "eager", gets a function that
traces the canonical ops when Dynamo is tracing for our backend, and in every other case calls what stood there before.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_compile.capture.experts_block import experts_block
from moe_compile.capture.plan import Inputs, Interface, plan, traces_for_us
from moe_compile.spec import ExpertsSpec, GateSpec

_INTERFACES = ("ExpertsInterface", "FP8ExpertsInterface")


def capture_registry(module: ModuleType) -> None:
    """Wraps every experts function that a registry module of transformers holds; wraps nothing twice."""
    for name in _INTERFACES:
        interface = vars(module).get(name)
        if interface is None or interface.__module__ != module.__name__:
            continue
        registered = dict(interface._global_mapping)
        # "eager" has no entry of its own: transformers then calls the class's own forward.
        for key in {*registered, "eager"}:
            function = registered.get(key)
            if not hasattr(function, "_moe_compile_previous"):
                interface.register(key, _capturing(function))
        if "get_interface" in vars(interface):
            _capture_standalone(interface)


def _capture_standalone(interface: type) -> None:
    """Captures modules made outside a model, whose config names no implementation (None).

    For them transformers logs a warning, on which Dynamo breaks the graph, and looks nothing up.
    """
    original = interface.get_interface  # type: ignore[attr-defined]
    if hasattr(original, "_moe_compile_previous"):
        return
    standalone = _capturing(None)

    @functools.wraps(original)
    def get_interface(self: Any, experts_implementation: str | None, default: Callable[..., Tensor]) -> Any:
        if experts_implementation is None and torch.compiler.is_dynamo_compiling() and _traces_for_us():
            return standalone
        return original(self, experts_implementation, default)

    get_interface._moe_compile_previous = original  # type: ignore[attr-defined]
    interface.get_interface = get_interface  # type: ignore[attr-defined]


@torch._dynamo.assume_constant_result
def _traces_for_us() -> bool:
    return traces_for_us()


def _capturing(previous: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    """The function that stands in the registry; `previous` is what stood there, None for the class's own forward."""

    interface = Interface(
        form=lambda module: f"transformers.{type(module).__name__}",
        inputs=("hidden_states", "top_k_index", "top_k_weights"),
        spec=_spec,
        own_code=lambda module: previous or own_forward(type(module)),
    )

    @torch._dynamo.assume_constant_result
    def plan_block() -> str:
        return plan(interface)

    def experts_forward(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            block = plan_block()
            if block:
                return _canonical_forward(self, hidden_states, top_k_index, top_k_weights, block)
        if previous is None:
            return own_forward(type(self))(self, hidden_states, top_k_index, top_k_weights, *args, **kwargs)
        return previous(self, hidden_states, top_k_index, top_k_weights, *args, **kwargs)

    experts_forward._moe_compile_previous = previous  # type: ignore[attr-defined]
    return experts_forward


def own_forward(cls: type) -> Callable[..., Tensor]:
    """The forward that a class had before it was decorated, looked up through its bases."""
    for base in cls.__mro__:
        forward = base.__dict__.get("forward")
        if forward is not None and hasattr(forward, "__wrapped__"):
            return forward.__wrapped__
    raise AssertionError(f"{cls.__name__} was not decorated by transformers")


def _canonical_forward(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor, block: str) -> Tensor:
    """Traced by Dynamo instead of the class's own forward."""
    if self.has_gate:
        up, up_bias, gate = self.gate_up_proj, self.gate_up_proj_bias if self.has_bias else None, self._apply_gate
    else:
        up, up_bias, gate = self.up_proj, self.up_proj_bias if self.has_bias else None, self.act_fn
    return experts_block(
        hidden,
        ids,
        weights,
        up=up,
        up_bias=up_bias,
        gate=gate,
        down=self.down_proj,
        down_bias=self.down_proj_bias if self.has_bias else None,
        after=self.post_expert_norm if _has_norm(self) else None,
        transposed=self.is_transposed,
        up_scale=_scale(self, "gate_up_proj" if self.has_gate else "up_proj"),
        down_scale=_scale(self, "down_proj"),
        block=block,
    )


def _scale(module: Any, projection: str) -> Tensor | None:
    """The scales of a quantised projection."""
    return getattr(module, f"{projection}_scale_inv", None)


def _has_norm(module: Any) -> bool:
    """Whether a norm follows each expert; releases before 5.20 do not declare it."""
    return getattr(module, "has_post_expert_norm", False)


# What the planner reads off a module, in plain Python ----------------------------------------------------------------

_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "silu": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}


def _gate_spec(module: Any) -> GateSpec:
    """The gate's kind where the class uses the default gate and a known activation, else "custom"."""
    own_gate = module.has_gate and type(module)._apply_gate.__name__ != "_default_apply_gate"
    activation = getattr(module, "act_fn", None)
    name = getattr(activation, "__name__", type(activation).__name__)
    return GateSpec("custom" if own_gate else _ACTIVATIONS.get(name, "custom"))


def _spec(module: Any, inputs: Inputs) -> ExpertsSpec:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    down = module.down_proj
    quantised = down.dtype.itemsize == 1
    spec = ExpertsSpec(
        num_experts=module.num_experts,
        top_k=inputs.ids.shape[-1] if inputs.ids is not None else None,
        hidden_size=down.shape[2] if module.is_transposed else down.shape[1],
        intermediate_size=down.shape[1] if module.is_transposed else down.shape[2],
        weight_dtype=down.dtype,
        activation_dtype=inputs.hidden.dtype if inputs.hidden is not None else None,
        routing_dtype=inputs.weights.dtype if inputs.weights is not None else None,
        gated=module.has_gate,
        concatenated=module.is_concatenated,
        transposed=module.is_transposed,
        gate=_gate_spec(module),
        post_expert_norm=_has_norm(module),
        up=up,
        up_bias=f"{up}_bias" if module.has_bias else None,
        down_bias="down_proj_bias" if module.has_bias else None,
    )
    if not quantised:
        return spec
    # FP4 weights are packed in pairs into int8, so that the last size is half of what it stands for.
    scale, block_size = _scale(module, "down_proj"), getattr(module, "block_size", None)
    return replace(
        spec,
        intermediate_size=down.shape[2] * (2 if down.dtype == torch.int8 else 1),
        quantisation="fp4" if down.dtype == torch.int8 else "fp8",
        scale_format="ue8m0" if scale is not None and scale.dtype == torch.float8_e8m0fnu else "float32",
        activation_scheme=getattr(module, "activation_scheme", "dynamic"),
        block_size=tuple(block_size) if block_size else None,
    )
