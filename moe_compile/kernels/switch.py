"""`moe::switch`: an opaque op that runs one of several graphs, by a token count that it reads on the host.

1. A rewritten graph registers its branches under a digest of their code, before anything is compiled.
2. The op runs the first branch whose limit the token count does not exceed, the last one beyond all limits.

The digest, not the branches, is what a compiler's cache stores; a later process registers the same branches under it
when it rewrites the same graph. Inside CUDA graphs the choice is made when a graph is recorded, which happens once per
token count. Inference only.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_Branch = Callable[..., tuple[Tensor]]
_BRANCHES: dict[str, Sequence[_Branch]] = {}

torch.library.define(
    "moe::switch",
    "(Tensor[] tensors, SymInt[] sizes, SymInt tokens, int[] limits, str key, SymInt features, ScalarType dtype)"
    " -> Tensor",
)


def register_branches(key: str, branches: Sequence[_Branch]) -> None:
    """Keeps the branches of a switch, from few tokens to many; each takes the tensors and sizes, in this order."""
    _BRANCHES[key] = branches


@torch.library.impl("moe::switch", "CompositeExplicitAutograd")
def _switch(
    tensors: list[Tensor],
    sizes: list[int],
    tokens: int,
    limits: list[int],
    key: str,
    features: int,
    dtype: torch.dtype,
) -> Tensor:
    chosen = sum(tokens > limit for limit in limits)
    with torch.no_grad():
        (out,) = _BRANCHES[key][chosen](*tensors, *sizes)
    return out


@torch.library.register_fake("moe::switch")
def _switch_fake(
    tensors: list[Tensor],
    sizes: list[int],
    tokens: int,
    limits: list[int],
    key: str,
    features: int,
    dtype: torch.dtype,
) -> Tensor:
    return tensors[0].new_empty(tokens, features, dtype=dtype)
