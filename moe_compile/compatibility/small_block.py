"""The small experts block that a matrix is measured on, as a class of its own with an eager loop like everybody's."""

import torch
from torch import Tensor

from moe_compile.capture.registered import register_experts
from moe_compile.spec import ExpertsSpec, GateSpec

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 2, 128, 96, 32

SPEC = ExpertsSpec(
    num_experts=NUM_EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, gate=GateSpec("silu")
)


class SmallExperts(torch.nn.Module):
    """Gated experts, looped over on the host as far as tokens reached them."""

    def __init__(self, experts: int = NUM_EXPERTS, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        up = torch.randn(experts, 2 * intermediate, hidden, generator=generator) * hidden**-0.5
        down = torch.randn(experts, hidden, intermediate, generator=generator) * intermediate**-0.5
        self.gate_up_proj, self.down_proj = torch.nn.Parameter(up), torch.nn.Parameter(down)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, D), (T, K), (T, K) -> (T, D)."""
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == expert)
            gate, up = torch.nn.functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, -1)
            rows = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, self.down_proj[expert])
            output = output.index_add(0, token, (rows * top_k_weights[token, slot, None]).to(output.dtype))
        return output


register_experts(SmallExperts, SPEC)


def inputs(
    seed: int, tokens: int = TOKENS, hidden: int = HIDDEN, experts: int = NUM_EXPERTS, top_k: int = TOP_K
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (T, D), expert ids (T, K) and routing weights (T, K) in fp32 on the CPU.

    Another seed routes otherwise; with an odd one the last expert gets no token at all.
    """
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(tokens, hidden, generator=generator)
    ids_TK = torch.rand(tokens, experts - seed % 2, generator=generator).topk(top_k, dim=1).indices
    return x_TD, ids_TK, torch.rand(tokens, top_k, generator=generator).softmax(-1)
