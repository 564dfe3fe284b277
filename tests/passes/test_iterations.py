"""A long loop over experts is normalised as if every round had run."""

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from recognize_models import D, Expert
from test_recognize import Recorder, assert_equal, run
from torch import Tensor, nn

from moe_compile.passes import iterations

EXPERTS, F_ = 8, 6


class Long(nn.Module):
    """Eight experts; what a round does can be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.layers = nn.ModuleList(Expert(bias=True) for _ in range(EXPERTS))
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *sizes) / 4) for sizes in ((F_, D), (D, F_)))

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x_TD)
        for e in range(EXPERTS):
            token, slot = torch.where(ids_TK == e)
            out = self.add(out, token, self.expert(e, x_TD[token], out) * weights_TK[token, slot, None])
        return x_TD + out

    def expert(self, e: int, rows: Tensor, out: Tensor) -> Tensor:
        return self.layers[e](rows)

    def add(self, out: Tensor, token: Tensor, rows: Tensor) -> Tensor:
        return out.index_add_(0, token, rows)


class Returned(Long):
    def add(self, out: Tensor, token: Tensor, rows: Tensor) -> Tensor:
        return out.index_add(0, token, rows)


class PlusEquals(Long):
    def add(self, out: Tensor, token: Tensor, rows: Tensor) -> Tensor:
        out[token] += rows
        return out


class StackedWeights(Long):
    def expert(self, e: int, rows: Tensor, out: Tensor) -> Tensor:
        return F.gelu(rows @ self.up[e].t()) @ self.down[e].t()


class Shuffled(StackedWeights):
    def expert(self, e: int, rows: Tensor, out: Tensor) -> Tensor:
        return F.gelu(rows @ self.up[e].t()) @ self.down[e if e < 5 else 12 - e].t()


class Backwards(StackedWeights):
    """Numbers that move by the same step in every round, and are another expert's."""

    def expert(self, e: int, rows: Tensor, out: Tensor) -> Tensor:
        return F.gelu(rows @ self.up[e].t()) @ self.down[7 - e].t()


class LateActivation(Long):
    def expert(self, e: int, rows: Tensor, out: Tensor) -> Tensor:
        return super().expert(e, rows, out).tanh() if e == 6 else super().expert(e, rows, out).sigmoid()


class LateFactor(Long):
    def expert(self, e: int, rows: Tensor, out: Tensor) -> Tensor:
        return super().expert(e, rows, out) * (3 if e == 7 else 2)


class GrowingFactor(Long):
    """A number in each round that is no index."""

    def expert(self, e: int, rows: Tensor, out: Tensor) -> Tensor:
        return super().expert(e, rows, out) * e


class ReadsSum(Long):
    def expert(self, e: int, rows: Tensor, out: Tensor) -> Tensor:
        return super().expert(e, rows + out.sum(), out)


COPIED = [Long, Returned, PlusEquals, StackedWeights]
REFUSED = {
    Shuffled: "expert 5 uses the weight of expert 7",
    Backwards: "uses the weight of expert",
    LateActivation: "expert 6 does tanh",
    LateFactor: "expert 7 does mul(..., 3)",
    GrowingFactor: "expert 1 does mul(..., 1)",
    ReadsSum: "",
}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether rounds were copied, each time that some were found."""
    found: list[bool] = []

    def copy_rounds(*given: object) -> bool:
        found.append(iterations.copy_rounds(*given))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(importlib.import_module("moe_compile.passes.normalize"), "copy_rounds", copy_rounds)
    return found


def compiled(make: Callable[[], nn.Module]) -> tuple[nn.Module, Callable[..., object], Recorder]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, recorder = make(), Recorder()
    return model, torch.compile(model, backend=recorder, fullgraph=True), recorder


@pytest.mark.parametrize("make", COPIED)
def test_copied_rounds_are_as_good_as_run_ones(
    make: type[Long], copies: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, function, recorder = compiled(make)
    x_TD = torch.randn(9, D)
    assert_equal(run(function, model, x_TD), run(model, model, x_TD), torch.float32)
    assert copies == [True]
    ((match,), graph) = recorder.matches, recorder.matches[0].replacement.canonical
    monkeypatch.setattr(importlib.import_module("moe_compile.passes.normalize"), "find_rounds", lambda nodes: None)
    model, function, recorder = compiled(make)
    run(function, model, x_TD)
    (full,) = recorder.matches
    assert str(graph) == str(full.replacement.canonical)
    assert match == full
    assert [node.name for node in match.replacement.inputs] == [node.name for node in full.replacement.inputs]
    assert [node.name for node in match.replacement.region] == [node.name for node in full.replacement.region]


@pytest.mark.parametrize("make", REFUSED)
def test_what_one_late_round_does_is_seen(make: type[Long]) -> None:
    model, function, recorder = compiled(make)
    x_TD = torch.randn(9, D)
    assert_equal(run(function, model, x_TD), run(model, model, x_TD), torch.float32)
    assert recorder.matches == []
    (rejection,) = recorder.rejections
    assert REFUSED[make] in rejection.reason
