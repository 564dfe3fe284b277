"""What moe_compile knows about one experts block, as data.

Legend of shape suffixes, used throughout the project: T tokens, K experts per token (top-k), E experts,
D model (hidden) size, F expert intermediate size, N = T*K routed rows, O output features of a projection.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch

RoutingWeightPlace = Literal["output", "input", "none"]


@dataclass(frozen=True)
class GateSpec:
    """What lies between the two projections.

    Attributes:
        kind: the activation, in the field's usual names ("silu", "gelu", "gelu_tanh", "relu", "relu2",
            "swiglu_clamped", "swiglu_oai"), or "custom" for anything else. A custom gate stays in the graph as
            ordinary nodes, so that only fused backends need to know the kind.
        limit: clamp of the gate and the linear part, None without one.
        alpha: factor inside the sigmoid (gpt-oss: 1.702), None without one.
    """

    kind: str = "custom"
    limit: float | None = None
    alpha: float | None = None


@dataclass(frozen=True)
class ExpertsSpec:
    """Layout and arithmetic of one experts block.

    The same record describes a block that was found (every field that is known is filled in) and, given to
    `register_experts`, the layout of a class (sizes and dtypes are then read from the module's parameters).

    Attributes:
        num_experts: E, the experts whose weights are here (the local ones under expert parallelism).
        top_k: K, experts per token.
        hidden_size: D, features in and out.
        intermediate_size: F, features that enter the down projection.
        weight_dtype: dtype of the experts' weights.
        activation_dtype: dtype of the hidden states that enter the block.
        routing_dtype: dtype of the routing weights.
        gated: the first projection yields 2F features, half of them gating the other half.
        concatenated: gate and up are halves of the first projection; False means interleaved.
        transposed: weights are (E, in, out) instead of (E, out, in).
        gate: what lies between the projections.
        routing_weight: where the routing weight is multiplied.
        post_expert_norm: each expert's output is normalised before the routing weight.
        quantisation: None for plain floating-point weights, else the format ("fp8", "fp4").
        scale_format: format of the quantisation scales ("float32", "ue8m0"), None without any.
        activation_scheme: how activations are scaled ("dynamic" or "static"), None without quantisation.
        block_size: rows and columns of a weight that share a scale, None without quantisation.
        process_group: name of the process group over which the experts are spread, None where all are here.
        up: attribute of the module that holds the first projection, (E, 2F, D), or (E, D, 2F) when transposed.
        down: attribute that holds the second projection, (E, D, F), or (E, F, D) when transposed.
        up_bias: attribute that holds the first projection's bias (E, 2F), None without one.
        down_bias: attribute that holds the second projection's bias (E, D), None without one.
    """

    num_experts: int | None = None
    top_k: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    weight_dtype: torch.dtype | None = None
    activation_dtype: torch.dtype | None = None
    routing_dtype: torch.dtype | None = None
    gated: bool = True
    concatenated: bool = True
    transposed: bool = False
    gate: GateSpec = field(default_factory=GateSpec)
    routing_weight: RoutingWeightPlace = "output"
    post_expert_norm: bool = False
    quantisation: str | None = None
    scale_format: str | None = None
    activation_scheme: str | None = None
    block_size: tuple[int, int] | None = None
    process_group: str | None = None
    up: str = "gate_up_proj"
    down: str = "down_proj"
    up_bias: str | None = None
    down_bias: str | None = None

    @property
    def bias(self) -> bool:
        """Whether either projection adds a bias per expert."""
        return self.up_bias is not None or self.down_bias is not None

    @property
    def parameter_bytes(self) -> int | None:
        """Bytes of both projections' weights and biases, None while a size or the dtype is unknown."""
        sizes = (self.num_experts, self.hidden_size, self.intermediate_size)
        if self.weight_dtype is None or any(size is None for size in sizes):
            return None
        experts, hidden, inner = (size for size in sizes if size is not None)
        up = inner * (2 if self.gated else 1)
        biases = (up if self.up_bias else 0) + (hidden if self.down_bias else 0)
        return experts * (up * hidden + hidden * inner + biases) * self.weight_dtype.itemsize

    def summary(self) -> str:
        """One line for people, such as `E=8 K=2 D=64 F=48 bfloat16 silu concatenated`."""
        sizes = (("E", self.num_experts), ("K", self.top_k), ("D", self.hidden_size), ("F", self.intermediate_size))
        words = [f"{name}={value}" for name, value in sizes if value is not None]
        if self.weight_dtype is not None:
            words.append(str(self.weight_dtype).removeprefix("torch."))
        words.append(self.gate.kind if self.gated else f"{self.gate.kind}, not gated")
        if self.gated and not self.concatenated:
            words.append("interleaved")
        words += [
            word
            for word, present in (
                ("transposed", self.transposed),
                ("bias", self.bias),
                ("norm", self.post_expert_norm),
                (f"weight on the {self.routing_weight}", self.routing_weight != "output"),
                (self.quantisation, self.quantisation is not None),
            )
            if present and word
        ]
        return " ".join(words)
