"""prepare, compile and release: models whose experts loop reads data on the host become one graph."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from forms import FORMS, Form
from test_forms import assert_as_exact, assert_close, run
from torch import nn

import moe_compile
from moe_compile.errors import OptionError, UnknownBackendError

# What Dynamo cannot trace whole; test_forms.py has the others.
SPLIT = [form for form in FORMS.values() if form.expected == "rewrite" and not form.traces_whole]


def graphs_of(model, *args, experts="grouped_mm"):
    """Number of graphs and what runs the blocks, without fullgraph."""
    explanation = moe_compile.explain(model, *args, backend=experts)
    return len(explanation.graphs), [block.chosen for block in explanation.blocks]


BFLOAT16 = [FORMS[name] for name in ("deepseek_v3_hf", "makemoe_bool_masks", "sparse_dispatcher")]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.float32) for form in SPLIT), *((form, torch.bfloat16) for form in BFLOAT16)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_form_is_one_graph_with_right_numbers_and_gradients(form: Form, dtype: torch.dtype) -> None:
    model = form.build(dtype)
    backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
    compiled = moe_compile.compile(model, backend, fullgraph=True, dynamic=True)
    gradients = not form.inference_only
    for experts, tokens in (("grouped_mm", 7), ("batched_mm", 7), ("grouped_mm", 33), ("grouped_mm", 1)):
        backend.set(experts)
        (x,) = form.inputs(tokens, dtype)
        found, own = (run(function, model, x, gradients) for function in (compiled, model))
        if dtype is torch.bfloat16:
            oracle = copy.deepcopy(model).float()
            assert_as_exact(found, own, run(oracle, oracle, x.float(), gradients))
        else:
            assert_close(found, own, dtype)
    assert len(backend.blocks) >= form.blocks
    assert {block.chosen for block in backend.blocks.values()} <= {"grouped_mm", "grouped_mm_fallback", "batched_mm"}


@pytest.mark.parametrize("form", SPLIT, ids=lambda form: form.name)
def test_prepared_models_are_one_graph_even_without_fullgraph(form: Form) -> None:
    model, args = form.build(), form.inputs(7)
    _, before = graphs_of(model, *args)
    report = moe_compile.prepare(model, *args)
    assert len(report.prepared) == 1, str(report)
    after, chosen = graphs_of(model, *args)
    assert before == []  # none of it reaches the compiler
    assert after == 1
    assert len(chosen) == form.blocks
    assert moe_compile.prepare(model, *args).prepared == ()  # idempotent


class Loop(nn.Module):
    """An experts block whose loop the tests bend."""

    def __init__(self, experts: int = 4, width: int = 16) -> None:
        super().__init__()
        self.top_k = 2
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.SiLU(), nn.Linear(24, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out = self.one(out, x, e, expert, token, slot, weights)
        return out

    def one(self, out, x, e, expert, token, slot, weights):
        if token.numel() == 0:
            return out
        rows = expert(x[token]) * weights[token, slot, None]
        return out.index_add(0, token, rows.to(out.dtype))


class Truncates(Loop):
    def one(self, out, x, e, expert, token, slot, weights):
        if token.numel() > 1000:
            token, slot = token[:1000], slot[:1000]
        return super().one(out, x, e, expert, token, slot, weights)


class ActsOnEmpty(Loop):
    def one(self, out, x, e, expert, token, slot, weights):
        if token.numel() > 0:
            return super().one(out, x, e, expert, token, slot, weights)
        return out + 1e-3


class CountsHits(Loop):
    """Later experts see how many were hit before them."""

    def forward(self, x):
        self.hits = 0
        return super().forward(x)

    def one(self, out, x, e, expert, token, slot, weights):
        if token.numel() == 0:
            return out
        self.hits += 1
        return super().one(out, x, e, self.experts[self.hits - 1], token, slot, weights)


class SkipsSmall(Loop):
    def one(self, out, x, e, expert, token, slot, weights):
        if token.numel() < 2:
            return out
        return super().one(out, x, e, expert, token, slot, weights)


class SkipsLight(Loop):
    def one(self, out, x, e, expert, token, slot, weights):
        if not (weights[token, slot] > 0.3).any():
            return out
        return super().one(out, x, e, expert, token, slot, weights)


class HitMoreThanOnce(Loop):
    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for e in (F.one_hot(ids, len(self.experts)).sum((0, 1)) > 1).nonzero().flatten().tolist():
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


TRAPS = [Truncates, ActsOnEmpty, CountsHits, SkipsSmall, SkipsLight, HitMoreThanOnce]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_what_treats_an_expert_apart_is_refused_with_its_line(trap: type[Loop]) -> None:
    torch.manual_seed(0)
    model, x = trap(), torch.randn(9, 16)
    report = moe_compile.prepare(model, x)
    assert report.prepared == ()
    (refused,) = report.not_prepared
    assert refused.module == trap.__name__
    assert "test_prepare.py:" in refused.source
    assert refused.reason in str(report)
    compiled = torch.compile(model, backend=moe_compile.backend("grouped_mm", compiler="aot_eager", on_reject="keep"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = compiled(x)
    torch.testing.assert_close(found, model(x))


def test_only_our_traces_see_the_program() -> None:
    torch.manual_seed(0)
    model, x = Loop(), torch.randn(9, 16)
    expected = model(x)
    moe_compile.prepare(model, x)
    assert torch.equal(model(x), expected)
    counter = torch._dynamo.testing.CompileCounter()
    torch.testing.assert_close(torch.compile(model, backend=counter)(x), expected)
    assert counter.frame_count != 1  # somebody else's compilation splits it as before


def test_release_leaves_nothing_behind() -> None:
    class Own(Loop):
        def forward(self, x):
            return super().forward(x)

    model, x = Own(), torch.randn(9, 16)
    before = dict(vars(Own)), set(model.__dict__)
    moe_compile.prepare(model, x)
    assert Own.forward is not before[0]["forward"]
    moe_compile.release(model)
    assert (dict(vars(Own)), set(model.__dict__)) == before
    assert graphs_of(model, x)[0] != 1
    moe_compile.release(model)  # once more does nothing


def test_an_inherited_forward_is_inherited_again() -> None:
    class Child(Loop):
        pass

    model, x = Child(), torch.randn(9, 16)
    moe_compile.prepare(model, x)
    moe_compile.release(model)
    assert "forward" not in vars(Child)


def test_copies_pickles_and_state_dicts_are_as_before() -> None:
    model, x = Loop(), torch.randn(9, 16)
    keys = list(model.state_dict())
    moe_compile.prepare(model, x)
    assert list(model.state_dict()) == keys
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), model(x))
        assert graphs_of(other, x)[0] == 1
        with torch.no_grad():
            other.experts[0][0].weight.zero_()
        compiled = torch.compile(other, backend=moe_compile.backend("grouped_mm", compiler="aot_eager"))
        torch.testing.assert_close(compiled(x), other(x))


def test_another_dtype_mode_or_autocast_is_proven_again() -> None:
    torch.manual_seed(0)
    model, x = Loop(), torch.randn(9, 16)
    moe_compile.prepare(model, x)
    backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for training, dtype, grad in (
        (True, torch.float32, True),
        (False, torch.float32, False),
        (False, torch.bfloat16, True),
    ):
        model.train(training).to(dtype)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(compiled(x.to(dtype)), model(x.to(dtype)), rtol=2e-2, atol=2e-3)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-3)


def test_two_modules_of_one_class_keep_their_own_settings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Loop(), Loop())
    model[1].top_k = 3
    x = torch.randn(9, 16)
    report = moe_compile.prepare(model, x)
    assert [block.spec.top_k for block in report.prepared] == [2, 3]
    compiled = torch.compile(model, backend=moe_compile.backend("grouped_mm", compiler="aot_eager"), fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


def test_preparing_changes_no_buffer_and_no_random_state() -> None:
    class Counts(Loop):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += len(x)
            return super().forward(x + 0 * torch.rand_like(x))

    model, x = Counts(), torch.randn(9, 16)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    moe_compile.prepare(model, x)
    assert model.seen == 0
    assert torch.equal(torch.random.get_rng_state(), state)


def test_hooks_on_experts_are_refused() -> None:
    model, x = Loop(), torch.randn(9, 16)
    model.experts[1].register_forward_hook(lambda module, args, output: output * 2)
    (refused,) = moe_compile.prepare(model, x).not_prepared
    assert "experts.1 has hooks" in refused.reason


def test_bad_input() -> None:
    with pytest.raises(OptionError, match="no module"):
        moe_compile.prepare(lambda x: x, torch.ones(1))
    with pytest.raises(OptionError, match="no module"):
        moe_compile.release(3)
    with pytest.raises(OptionError, match=r"Pass moe_compile\.backend"):
        moe_compile.compile(Loop(), backend="inductor")
    with pytest.raises(UnknownBackendError):
        moe_compile.compile(Loop(), "groped_mm")


class MasksWithoutGradient(Loop):
    """The masks are made under `no_grad`, with a class for sentinels beyond the experts."""

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(ids, len(self.experts) + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            if e == len(self.experts):
                continue
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


def test_masks_made_without_gradient_do_not_matter() -> None:
    torch.manual_seed(0)
    model, x = MasksWithoutGradient(), torch.randn(9, 16, requires_grad=True)
    (block,) = moe_compile.prepare(model, x).prepared
    assert block.spec.num_experts == 4
    backend = moe_compile.backend("grouped_mm", compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    names = ("router.weight", "experts.2.0.weight")
    found, expected = (
        torch.autograd.grad(run_model(x).square().sum(), [x, *map(model.get_parameter, names)])
        for run_model in (compiled, model)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
