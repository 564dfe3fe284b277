"""Experts blocks as public code spells them: one small module each, in our own words.

What is kept of the code that a form is modelled on is the sequence of tensor operations, the layout of the weights and
the routing. A form says what the recognisers must make of it: "rewrite", "refuse" (with words that the reason must
hold), or "optional" (either, as long as the numbers stay).

    form = FORMS["mixtral_where_loop"]
    model, (x,) = form.build(), form.inputs(tokens=7)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Expected = Literal["rewrite", "optional", "refuse"]


@dataclass(frozen=True)
class Form:
    """One spelling.

    Attributes:
        name: the key in `FORMS`.
        make: builds the module, with random weights.
        shape: of the input; the second axis from the end counts tokens.
        modelled_on: whose spelling it is.
        expected: what must become of it.
        training: the module is compared in training mode.
        traces_whole: `fullgraph=True` traces it, so nothing has to be assumed.
        inference_only: its own code runs under `no_grad`.
        blocks: experts blocks in it.
        keep_fp32: submodules that stay in float32 when the rest is cast.
        words: what a reason for refusing it must hold.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    modelled_on: str
    expected: Expected = "rewrite"
    training: bool = False
    traces_whole: bool = True
    inference_only: bool = False
    blocks: int = 1
    keep_fp32: tuple[str, ...] = ()
    words: str = ""

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """The module, always with the same weights."""
        torch.manual_seed(seed)
        model = self.make().to(dtype).train(self.training)
        for name in self.keep_fp32:
            model.get_submodule(name).float()
        return model

    def inputs(self, tokens: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor]:
        """The hidden states, with another number of tokens per sequence if one is given."""
        sizes = list(self.shape)
        if tokens is not None:
            sizes[-2] = tokens
        return (torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype),)


FORMS: dict[str, Form] = {}


