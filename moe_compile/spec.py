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

    Attributes:
        num_experts: E, the experts whose weights are here (the local ones under expert parallelism).
        top_k: K, experts per token.
        hidden_size: D, features in and out.
        intermediate_size: F, rows that enter the down projection.
        weight_dtype: dtype of the experts' weights.
        activation_dtype: dtype of the hidden states that enter the block.
        routing_dtype: dtype of the routing weights.
        gated: the first projection yields 2F features, half of them gating the other half.
        concatenated: gate and up are halves of the first projection; False means interleaved.
        transposed: weights are (E, in, out) instead of (E, out, in).
        bias: both projections add a bias per expert.
        gate: what lies between the projections.
        routing_weight: where the routing weight is multiplied.
        post_expert_norm: each expert's output is normalised before the routing weight.
        quantisation: None for plain floating-point weights, else the format ("fp8", "fp4").
        scale_format: format of the quantisation scales ("float32", "ue8m0"), None without any.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    weight_dtype: torch.dtype
    activation_dtype: torch.dtype
    routing_dtype: torch.dtype
    gated: bool = True
    concatenated: bool = True
    transposed: bool = False
    bias: bool = False
    gate: GateSpec = field(default_factory=GateSpec)
    routing_weight: RoutingWeightPlace = "output"
    post_expert_norm: bool = False
    quantisation: str | None = None
    scale_format: str | None = None
