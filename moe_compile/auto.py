"""`auto`: the backend that was measured fastest among those that are legal.

Until a measured table per device exists, one figure decides. On a CPU (2 cores, torch 2.13) compiled batched_mm wins
fourfold at one token, because Inductor fuses the weight gather away, and loses from 16 tokens on; on an H200 it
wins at one token and loses from 8 on (docs/measured).
"""

import torch

from moe_compile.experts_backends import legal_names
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec

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
    return next((name for name in (*preference, "eager") if name in legal), None)
