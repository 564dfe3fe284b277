"""`auto`: the backend that was measured fastest among those that are legal.

Until a measured table per device exists, three figures decide. On an H200 `triton` wins at every token count up to a
few hundred rows per expert, in and out of CUDA graphs, and loses to the native grouped GEMM at 2,048 rows of large
matrices (docs/measured). Without it, gathering the weights wins at one token alone: on a CPU (2 cores, torch 2.13)
fourfold, because Inductor fuses the gather away, and on an H200 it loses from 8 tokens on.
"""

import torch

from moe_compile.experts_backends import legal_names
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec

# Rows per expert up to which the own kernels were measured faster than the native grouped GEMM.
TRITON_ROWS = 512

# Tokens up to which gathering the weights was measured faster than sorting the tokens.
BATCHED_MM_TOKENS = 1


def auto_name(spec: ExpertsSpec, situation: Situation, tokens: int | torch.SymInt | None) -> str | None:
    """The name that `auto` stands for.

    Args:
        spec: the block.
        situation: what surrounds it.
        tokens: T; a symbolic count is taken for many.

    Returns:
        A legal backend's name, None if no backend is legal.
    """
    legal = legal_names(spec, situation)
    few = isinstance(tokens, int) and tokens <= BATCHED_MM_TOKENS
    preference = ("batched_mm", "grouped_mm") if few else ("grouped_mm", "batched_mm")
    few_rows = _rows_per_expert(spec, tokens) <= TRITON_ROWS
    # In CUDA graphs the alternative to the own kernels is to gather a matrix per row.
    own = ("triton",) if few_rows or situation.settings.cuda_graphs else ()
    return next((name for name in (*own, *preference, "eager") if name in legal), None)


def _rows_per_expert(spec: ExpertsSpec, tokens: int | torch.SymInt | None) -> float:
    """Rows that an expert gets on average, 0 where that is not known."""
    if not isinstance(tokens, int) or not spec.top_k or not spec.num_experts:
        return 0
    return tokens * spec.top_k / spec.num_experts
