"""More spellings of experts blocks: dense ones, sorted and split ones, masks; and near misses of each.

As in `recognize_models`: hidden states (T, D) in and out, a linear router, `topk`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from recognize_models import F_, D, E, K, Loop, Routed, parameter
from torch import Tensor, nn


class Dense(Routed):
    """Stacked weights (E, in, out), and a matrix of weights that is zero off the top-k."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = parameter(E, D, F_), parameter(E, F_, D)
        self.up_bias, self.down_bias = parameter(E, F_), parameter(E, D)

    def scores(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        zeros = torch.zeros(ids_TK.shape[0], E, dtype=weights_TK.dtype, device=ids_TK.device)
        return zeros.scatter(1, ids_TK, weights_TK)


class DenseEinsum(Dense):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        h = F.gelu(torch.einsum("td,edf->tef", x_TD, self.up) + self.up_bias)
        y = torch.einsum("tef,efd->ted", h, self.down) + self.down_bias
        return torch.einsum("ted,te->td", y, self.scores(ids_TK, weights_TK))


class DenseEinsumExpertsFirst(Dense):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        h = F.relu(torch.einsum("td,edf->etf", x_TD, self.up))
        y = torch.einsum("etf,efd->etd", h, self.down)
        return torch.einsum("te,etd->td", self.scores(ids_TK, weights_TK), y)


class DenseMatmul(Dense):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        h = F.silu(x_TD.unsqueeze(0) @ self.up + self.up_bias.unsqueeze(1))
        y = h @ self.down + self.down_bias[:, None]
        return (y * self.scores(ids_TK, weights_TK).t().unsqueeze(-1)).sum(0)


class DenseOneHot(Dense):
    def scores(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return (F.one_hot(ids_TK, E).to(weights_TK.dtype) * weights_TK.unsqueeze(-1)).sum(1)

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        h = F.gelu(torch.einsum("td,edf->tef", x_TD, self.up))
        y = torch.einsum("tef,efd->ted", h, self.down)
        return (self.scores(ids_TK, weights_TK).unsqueeze(-1) * y).sum(1)


class DenseInputWeight(Dense):
    """Llama 4's: minus infinity off the top-k, a sigmoid, and the weight on the input."""

    def weighted(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        empty = torch.full((x_TD.shape[0], E), float("-inf"), dtype=weights_TK.dtype, device=x_TD.device)
        scores = torch.sigmoid(empty.scatter_(1, ids_TK, weights_TK).t().float()).to(x_TD.dtype)
        return (x_TD.repeat(E, 1) * scores.reshape(-1, 1)).view(E, -1, D)

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        h = F.silu(torch.bmm(self.weighted(x_TD, ids_TK, weights_TK), self.up))
        return torch.bmm(h, self.down).view(E, -1, D).sum(0)


class DenseLoop(Loop):
    """Every expert on every token, and a sum of weighted outputs."""

    def scores(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        zeros = torch.zeros(ids_TK.shape[0], E, dtype=weights_TK.dtype, device=ids_TK.device)
        return zeros.scatter_(1, ids_TK, weights_TK)

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        scores = self.scores(ids_TK, weights_TK)
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            out = out + scores[:, e, None] * layer(x_TD)
        return out


class DenseLoopInPlace(DenseLoop):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        scores = self.scores(ids_TK, weights_TK)
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            out += scores[:, e : e + 1] * layer(x_TD)
        return out


class DenseLoopMasked(Loop):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            out = out + layer(x_TD) * (weights_TK * (ids_TK == e)).sum(-1, keepdim=True)
        return out


class DenseLoopWhere(Loop):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return sum(
            layer(x_TD) * torch.where(ids_TK == e, weights_TK, 0.0).sum(-1)[:, None]
            for e, layer in enumerate(self.layers)
        )


class DenseAnyMask(DenseLoop):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        scores = self.scores(ids_TK, weights_TK)
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            mine = (ids_TK == e).any(-1)
            out = out + torch.where(mine[:, None], layer(x_TD) * scores[:, e : e + 1], torch.zeros_like(x_TD))
        return out


class DenseStack(DenseLoop):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y = torch.stack([layer(x_TD) for layer in self.layers], dim=1)
        return (y * self.scores(ids_TK, weights_TK).unsqueeze(-1)).sum(1)


class DenseStackEinsum(DenseLoop):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y = torch.stack([layer(x_TD) for layer in self.layers])
        return torch.einsum("etd,te->td", y, self.scores(ids_TK, weights_TK))


class DenseMaskedLogits(Loop):
    def forward(self, x_TD: Tensor) -> Tensor:
        logits = self.router(x_TD)
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(K, -1).indices, True)
        weights = logits.masked_fill(~kept, float("-inf")).softmax(-1)
        y = torch.stack([layer(x_TD) for layer in self.layers], dim=-2)
        return x_TD + (y * weights[..., None]).sum(-2)


class DenseMaskedProbabilities(Loop):
    def forward(self, x_TD: Tensor) -> Tensor:
        weights = self.router(x_TD).softmax(-1)
        weights = weights * F.one_hot(weights.topk(K, -1).indices, E).sum(1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.stack([layer(x_TD) for layer in self.layers], dim=-2)
        return x_TD + (y * weights[..., None]).sum(-2)


class DenseBatchFirst(Loop):
    def forward(self, x_TD: Tensor) -> Tensor:
        hidden = x_TD.view(1, -1, D)
        logits = self.router(hidden)
        values, ids = logits.softmax(-1).topk(K, -1)
        weights = torch.zeros_like(logits).scatter(-1, ids, values)
        y = torch.stack([layer(hidden) for layer in self.layers], dim=2)
        return (hidden + (y * weights[..., None]).sum(2)).view(-1, D)


class DenseGathered(Loop):
    """Every expert runs; of their outputs, a token takes those of its own."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y = torch.stack([layer(x_TD) for layer in self.layers], dim=1)
        return (self.taken(y, ids_TK) * weights_TK.unsqueeze(-1)).sum(1)

    def taken(self, y: Tensor, ids_TK: Tensor) -> Tensor:
        return y.gather(1, ids_TK.unsqueeze(-1).expand(-1, -1, D))


class DenseIndexed(DenseGathered):
    def taken(self, y: Tensor, ids_TK: Tensor) -> Tensor:
        return y[torch.arange(y.shape[0])[:, None], ids_TK]


class Split(Loop):
    """Rows in expert order, cut at the ends of the experts."""

    def counts(self, ids_TK: Tensor) -> Tensor:
        return F.one_hot(ids_TK.flatten(), E).sum(0)

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        order = torch.argsort(ids_TK.flatten())
        ends = self.counts(ids_TK).cumsum(0).tolist()
        rows = x_TD[order // K]
        y = self.joined(rows, [0, *ends])
        back = torch.empty_like(y)
        back[order] = y
        return (back.view(-1, K, D) * weights_TK[..., None]).sum(1)

    def joined(self, rows: Tensor, ends: list[int]) -> Tensor:
        return torch.cat([layer(rows[ends[e] : ends[e + 1]]) for e, layer in enumerate(self.layers)])


class SplitSizes(Split):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        order = ids_TK.flatten().argsort(stable=True)
        sizes = F.one_hot(ids_TK, E).sum((0, 1)).tolist()
        pieces = x_TD[order // K].split(sizes)
        y = torch.cat([layer(piece) for layer, piece in zip(self.layers, pieces, strict=True)])
        y = y * weights_TK.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add_(0, order // K, y)


class SplitAddedPiecewise(Split):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        order = torch.argsort(ids_TK.flatten(), stable=True)
        counts = self.counts(ids_TK).tolist()
        token, weights = order // K, weights_TK.flatten()[order]
        out, start = torch.zeros_like(x_TD), 0
        for count, layer in zip(counts, self.layers, strict=False):
            mine = token[start : start + count]
            out.index_add_(0, mine, layer(x_TD[mine]) * weights[start : start + count, None])
            start += count
        return out


class JoinedMasks(Loop):
    """The rows of all masks, joined and added at once."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        tokens, outputs = [], []
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            tokens.append(token)
            outputs.append(layer(x_TD[token]) * weights_TK[token, slot, None])
        return torch.zeros_like(x_TD).index_add(0, torch.cat(tokens), torch.cat(outputs))


class JoinedPairs(Loop):
    """The rows of all masks over pairs, scattered back to them."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        pairs = [torch.where(ids_TK.flatten() == e)[0] for e in range(E)]
        joined = torch.cat([layer(x_TD[pair // K]) for layer, pair in zip(self.layers, pairs, strict=True)])
        rows = torch.zeros(ids_TK.numel(), D, dtype=x_TD.dtype)
        rows[torch.cat(pairs)] = joined
        return (rows.view(-1, K, D) * weights_TK[..., None]).sum(1)


class ScatterReduced(Loop):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            y = layer(x_TD[token]) * weights_TK[token, slot, None]
            out = out.scatter_reduce(0, token[:, None].expand(-1, D), y, reduce="sum")
        return out


class TokenIndices(DenseLoop):
    """An index of tokens per expert, and its column of the weights."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        scores = self.scores(ids_TK, weights_TK)
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token = (ids_TK == e).any(-1).nonzero().squeeze(-1)
            out[token] += layer(x_TD[token]) * scores[token, e, None]
        return out


class Thresholded(DenseLoop):
    """Pairs of little weight are left out, by a mask that the block reads from the weights."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        scores = self.scores(ids_TK, weights_TK)
        kept = scores > 0.5
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token = kept[:, e].nonzero().squeeze(-1)
            out.index_add_(0, token, layer(x_TD[token]) * scores[token, e, None])
        return out


class ThresholdLookedAt(DenseLoop):
    """Another mask is looked at, and changes nothing."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        weights_TK, ids_TK = self.route(x_TD)
        scores = self.scores(ids_TK, weights_TK)
        kept = scores > 0.5
        out, seen = torch.zeros_like(x_TD), []
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            seen.append(x_TD[kept[:, e].nonzero().squeeze(-1)].sum())
            out.index_add_(0, token, layer(x_TD[token]) * weights_TK[token, slot, None])
        return x_TD + out, torch.stack(seen)


# Near misses ----------------------------------------------------------------------------------------------------------


class DenseInputBias(DenseInputWeight):
    """An expert with a bias makes something of nothing."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        h = torch.bmm(self.weighted(x_TD, ids_TK, weights_TK), self.up) + self.up_bias[:, None]
        return torch.bmm(F.silu(h), self.down).view(E, -1, D).sum(0)


class DenseMixedScores(DenseEinsumExpertsFirst):
    """Scores that are read in another order than they were written."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y = torch.einsum("etf,efd->etd", torch.einsum("td,edf->etf", x_TD, self.up), self.down)
        return (y * self.scores(ids_TK, weights_TK).reshape(E, -1, 1)).sum(0)


class DenseOntoOnes(DenseStack):
    def scores(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return torch.ones(ids_TK.shape[0], E, dtype=weights_TK.dtype).scatter(1, ids_TK, weights_TK)


class DenseRepeatedIds(DenseStack):
    """One of two equal ids is overwritten."""

    def scores(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return super().scores(ids_TK // 2, weights_TK)


class DenseWrongColumn(DenseLoop):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        scores = self.scores(ids_TK, weights_TK)
        mixed = torch.stack([layer(x_TD) for layer in self.layers], dim=1)
        return sum(scores[:, (e + 1) % E, None] * mixed[:, e] for e in range(E))


class DenseShiftedScores(DenseStack):
    """Added to everywhere after it was scattered."""

    def scores(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return super().scores(ids_TK, weights_TK) + 0.01


class SplitShifted(Split):
    """The first expert takes the second one's rows as well."""

    def joined(self, rows: Tensor, ends: list[int]) -> Tensor:
        return super().joined(rows, [0, ends[2], *ends[2:]])


class SplitReversed(Split):
    def joined(self, rows: Tensor, ends: list[int]) -> Tensor:
        pieces = [layer(rows[ends[e] : ends[e + 1]]) for e, layer in enumerate(self.layers)]
        return torch.cat(pieces[::-1])


class SplitOtherCounts(Split):
    def counts(self, ids_TK: Tensor) -> Tensor:
        return F.one_hot((ids_TK.flatten() + 1) % E, E).sum(0)


class SplitOtherActivation(Split):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].activation = F.gelu


class ScatterReducedMax(Loop):
    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token, slot = torch.where(ids_TK == e)
            y = layer(x_TD[token]) * weights_TK[token, slot, None]
            out = out.scatter_reduce(0, token[:, None].expand(-1, D), y, reduce="amax")
        return out


class TokensOfAnother(DenseLoop):
    """The next expert's weights at this expert's tokens."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        scores = self.scores(ids_TK, weights_TK)
        out = torch.zeros_like(x_TD)
        for e, layer in enumerate(self.layers):
            token = (ids_TK == e).any(-1).nonzero().squeeze(-1)
            out[token] += layer(x_TD[token]) * scores[token, (e + 1) % E, None]
        return out


class CapacityEinsum(Dense):
    """Switch's: tokens past an expert's capacity are dropped."""

    def experts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        hot = F.one_hot(ids_TK[:, 0], E)
        place = hot.cumsum(0) * hot - 1
        slots = F.one_hot(place.clamp(0, 2), 3).to(x_TD.dtype) * ((place >= 0) & (place < 3)).unsqueeze(-1)
        packed = torch.einsum("td,tec->ecd", x_TD, slots)
        y = torch.bmm(F.relu(torch.bmm(packed, self.up)), self.down)
        return torch.einsum("ecd,tec->td", y, slots * weights_TK[:, :1, None])


REWRITTEN: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (
        *(DenseEinsum, DenseEinsumExpertsFirst, DenseMatmul, DenseOneHot, DenseInputWeight, DenseLoop),
        *(DenseLoopInPlace, DenseLoopMasked, DenseLoopWhere, DenseAnyMask, DenseStack, DenseStackEinsum),
        *(DenseMaskedLogits, DenseMaskedProbabilities, DenseBatchFirst, DenseGathered, DenseIndexed),
        *(Split, SplitSizes, SplitAddedPiecewise, JoinedMasks, JoinedPairs, ScatterReduced),
        *(TokenIndices, Thresholded, ThresholdLookedAt),
    )
}
# The words are those that the reason must hold.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    cls.__name__: (cls, words)
    for cls, words in (
        (DenseInputBias, "not zero off the top-k"),
        (DenseMixedScores, "mixes rows"),
        (DenseOntoOnes, ""),
        (DenseRepeatedIds, "however often a token names it"),
        (DenseWrongColumn, ""),
        (DenseShiftedScores, "not zero off the top-k"),
        (SplitShifted, "no end of an expert's"),
        (SplitReversed, "at place 0"),
        (SplitOtherCounts, ""),
        (SplitOtherActivation, "expert 2 does gelu"),
        (ScatterReducedMax, "something else than a sum"),
        (TokensOfAnother, "the rows of another"),
        (CapacityEinsum, "capacity"),
    )
}