def form(
    name: str, shape: tuple[int, ...], modelled_on: str, *sizes: Any, **more: Any
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Registers a module class, built with some sizes."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        FORMS[name] = Form(name, lambda: cls(*sizes), shape, modelled_on, **more)
        return cls

    return register


def matrix(*sizes: int) -> nn.Parameter:
    """A weight that keeps values near one."""
    return nn.Parameter(torch.randn(sizes) / math.sqrt(min(sizes[-2:])))


def vector(*sizes: int) -> nn.Parameter:
    """A bias."""
    return nn.Parameter(torch.randn(sizes) / 10)


def linear(features_in: int, features_out: int) -> nn.Linear:
    """A linear layer without bias."""
    return nn.Linear(features_in, features_out, bias=False)


class Swiglu(nn.Module):
    """One expert: two projections up, one down."""

    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.up, self.side, self.down = linear(d, f), linear(d, f), linear(f, d)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(F.silu(self.up(rows)) * self.side(rows))


def swiglu_experts(d: int, f: int, experts: int) -> nn.ModuleList:
    """A list of gated experts."""
    return nn.ModuleList(Swiglu(d, f) for _ in range(experts))


def renormalised(logits: Tensor, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Softmax in float32, top-k, weights that sum to one."""
    weights, ids = F.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(dtype), ids


# Loops over experts, rows by index -----------------------------------------------------------------------------------


@form("mixtral_where_loop", (2, 9, 32), "Mixtral in transformers 4.36, also OLMoE", 32, 48, 8, 2)
class MixtralWhereLoop(nn.Module):
    """One-hot masks with experts in front, `where`, `index_add_`; the router's logits are returned as well."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate, self.experts, self.top_k = linear(d, experts), swiglu_experts(d, f, experts), top_k

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, d = hidden.shape
        hidden = hidden.view(-1, d)
        logits = self.gate(hidden)
        weights = F.softmax(logits, dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden.dtype)
        total = torch.zeros((batch * length, d), dtype=hidden.dtype, device=hidden.device)
        masks = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for number in range(len(self.experts)):
            slot, token = torch.where(masks[number])
            rows = hidden[None, token].reshape(-1, d)
            rows = self.experts[number](rows) * weights[token, slot, None]
            total.index_add_(0, token, rows.to(hidden.dtype))
        return total.reshape(batch, length, d), logits


@form("qwen2_moe_expert_hit", (2, 8, 32), "Qwen2-MoE in transformers 4.55", 32, 16, 6, 3, traces_whole=False)
class Qwen2ExpertHit(nn.Module):
    """The loop runs over the experts that were hit; a shared expert behind a sigmoid stays outside."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate, self.experts, self.top_k = linear(d, experts), swiglu_experts(d, f, experts), top_k
        self.shared, self.shared_gate = Swiglu(d, 40), linear(d, 1)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, d = hidden.shape
        hidden = hidden.view(-1, d)
        logits = self.gate(hidden)
        weights = F.softmax(logits, dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top_k, dim=-1)
        weights = weights.to(hidden.dtype)
        total = torch.zeros((batch * length, d), dtype=hidden.dtype, device=hidden.device)
        masks = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        hit = torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero()
        for number in hit:
            expert = self.experts[number]
            slot, token = torch.where(masks[number].squeeze(0))
            rows = expert(hidden[None, token].reshape(-1, d)) * weights[token, slot, None]
            total.index_add_(0, token, rows.to(hidden.dtype))
        total = total + torch.sigmoid(self.shared_gate(hidden)) * self.shared(hidden)
        return total.reshape(batch, length, d), logits


class GroupedRouter(nn.Module):
    """Sigmoid scores with a correction for the choice alone, experts chosen within the best groups."""

    def __init__(self, d: int, experts: int, top_k: int, groups: int) -> None:
        super().__init__()
        self.weight = matrix(experts, d)
        self.register_buffer("correction", torch.randn(experts) / 20)
        self.experts, self.top_k, self.groups = experts, top_k, groups

    @torch.no_grad()
    def choose(self, scores: Tensor) -> Tensor:
        corrected = scores.view(-1, self.experts) + self.correction.unsqueeze(0)
        size = self.experts // self.groups
        best_two = corrected.view(-1, self.groups, size).topk(2, dim=-1)[0].sum(dim=-1)
        kept = torch.topk(best_two, k=self.groups // 2, dim=-1, sorted=False)[1]
        open_groups = torch.zeros_like(best_two).scatter_(1, kept, 1)
        is_open = open_groups.unsqueeze(-1).expand(-1, self.groups, size).reshape(-1, self.experts)
        return torch.topk(corrected.masked_fill(~is_open.bool(), 0.0), k=self.top_k, dim=-1, sorted=False)[1]

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(hidden.view(-1, hidden.shape[-1]).float(), self.weight.float()).sigmoid()
        ids = self.choose(scores)
        weights = scores.gather(1, ids)
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
        return ids, weights * 2.5


@form("deepseek_v3_hf", (2, 7, 48), "DeepSeek-V3 in transformers 4.5x", 48, 24, 8, 2, traces_whole=False)
class DeepseekV3(nn.Module):
    """Experts without tokens are skipped; the sum runs in the routing weights' dtype."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate, self.experts = GroupedRouter(d, experts, top_k, 4), swiglu_experts(d, f, experts)
        self.shared = Swiglu(d, f)

    def routed(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden, dtype=weights.dtype)
        masks = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 0, 1)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(masks[number])
            if token.numel() > 0:
                rows = expert(hidden[token])
                rows = rows * weights[token, slot].unsqueeze(-1)
                total.index_add_(0, token, rows)
        return total.type(hidden.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        ids, weights = self.gate(hidden)
        flat = hidden.view(-1, hidden.shape[-1])
        return self.routed(flat, ids, weights).view(hidden.shape) + self.shared(hidden)


@form("mistral_reference_plus_eq", (17, 32), "Mistral's reference", 32, 20, 5, 2)
class MistralPlusEquals(nn.Module):
    """Masks by `==`, rows picked and put back by `+=`; tokens without a batch axis."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate, self.experts, self.top_k = linear(d, experts), swiglu_experts(d, f, experts), top_k

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(hidden), self.top_k)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(hidden.dtype)
        total = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            total[token] += weights[token, slot, None] * expert(hidden[token])
        return total


# Sorted by expert, split by count ------------------------------------------------------------------------------------


@form(
    "deepseek_v2_moe_infer",
    (2, 6, 32),
    "DeepSeek-V2's remote code, also Kimi",
    *(32, 24, 8, 3),
    traces_whole=False,
    inference_only=True,
)
class DeepseekV2Infer(nn.Module):
    """Counts go to numpy, slices of the sorted rows through their experts, an inverse scatter puts them back."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router, self.experts, self.top_k = matrix(experts, d), swiglu_experts(d, f, experts), top_k
        self.shared = Swiglu(d, 2 * f)

    @torch.no_grad()
    def routed(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        marks = ids.new_zeros((ids.shape[0], len(self.experts)))
        marks.scatter_(1, ids, 1)
        counts = marks.sum(dim=0)
        order = ids.view(-1).argsort()
        rows = hidden[order // ids.shape[1]]
        counts = counts.cpu().numpy()
        outputs, start = [], 0
        for number, count in enumerate(counts):
            end = start + count
            if count == 0:
                continue
            outputs.append(self.experts[number](rows[start:end]))
            start = end
        joined = torch.cat(outputs, dim=0) if len(outputs) else rows.new_empty(0)
        back = torch.empty_like(joined)
        back[order] = joined
        weighted = back.view(*ids.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(dim=-1))
        return weighted.sum(dim=1).type(back.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, hidden.shape[-1])
        scores = F.linear(flat.float(), self.router.float(), None).softmax(dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        return self.routed(flat, ids, weights * 1.0).view(*hidden.shape) + self.shared(hidden)


class ParallelLinear(nn.Module):
    """All experts' products with their own rows, which come one expert after the other."""

    def __init__(self, experts: int, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = matrix(experts, features_out, features_in)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        chunks = rows.split(counts, dim=0)
        return torch.cat([F.linear(chunks[e], self.weight[e]) for e in range(self.weight.shape[0])], dim=0)


@form("jetmoe_parallel_linear", (2, 11, 32), "JetMoE and GraniteMoE", 32, 20, 4, 2)
class JetmoeParallel(nn.Module):
    """Two loops over the experts, the gate between them on all rows; one bias behind the sum."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router, self.experts, self.top_k = linear(d, experts), experts, top_k
        self.up, self.down = ParallelLinear(experts, d, 2 * f), ParallelLinear(experts, f, d)
        self.bias = vector(d)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, d = hidden.size()
        flat = hidden.reshape(-1, d)
        logits = self.router(flat).float()
        best, ids = logits.topk(self.top_k, dim=1)
        weights = torch.softmax(best, dim=1).type_as(flat)
        none = torch.zeros([weights.size(0), self.experts], dtype=weights.dtype, device=weights.device)
        counts = none.scatter(1, ids, 1).long().sum(0).tolist()
        _, order = ids.flatten().sort(0)
        token = order.div(self.top_k, rounding_mode="trunc")
        weights = weights.flatten()[order]
        first, second = self.up(flat[token], counts).chunk(2, dim=-1)
        rows = self.down(F.silu(first) * second, counts) * weights[:, None]
        total = torch.zeros((batch * length, d), dtype=rows.dtype, device=rows.device).index_add(0, token, rows)
        return total.view(batch, length, d) + self.bias, logits


@form("torchtitan_for_loop", (2, 10, 32), "torchtitan, loop, weight on the input", 32, 16, 4, 2)
class TitanForLoop(nn.Module):
    """Rows by `gather`, weighted before the experts in float32; the sum starts from the shared expert's output."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate, self.experts, self.top_k = linear(d, experts), experts, top_k
        self.register_buffer("balance", torch.randn(experts) / 50)
        self.w1, self.w2, self.w3 = matrix(experts, f, d), matrix(experts, d, f), matrix(experts, f, d)
        self.shared = Swiglu(d, f)

    def looped(self, rows: Tensor, counts_E: Tensor) -> Tensor:
        counts = counts_E.tolist()
        padding = rows.shape[0] - sum(counts)
        parts = torch.split(rows[: sum(counts)], split_size_or_sections=counts, dim=0)
        outputs = []
        for number, part in enumerate(parts):
            inner = F.silu(torch.matmul(part, self.w1[number].transpose(-2, -1)))
            inner = inner * torch.matmul(part, self.w3[number].transpose(-2, -1))
            outputs.append(torch.matmul(inner, self.w2[number].transpose(-2, -1)))
        joined = torch.cat(outputs, dim=0)
        return torch.vstack((joined, joined.new_zeros((padding, joined.shape[-1]))))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, d = hidden.shape
        flat = hidden.view(batch * length, d)
        scores = torch.sigmoid(self.gate(flat).to(torch.float32))
        _, ids = torch.topk(scores + self.balance, k=self.top_k, dim=-1, sorted=False)
        weights = scores.gather(dim=1, index=ids) * 1.5
        counts = torch.histc(ids.view(-1).float(), bins=self.experts, min=0, max=self.experts).to(torch.int64)
        order = torch.argsort(ids.view(-1), stable=True)
        weights = weights.view(-1)[order]
        index = (order // self.top_k).reshape(-1, 1).expand(-1, d)
        rows = torch.gather(flat, dim=0, index=index)
        rows = (rows.to(torch.float32) * weights.reshape(-1, 1)).to(flat.dtype)
        total = self.shared(flat).scatter_add(dim=0, index=index, src=self.looped(rows, counts))
        return total.reshape(batch, length, d)


# Other layouts -------------------------------------------------------------------------------------------------------


@form("dbrx_flat_chunk", (2, 9, 32), "DBRX", 32, 32, 4, 2, traces_whole=False)
class DbrxFlat(nn.Module):
    """All experts in one matrix (E*F, D) per projection, cut apart; the down projection is not transposed."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router, self.sizes, self.top_k = linear(d, experts), (experts, f, d), top_k
        self.w1, self.v1, self.w2 = (matrix(experts * f, d) for _ in range(3))

    def pieces(self, flat: Tensor) -> list[Tensor]:
        return [piece.squeeze(dim=0) for piece in flat.view(self.sizes).chunk(self.sizes[0], dim=0)]

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        flat = hidden.view(-1, hidden.shape[-1])
        probabilities = self.router(flat).softmax(dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(probabilities, self.top_k, dim=-1)
        weights = (weights / torch.norm(weights, p=1.0, dim=-1, keepdim=True)).to(hidden.dtype)
        total = torch.zeros_like(flat)
        masks = F.one_hot(ids, num_classes=self.sizes[0]).permute(2, 1, 0)
        up, side, down = self.pieces(self.w1), self.pieces(self.v1), self.pieces(self.w2)
        for number in range(0, self.sizes[0]):
            slot, token = torch.where(masks[number])
            if token.shape[0] == 0:
                continue
            rows = flat[None, token].reshape(-1, hidden.shape[-1])
            inner = F.silu(rows.matmul(up[number].t())) * rows.matmul(side[number].t())
            total.index_add_(0, token, inner.matmul(down[number]) * weights[token, slot, None])
        return total.reshape(hidden.shape), probabilities.to(hidden.dtype)


@form("gpt_oss_dense_bmm", (2, 7, 32), "gpt-oss in transformers 4.55, inference", 32, 16, 6, 2)
class GptOssDense(nn.Module):
    """Every expert on every token by `bmm`, weighted by a matrix that is zero off the top-k."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router = nn.Linear(d, experts)
        self.up, self.up_bias = matrix(experts, d, 2 * f), vector(experts, 2 * f)
        self.down, self.down_bias = matrix(experts, f, d), vector(experts, d)
        self.experts, self.d, self.top_k = experts, d, top_k

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch = hidden.shape[0]
        flat = hidden.reshape(-1, self.d)
        logits = self.router(flat)
        best, ids = torch.topk(logits, self.top_k, dim=-1)
        best = F.softmax(best, dim=1, dtype=best.dtype)
        scores = torch.zeros_like(logits).scatter_(1, ids, best)
        repeated = flat.repeat(self.experts, 1).view(self.experts, -1, self.d)
        both = torch.bmm(repeated, self.up) + self.up_bias[..., None, :]
        gate, up = both[..., ::2], both[..., 1::2]
        gate = gate.clamp(min=None, max=7.0)
        up = up.clamp(min=-7.0, max=7.0)
        inner = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        rows = torch.bmm(inner, self.down) + self.down_bias[..., None, :]
        rows = rows.view(self.experts, batch, -1, self.d)
        rows = rows * scores.transpose(0, 1).view(self.experts, batch, -1)[..., None]
        return rows.sum(dim=0), scores


@form("gpt_fast_gather_einsum", (1, 5, 32), "gpt-fast's Mixtral", 32, 48, 8, 2)
class GptFastGather(nn.Module):
    """Each pair with its own copy of its expert's weights, in einsums; tokens lose their batch axis."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate, self.top_k = linear(d, experts), top_k
        self.w1, self.w2, self.w3 = matrix(experts, f, d), matrix(experts, d, f), matrix(experts, f, d)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, hidden.shape[-1])
        weights, ids = torch.topk(F.softmax(self.gate(flat), dim=-1), self.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        left = F.silu(torch.einsum("ti,taoi->tao", flat, self.w1[ids]))
        right = torch.einsum("ti,taoi->tao", flat, self.w3[ids])
        outputs = torch.einsum("tao,taio->tai", left * right, self.w2[ids])
        return torch.einsum("tai,ta->ti", outputs, weights)


@form("torchtitan_grouped_mm", (2, 12, 32), "torchtitan, grouped_mm", 32, 24, 4, 2, expected="optional")
class TitanGrouped(nn.Module):
    """Already grouped, on bfloat16 copies, whose rounding is part of the result."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate, self.top_k = linear(d, experts), top_k
        self.w1, self.w2, self.w3 = matrix(experts, f, d), matrix(experts, d, f), matrix(experts, f, d)

    def grouped(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        left, right = (
            torch._grouped_mm(rows.bfloat16(), w.bfloat16().transpose(-2, -1), offs=ends) for w in (self.w1, self.w3)
        )
        inner = F.silu(left) * right
        return torch._grouped_mm(inner, self.w2.bfloat16().transpose(-2, -1), offs=ends).type_as(rows)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, hidden.shape[-1])
        scores = F.softmax(self.gate(flat).float(), dim=-1)
        _, ids = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        weights = scores.gather(dim=-1, index=ids)
        counts = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids, True).sum(dim=0)
        order = torch.argsort(ids.view(-1), stable=True)
        weights = weights.view(-1)[order]
        token = order // self.top_k
        rows = self.grouped(flat[token], counts)
        rows = (rows.to(torch.float32) * weights.reshape(-1, 1)).to(rows.dtype)
        index = token.reshape(-1, 1).expand(-1, flat.shape[-1])
        return torch.zeros_like(flat).scatter_add(0, index, rows).view(hidden.shape)


@form(
    "gshard_top2_einsum",
    (2, 12, 32),
    "GShard's gating in lucidrains' mixture-of-experts",
    *(32, 32, 4),
    expected="refuse",
    traces_whole=False,
    words="capacity",
)
class GShardTop2(nn.Module):
    """Tokens past an expert's capacity, counted per sequence, are dropped."""

    def __init__(self, d: int, f: int, experts: int) -> None:
        super().__init__()
        self.gating, self.experts = nn.Parameter(torch.randn(d, experts)), experts
        self.w1, self.w2, self.activation = matrix(experts, d, f), matrix(experts, f, d), nn.GELU()

    def hot(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, self.experts).float()

    def place(self, position: Tensor, capacity: int) -> Tensor:
        highest = position.max() + 1
        return F.one_hot(position, max(highest + 1, capacity))[..., :capacity]

    def tables(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = hidden.shape[-2]
        chances = torch.einsum("...bnd,...de->...bne", hidden, self.gating).softmax(dim=-1)
        gate1, id1 = (part.squeeze(dim=-1) for part in chances.topk(k=1, dim=-1))
        mask1 = self.hot(id1)
        gate2, id2 = (part.squeeze(dim=-1) for part in (chances * (1.0 - mask1)).topk(k=1, dim=-1))
        mask2 = self.hot(id2)
        both = gate1 + gate2 + 1e-9
        gate1, gate2 = gate1 / both, gate2 / both
        loss = (chances.mean(dim=-2) * mask1.mean(dim=-2)).mean() * float(self.experts**2)
        capacity = max(min(length, int(length * 1.25 / self.experts)), 4)
        earlier = F.pad(mask1, (0, 0, 1, 0)).cumsum(dim=-2)[..., :-1, :] * mask1
        mask1 = mask1 * (earlier < float(capacity)).float()
        held = mask1.sum(dim=-2, keepdim=True)
        later = (F.pad(mask2, (0, 0, 1, 0)).cumsum(dim=-2)[..., :-1, :] + held) * mask2
        mask2 = mask2 * (later < float(capacity)).float()
        combine = torch.zeros((), device=hidden.device)
        for gate, ids, mask, position in ((gate1, id1, mask1, earlier), (gate2, id2, mask2, later)):
            kept = mask.sum(dim=-1)
            where = self.place(position.sum(dim=-1).long(), capacity)
            expert = F.one_hot(ids, self.experts)[..., None]
            combine = combine + (gate * kept)[..., None, None] * kept[..., None, None] * expert * where[..., None, :]
        return combine.bool().to(combine), combine, loss

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        dispatch, combine, loss = self.tables(hidden)
        packed = torch.einsum("bnd,bnec->ebcd", hidden, dispatch)
        rows = packed.reshape(self.experts, -1, packed.shape[-1])
        inner = self.activation(torch.einsum("...nd,...dh->...nh", rows, self.w1))
        done = torch.einsum("...nh,...hd->...nd", inner, self.w2).reshape(*packed.shape)
        return torch.einsum("ebcd,bnec->bnd", done, combine), loss / 100


# Masks that are not turned into indices -------------------------------------------------------------------------------


@form("makemoe_bool_masks", (3, 6, 32), "makeMoE and its copies", 32, 36, 4, 2, traces_whole=False)
class MakeMoe(nn.Module):
    """A mask per token, whatever the slot; weights from a matrix that is dense but for the top-k."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router, self.noise, self.top_k = nn.Linear(d, experts), nn.Linear(d, experts), top_k
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, f), nn.ReLU(), nn.Linear(f, d), nn.Dropout(0.1)) for _ in range(experts)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        logits, spread = self.router(hidden), F.softplus(self.noise(hidden))
        if self.training:
            logits = logits + torch.randn_like(logits) * spread
        best, ids = logits.topk(self.top_k, dim=-1)
        weights = F.softmax(torch.full_like(logits, float("-inf")).scatter(-1, ids, best), dim=-1)
        total = torch.zeros_like(hidden)
        flat, flat_weights = hidden.view(-1, hidden.size(-1)), weights.view(-1, weights.size(-1))
        for number, expert in enumerate(self.experts):
            mask = (ids == number).any(dim=-1)
            flat_mask = mask.view(-1)
            if flat_mask.any():
                rows = expert(flat[flat_mask]) * flat_weights[flat_mask, number].unsqueeze(1)
                total[mask] += rows.squeeze(1)
        return total


class SwitchExpert(nn.Module):
    """Two layers with a ReLU and dropout."""

    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.wi, self.wo, self.dropout = linear(d, f), linear(f, d), nn.Dropout(0.1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.wo(self.dropout(F.relu(self.wi(rows))))


@form(
    "switch_hf_top1",
    (2, 10, 32),
    "Switch Transformers in transformers 4",
    *(32, 64, 4),
    expected="optional",
    traces_whole=False,
    keep_fp32=("classifier",),
    words="capacity",
)
class SwitchTop1(nn.Module):
    """One expert per token up to its capacity; experts by name; the probability multiplies the whole output."""

    def __init__(self, d: int, f: int, experts: int) -> None:
        super().__init__()
        self.classifier = linear(d, experts)
        self.experts = nn.ModuleDict({f"expert_{number}": SwitchExpert(d, f) for number in range(experts)})

    def forward(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        logits = self.classifier(hidden.to(torch.float32))
        chances = F.softmax(logits, dim=-1, dtype=torch.float32).to(hidden.dtype)
        hot = F.one_hot(torch.argmax(chances, dim=-1), num_classes=len(self.experts))
        hot = hot * (torch.cumsum(hot, dim=-2) <= 64)
        index, mask = torch.argmax(hot, dim=-1), hot.bool()
        output = torch.zeros(hidden.shape, device=hidden.device, dtype=hidden.dtype)
        hit = torch.nonzero(mask.reshape(-1, mask.shape[-1]).sum(dim=0), as_tuple=True)[0].tolist()
        for number in hit:
            expert = getattr(self.experts, f"expert_{number}")
            output[mask[:, :, number]] = expert(hidden[mask[:, :, number]])
        return torch.max(chances, dim=-1).values.unsqueeze(-1) * output, (logits, index)


@form("dense_softmax_stack", (2, 6, 32), "textbooks", 32, 24, 4, expected="optional", words="every expert")
class DenseStack(nn.Module):
    """Every expert on every token, weighted by a softmax over all: nothing may be skipped."""

    def __init__(self, d: int, f: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d)) for _ in range(experts))

    def forward(self, hidden: Tensor) -> Tensor:
        weights = F.softmax(self.gate(hidden), dim=-1)
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=2)
        return torch.sum(weights.unsqueeze(-1) * outputs, dim=2)


class CountedLinear(nn.Module):
    """Weights and biases of all experts, on rows that come one expert after the other."""

    def __init__(self, experts: int, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight, self.bias = matrix(experts, features_out, features_in), vector(experts, features_out)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        start, outputs = 0, []
        for number in range(self.weight.shape[0]):
            count = int(counts[number])
            outputs.append(F.linear(rows[start : start + count], self.weight[number], self.bias[number]))
            start += count
        return torch.cat(outputs, dim=0)


@form("fastmoe_repeat_bmm", (7, 2, 32), "FastMoE, in plain torch", 32, 40, 5, 2)
class FastMoe(nn.Module):
    """Tokens repeated before they are sorted, counts read one by one, a `bmm` with the weights for a sum."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate, self.experts, self.top_k = nn.Linear(d, experts), experts, top_k
        self.up, self.down, self.norm = CountedLinear(experts, d, f), CountedLinear(experts, f, d), nn.LayerNorm(d)

    def forward(self, hidden: Tensor) -> Tensor:
        d = hidden.shape[-1]
        best, ids = torch.topk(self.gate(hidden), k=self.top_k, dim=-1, largest=True, sorted=False)
        weights = F.softmax(best.view(-1, self.top_k), dim=-1).unsqueeze(1)
        ids = ids.view(-1)
        rows = hidden.view(-1, d).repeat_interleave(repeats=self.top_k, dim=0)
        order = torch.argsort(ids)
        counts = torch.bincount(ids, minlength=self.experts)
        rows = self.down(F.gelu(self.up(rows[order], counts)), counts)
        back = torch.empty_like(rows)
        back[order] = rows
        total = torch.bmm(weights, back.view(-1, self.top_k, d)).view(hidden.shape)
        return self.norm(total + hidden)


@form("deepseek_train_mask_assign", (2, 9, 32), "DeepSeek-MoE's training branch", 32, 16, 4, 2, training=True)
class MaskAssign(nn.Module):
    """Boolean masks over pairs, assignment into uninitialised memory, a weighted sum over slots."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.weight, self.experts, self.top_k = matrix(experts, d), swiglu_experts(d, f, experts), top_k
        self.shared = Swiglu(d, f // 2)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, hidden.shape[-1])
        scores = F.linear(flat, self.weight, None).softmax(dim=-1)
        weights, ids = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        ids = ids.view(-1)
        flat = flat.repeat_interleave(self.top_k, dim=0)
        rows = torch.empty_like(flat, dtype=hidden.dtype)
        for number, expert in enumerate(self.experts):
            rows[ids == number] = expert(flat[ids == number]).to(dtype=hidden.dtype)
        total = (rows.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        return total.view(*hidden.shape).to(dtype=hidden.dtype) + self.shared(hidden)


class SoftExpert(nn.Module):
    """Two layers with biases, and a softmax over the features of the result."""

    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.softmax(self.second(F.relu(self.first(rows))), 1)


@form("sparse_dispatcher", (14, 33), "the SparseDispatcher of Shazeer 2017 in torch", 33, 17, 5, 3, traces_whole=False)
class SparseDispatch(nn.Module):
    """Dispatch from the matrix of weights: where it is not zero, sorted by column, split by count, `index_add`."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(SoftExpert(d, f) for _ in range(experts))
        self.gate, self.top_k = nn.Parameter(torch.randn(d, experts) * 0.3), top_k

    def weights(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.gate
        best, ids = logits.topk(min(self.top_k + 1, len(self.experts)), dim=1)
        best, ids = best[:, : self.top_k], ids[:, : self.top_k]
        return torch.zeros_like(logits, requires_grad=True).scatter(1, ids, torch.softmax(best, 1))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights(hidden)
        spread = [t.float().var() / (t.float().mean() ** 2 + 1e-10) for t in (weights.sum(0), (weights > 0).sum(0))]
        places, order = torch.nonzero(weights).sort(0)
        _, expert_of = places.split(1, dim=1)
        token = torch.nonzero(weights)[order[:, 1], 0]
        counts = (weights > 0).sum(0).tolist()
        kept = torch.gather(weights[token.flatten()], 1, expert_of)
        parts = torch.split(hidden[token].squeeze(1), counts, dim=0)
        outputs = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        joined = torch.cat(outputs, 0).mul(kept)
        zeros = torch.zeros(weights.size(0), outputs[-1].size(1), requires_grad=True, device=joined.device)
        return zeros.index_add(0, token, joined.float()), sum(spread) / 100


@form(
    "experts_shared_by_two_layers", (2, 6, 32), "layers that share their experts, as in MoEUT", 32, 24, 4, 2, blocks=2
)
class SharedAcrossLayers(nn.Module):
    """One list of experts in two layers, each with its own router."""

    def __init__(self, d: int, f: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(linear(d, f), nn.ReLU(), linear(f, d)) for _ in range(experts))
        self.routers = nn.ModuleList(linear(d, experts) for _ in range(2))
        self.norms, self.top_k = nn.ModuleList(nn.LayerNorm(d) for _ in range(2)), top_k

    def block(self, hidden: Tensor, router: nn.Module) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        weights, ids = torch.sigmoid(router(flat)).topk(self.top_k, dim=-1)
        total = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            total[token] += weights[token, slot, None] * expert(flat[token])
        return total.view_as(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        for router, norm in zip(self.routers, self.norms, strict=True):
            hidden = hidden + self.block(norm(hidden), router)
        return hidden


# Near misses ----------------------------------------------------------------------------------------------------------


@form(
    "trap_unequal_hidden", (2, 8, 32), "experts of several sizes", expected="refuse", words="expert 1 has a parameter"
)
class TrapUnequal(nn.Module):
    """Weights that cannot be stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Swiglu(32, f) for f in (16, 24, 32, 24))
        self.gate = linear(32, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, hidden.shape[-1])
        weights, ids = renormalised(self.gate(flat), 2, flat.dtype)
        total = torch.zeros_like(flat)
        masks = F.one_hot(ids, num_classes=4).permute(2, 1, 0)
        for number in range(4):
            slot, token = torch.where(masks[number])
            total.index_add_(0, token, self.experts[number](flat[token]) * weights[token, slot, None])
        return total.reshape(hidden.shape)


@form(
    "trap_dropout_training",
    (2, 8, 32),
    "experts with dropout, as in Switch and NLLB-MoE",
    expected="refuse",
    training=True,
    words="random",
)
class TrapDropout(nn.Module):
    """Random numbers are drawn for each expert in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32)) for _ in range(4)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.size(-1))
        weights, ids = self.gate(flat).softmax(-1).topk(2, dim=-1)
        total = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            total.index_add_(0, token, expert(flat[token]) * weights[token, slot].unsqueeze(-1))
        return total.view_as(hidden)
