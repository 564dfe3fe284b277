"""Small experts blocks in many spellings, and near misses of each, for the recognisers' tests.

Every model maps hidden states (T, D) to (T, D), routes with a linear router and `topk`, and has 2F == D, so that no
layout can be told from shapes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

E, K, D, F_ = 4, 2, 16, 8


class Routed(nn.Module):
    """A router in front of experts."""

    def __init__(self, top_k: int = K) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.top_k = top_k

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.softmax(self.router(x_TD), dim=-1, dtype=torch.float32)
        weights_TK, ids_TK = torch.topk(scores, self.top_k, dim=-1)
        return (weights_TK / weights_TK.sum(-1, keepdim=True)).to(x_TD.dtype), ids_TK

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.route(x_TD)
        return x_TD + self.experts(x_TD, ids_TK, weights_TK)

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        raise NotImplementedError


def parameter(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes) / sizes[-1] ** 0.5)


class Stacked(Routed):
    """Experts with stacked weights (E, out, in), gate and up in one."""

    def __init__(self, top_k: int = K) -> None:
        super().__init__(top_k)
        self.up, self.down = parameter(E, 2 * F_, D), parameter(E, D, F_)

    def gate(self, h: Tensor) -> Tensor:
        left, right = h.chunk(2, dim=-1)
        return F.silu(left) * right


# Sorted ---------------------------------------------------------------------------------------------------------------


class Sorted(Stacked):
    """Histogram, inverse permutation by assignment, sum over slots."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ids_N = ids_TK.reshape(-1)
        sorted_N, order_N = torch.sort(ids_N)
        offsets_E = self.offsets(ids_TK, sorted_N)
        rows = self.rows(x_TD, order_N)
        h = self.gate(self.product(rows, self.up, offsets_E))
        y = self.product(h, self.down, offsets_E)
        return self.combine(x_TD, y, order_N, weights_TK)

    def rows(self, x_TD: Tensor, order_N: Tensor) -> Tensor:
        return x_TD[order_N // self.top_k]

    def product(self, rows: Tensor, weight: Tensor, offsets_E: Tensor) -> Tensor:
        out = F.grouped_mm(rows.bfloat16(), weight.bfloat16().transpose(-2, -1), offs=offsets_E)
        return out.to(rows.dtype)

    def offsets(self, ids_TK: Tensor, sorted_N: Tensor) -> Tensor:
        counts_E = torch.histc(sorted_N.float(), bins=E, min=0, max=E - 1)
        return torch.cumsum(counts_E, 0, dtype=torch.int32)

    def combine(self, x_TD: Tensor, y: Tensor, order_N: Tensor, weights_TK: Tensor) -> Tensor:
        weighted = y * weights_TK.reshape(-1)[order_N].unsqueeze(-1)
        inverse = torch.empty_like(order_N)
        inverse[order_N] = torch.arange(order_N.shape[0], device=x_TD.device)
        return weighted[inverse].view(x_TD.shape[0], self.top_k, D).sum(1)


class SortedScatter(Sorted):
    """Counts from a multi-hot matrix, sum by `scatter_add`."""

    def offsets(self, ids_TK: Tensor, sorted_N: Tensor) -> Tensor:
        hot = torch.zeros(ids_TK.shape[0], E, dtype=torch.bool, device=ids_TK.device).scatter_(-1, ids_TK, True)
        return torch.cumsum(hot.sum(0), 0, dtype=torch.int32)

    def combine(self, x_TD: Tensor, y: Tensor, order_N: Tensor, weights_TK: Tensor) -> Tensor:
        token = order_N // self.top_k
        weighted = y * weights_TK.flatten()[order_N][:, None]
        return torch.zeros_like(x_TD).scatter_add(0, token.unsqueeze(-1).expand(-1, D), weighted)


class SortedIndexAdd(Sorted):
    """Counts from one-hot, inverse by a second argsort, weights applied after it."""

    def offsets(self, ids_TK: Tensor, sorted_N: Tensor) -> Tensor:
        return F.one_hot(ids_TK.flatten(), E).sum(0).cumsum(0).to(torch.int32)

    def combine(self, x_TD: Tensor, y: Tensor, order_N: Tensor, weights_TK: Tensor) -> Tensor:
        y_TKD = y[torch.argsort(order_N)].view(-1, self.top_k, D)
        return (y_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)


class SortedInputWeight(SortedIndexAdd):
    """The routing weight multiplies the input, and `index_add_` sums."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        order_N = torch.argsort(ids_TK.view(-1), stable=True)
        token = order_N.div(self.top_k, rounding_mode="floor")
        rows = x_TD.index_select(0, token) * weights_TK.view(-1)[order_N].unsqueeze(1)
        offsets_E = self.offsets(ids_TK, order_N)
        y = self.product(self.gate(self.product(rows, self.up, offsets_E)), self.down, offsets_E)
        return torch.zeros_like(x_TD).index_add_(0, token, y)


class SortedNorm(Sorted):
    """A norm on each expert's output, and values that are also returned to the outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)

    def combine(self, x_TD: Tensor, y: Tensor, order_N: Tensor, weights_TK: Tensor) -> Tensor:
        return super().combine(x_TD, self.norm(y), order_N, weights_TK)


# Sorted, and wrong ----------------------------------------------------------------------------------------------------


class SortedWrongDivisor(Sorted):
    def rows(self, x_TD: Tensor, order_N: Tensor) -> Tensor:
        return x_TD[order_N // (self.top_k + 1)]


class SortedFlipped(Sorted):
    def rows(self, x_TD: Tensor, order_N: Tensor) -> Tensor:
        return super().rows(x_TD, order_N).flip(0)


class SortedOtherCounts(Sorted):
    def offsets(self, ids_TK: Tensor, sorted_N: Tensor) -> Tensor:
        return super().offsets(ids_TK, (sorted_N + 1) % E)


class SortedWideBins(Sorted):
    def offsets(self, ids_TK: Tensor, sorted_N: Tensor) -> Tensor:
        return torch.cumsum(torch.histc(sorted_N.float(), bins=E, min=0, max=2 * E), 0, dtype=torch.int32)


class SortedMixing(Sorted):
    """The gate subtracts the mean over all rows."""

    def gate(self, h: Tensor) -> Tensor:
        return super().gate(h - h.mean(0, keepdim=True))


class SortedWeightsInOrder(Sorted):
    """The routing weights are not brought into expert order."""

    def combine(self, x_TD: Tensor, y: Tensor, order_N: Tensor, weights_TK: Tensor) -> Tensor:
        return super().combine(x_TD, y * weights_TK.reshape(-1, 1), order_N, weights_TK)


class SortedNoInverse(Sorted):
    """Rows are summed in expert order."""

    def combine(self, x_TD: Tensor, y: Tensor, order_N: Tensor, weights_TK: Tensor) -> Tensor:
        return y.view(x_TD.shape[0], self.top_k, D).sum(1)


class SortedDescending(Sorted):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        sorted_N, order_N = torch.sort(ids_TK.reshape(-1), descending=True)
        offsets_E = self.offsets(ids_TK, sorted_N)
        h = self.gate(self.product(self.rows(x_TD, order_N), self.up, offsets_E))
        return self.combine(x_TD, self.product(h, self.down, offsets_E), order_N, weights_TK)


# Gathered -------------------------------------------------------------------------------------------------------------


class Gathered(Stacked):
    """Weights (out, in) times columns, biases."""

    def __init__(self, top_k: int = K) -> None:
        super().__init__(top_k)
        self.up_bias, self.down_bias = parameter(E, 2 * F_), parameter(E, D)

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ids_N = ids_TK.reshape(-1)
        h = self.product(self.rows(x_TD), self.up, ids_N) + self.up_bias[ids_N]
        y = self.product(self.gate(h), self.down, ids_N).add_(self.down_bias[ids_N])
        weighted = y * weights_TK.reshape(-1).unsqueeze(-1)
        return weighted.view(x_TD.shape[0], self.top_k, D).sum(1)

    def rows(self, x_TD: Tensor) -> Tensor:
        return x_TD.repeat_interleave(self.top_k, dim=0)

    def product(self, rows: Tensor, weight: Tensor, ids_N: Tensor) -> Tensor:
        return torch.bmm(weight[ids_N], rows.unsqueeze(-1)).squeeze(-1)


class GatheredRows(Gathered):
    """Rows times weights that are transposed after the gather."""

    def product(self, rows: Tensor, weight: Tensor, ids_N: Tensor) -> Tensor:
        picked = weight.index_select(0, ids_N).transpose(1, 2)
        return torch.bmm(rows[:, None], picked)[:, 0]


class GatheredTransposed(Gathered):
    """Stacked weights (E, in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = parameter(E, D, 2 * F_), parameter(E, F_, D)

    def product(self, rows: Tensor, weight: Tensor, ids_N: Tensor) -> Tensor:
        return torch.matmul(rows.unsqueeze(1), weight[ids_N]).squeeze(1)


class GatheredOwnRows(Gathered):
    """Every pair has a row of its own, which is no repeated token."""

    def rows(self, x_TD: Tensor) -> Tensor:
        return torch.cat([x_TD, 2 * x_TD], dim=-1).view(-1, D)


class GatheredSentinels(Gathered):
    """Ids from E on belong to no expert: clamped for the gather, masked in the weights."""

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, ids_TK = super().route(x_TD)
        return weights_TK, torch.where(ids_TK == E - 1, E, ids_TK)

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        sentinel = ids_TK.reshape(-1) >= E
        return super().experts(x_TD, ids_TK.clamp(0, E - 1), self.mask(weights_TK, sentinel))

    def mask(self, weights_TK: Tensor, sentinel: Tensor) -> Tensor:
        return weights_TK.reshape(-1).masked_fill(sentinel, 0.0).view(weights_TK.shape)


class GatheredEinsum(Stacked):
    """Weights gathered per token and slot, einsums, no flat axis of pairs."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        h = self.gate(torch.einsum("td,tkfd->tkf", x_TD, self.up[ids_TK]))
        y = torch.einsum("tkf,tkdf->tkd", h, self.down[ids_TK])
        return self.weigh(y, weights_TK)

    def weigh(self, y: Tensor, weights_TK: Tensor) -> Tensor:
        return torch.einsum("tkd,tk->td", y, weights_TK)


# Gathered, and wrong --------------------------------------------------------------------------------------------------


class GatheredUnmasked(GatheredSentinels):
    def mask(self, weights_TK: Tensor, sentinel: Tensor) -> Tensor:
        return weights_TK


class GatheredWiderClamp(Gathered):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return super().experts(x_TD, ids_TK.clamp(0, E - 2), weights_TK)


class GatheredEinsumOverFeatures(GatheredEinsum):
    """Slots are mixed before they are weighted."""

    def gate(self, h: Tensor) -> Tensor:
        return super().gate(h.softmax(1))


class GatheredScale(Gathered):
    """A factor per expert that is no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = parameter(E, D)

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ids_N = ids_TK.reshape(-1)
        h = self.product(self.rows(x_TD), self.up, ids_N) + self.up_bias[ids_N]
        y = self.product(self.gate(h), self.down, ids_N) * self.scale[ids_N]
        return (y * weights_TK.reshape(-1, 1)).view(x_TD.shape[0], self.top_k, D).sum(1)


# Loops ----------------------------------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = F.silu, width: int = F_, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, width, bias=bias), nn.Linear(D, width, bias=bias)
        self.w2 = nn.Linear(width, D, bias=bias)
        self.activation = activation

    def forward(self, rows: Tensor) -> Tensor:
        return self.w2(self.activation(self.w1(rows)) * self.w3(rows))


class Loop(Routed):
    """`one_hot`, `where`, `index_add_`."""

    numbers = range(E)

    def __init__(self, top_k: int = K, **expert: Any) -> None:
        super().__init__(top_k)
        self.layers = nn.ModuleList([Expert(**expert) for _ in range(E)])

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        hot = F.one_hot(ids_TK, num_classes=E).permute(2, 1, 0)
        for e in self.numbers:
            slot, token = torch.where(hot[e])
            rows = self.layers[e](x_TD[token]) * weights_TK[token, slot, None]
            out.index_add_(0, token, rows.to(x_TD.dtype))
        return out


class LoopOutOfOrder(Loop):
    """The experts run in another order, each for its own rows: the same sum."""

    numbers = (2, 0, 3, 1)


class LoopMissingLast(Loop):
    """Ids of the last expert are sentinels."""

    numbers = range(E - 1)


class LoopPlusEquals(Loop):
    """`==`, `where`, `+=`."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            out[token] += weights_TK[token, slot, None] * layer(x_TD[token])
        return out


class LoopAssign(Loop):
    """Boolean masks over repeated tokens, assignment, sum over slots at the end."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ids_N = ids_TK.view(-1)
        repeated = x_TD.repeat_interleave(self.top_k, dim=0)
        y = torch.empty_like(repeated)
        for e, layer in enumerate(self.layers):
            y[ids_N == e] = layer(repeated[ids_N == e])
        return (y.view(*weights_TK.shape, -1) * weights_TK.unsqueeze(-1)).sum(dim=1)


class LoopStacked(Stacked):
    """Stacked weights, indexed by the expert; `nonzero` and an out-of-place sum."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e in range(E):
            token, slot = (ids_TK == e).nonzero(as_tuple=True)
            h = self.gate(F.linear(x_TD[token], self.up[e]))
            y = h @ self.down[self.number(e)].t()
            out = out.index_add(0, token, y * weights_TK[token, slot].unsqueeze(-1))
        return out

    def number(self, e: int) -> int:
        return e


class LoopPostAdd(Loop):
    """The sum starts from something else than zeros."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = 3 * x_TD
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            out = out.index_add(0, token, layer(x_TD[token]) * weights_TK[token, slot, None])
        return out


# Loops, and wrong -----------------------------------------------------------------------------------------------------


class LoopShuffled(LoopStacked):
    """Expert e's second projection is another expert's."""

    def number(self, e: int) -> int:
        return (e + 1) % E


class LoopOtherActivation(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].activation = F.gelu


class LoopUnequal(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Expert(width=F_ + 2)


class LoopMissing(Loop):
    numbers = (0, 1, 3)


class LoopTwice(Loop):
    numbers = (0, 1, 2, 3, 1)


class LoopReadsSum(Loop):
    """Each expert sees what the earlier ones added."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            out.index_add_(0, token, layer(x_TD[token] + out[token]) * weights_TK[token, slot, None])
        return out


class LoopMutatesWeights(LoopStacked):
    """A weight changes between two experts."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        down = self.down * 1
        out = torch.zeros_like(x_TD)
        for e in range(E):
            token, slot = torch.where(ids_TK == e)
            y = self.gate(x_TD[token] @ self.up[e].t()) @ down[e].t()
            out.index_add_(0, token, y * weights_TK[token, slot, None])
            down.mul_(1.5)
        return out


class LoopMutatesHidden(Loop):
    """The hidden states change between two experts."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        x_TD, out = x_TD * 1, torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            out.index_add_(0, token, layer(x_TD[token]) * weights_TK[token, slot, None])
            x_TD.add_(1)
        return out


class LoopDropout(Loop):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            rows = F.dropout(layer(x_TD[token]), 0.5, self.training)
            out.index_add_(0, token, rows * weights_TK[token, slot, None])
        return out


class LoopProbe(Loop):
    """The sum is looked at after two experts."""

    def forward(self, x_TD: Tensor) -> Any:
        weights_TK, ids_TK = self.route(x_TD)
        out, seen = torch.zeros_like(x_TD), None
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            out.index_add_(0, token, layer(x_TD[token]) * weights_TK[token, slot, None])
            if e == 1:
                seen = out.abs().sum()
        return out, seen


class LoopMaskAsIndex(Loop):
    """A mask that became integers picks the first two tokens, not the expert's."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        repeated = x_TD.repeat_interleave(self.top_k, dim=0)
        y = torch.zeros_like(repeated)
        for e, layer in enumerate(self.layers):
            mine = (ids_TK.view(-1) == e).long()
            y = y.index_put((mine,), layer(repeated[mine]))
        return (y.view(*weights_TK.shape, -1) * weights_TK.unsqueeze(-1)).sum(dim=1)


class LoopBooleanIds(LoopPlusEquals):
    """Compared after a cast that maps all ids but one to the same number."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return super().experts(x_TD, ids_TK.bool().long(), weights_TK)


class LoopCapacity(Loop):
    """An expert takes no more than three tokens."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            taken = (ids_TK == e) & ((ids_TK == e).cumsum(0) <= 3)
            token, slot = torch.where(taken)
            out.index_add_(0, token, layer(x_TD[token]) * weights_TK[token, slot, None])
        return out


class LoopThreshold(Loop):
    """Pairs of little weight are left out."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token, slot = torch.where((ids_TK == e) & (weights_TK > 0.5))
            out.index_add_(0, token, layer(x_TD[token]) * weights_TK[token, slot, None])
        return out


class LoopRowMean(Loop):
    """An expert's rows are centred over the tokens that it got."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            y = layer(x_TD[token])
            out.index_add_(0, token, (y - y.mean(0)) * weights_TK[token, slot, None])
        return out


class LoopOwnNorm(Loop):
    """Each expert has a norm of its own, which no grouped product holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(D) for _ in range(E)])
        for norm in self.norms:
            nn.init.normal_(norm.weight)

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            out.index_add_(0, token, self.norms[e](layer(x_TD[token])) * weights_TK[token, slot, None])
        return out


class LoopRepeatedIds(LoopPlusEquals):
    """`+=` with ids that may name an expert twice for one token: of the two, one survives."""

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, ids_TK = super().route(x_TD)
        return weights_TK, ids_TK // 2


class LoopTransposedMix(Loop):
    """The weight of another token: rows of the two kinds of masks are in different orders."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token, _ = torch.where(ids_TK == e)
            slot, other = torch.where((ids_TK == e).t())
            out.index_add_(0, token, layer(x_TD[token]) * weights_TK[other, slot, None])
        return out


REWRITTEN: dict[str, Callable[[], nn.Module]] = {
    "sorted": Sorted,
    "sorted, top-1": lambda: Sorted(top_k=1),
    "sorted, scatter_add": SortedScatter,
    "sorted, second argsort": SortedIndexAdd,
    "sorted, weight on the input": SortedInputWeight,
    "sorted, norm": SortedNorm,
    "gathered": Gathered,
    "gathered, top-1": lambda: Gathered(top_k=1),
    "gathered, transposed after": GatheredRows,
    "gathered, transposed weights": GatheredTransposed,
    "gathered, rows of their own": GatheredOwnRows,
    "gathered, einsum": GatheredEinsum,
    "gathered, sentinels": GatheredSentinels,
    "loop": Loop,
    "loop, top-1": lambda: Loop(top_k=1),
    "loop, biases": lambda: Loop(bias=True),
    "loop, out of order": LoopOutOfOrder,
    "loop, +=": LoopPlusEquals,
    "loop, assignment": LoopAssign,
    "loop, stacked weights": LoopStacked,
    "loop, added to something": LoopPostAdd,
    "loop, last expert never runs": LoopMissingLast,
    "loop, dropout in eval": lambda: LoopDropout().eval(),
}

# The words are those that the reason must hold.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sorted, wrong divisor": (SortedWrongDivisor, "divides the order by 3"),
    "sorted, flipped": (SortedFlipped, "flip"),
    "sorted, other counts": (SortedOtherCounts, "offsets"),
    "sorted, wide bins": (SortedWideBins, "bins"),
    "sorted, mixing gate": (SortedMixing, "reduces over rows"),
    "sorted, weights in another order": (SortedWeightsInOrder, "another order"),
    "sorted, no inverse": (SortedNoInverse, "mixes rows"),
    "sorted, descending": (SortedDescending, "last expert first"),
    "gathered, unmasked sentinels": (GatheredUnmasked, "nothing zeroes"),
    "gathered, clamped to fewer experts": (GatheredWiderClamp, "experts"),
    "gathered, einsum over mixed slots": (GatheredEinsumOverFeatures, "across rows"),
    "gathered, a factor per expert": (GatheredScale, "differs between experts"),
    "loop, shuffled": (LoopShuffled, "uses the weight of expert 1"),
    "loop, another activation": (LoopOtherActivation, "expert 2 does gelu where expert 0 does silu"),
    "loop, unequal": (LoopUnequal, "expert 1 has a parameter"),
    "loop, missing": (LoopMissing, "expert 2 of 4 never runs"),
    "loop, twice": (LoopTwice, "a second time"),
    "loop, reads the sum": (LoopReadsSum, "earlier experts"),
    "loop, mutates weights": (LoopMutatesWeights, "mul_"),
    "loop, mutates hidden states": (LoopMutatesHidden, "add_"),
    "loop, dropout in training": (LoopDropout, "random"),
    "loop, probed": (LoopProbe, "reads"),
    "loop, mask for indices": (LoopMaskAsIndex, "mask"),
    "loop, boolean ids": (LoopBooleanIds, "may repeat"),
    "loop, capacity": (LoopCapacity, "capacity"),
    "loop, threshold": (LoopThreshold, "mask"),
    "loop, mean over rows": (LoopRowMean, "reduces over rows"),
    "loop, own norms": (LoopOwnNorm, "differs between experts"),
    "loop, repeated ids": (LoopRepeatedIds, "may repeat"),
    "loop, rows in two orders": (LoopTransposedMix, "order"),
}
