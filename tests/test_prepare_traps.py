"""What looks like an experts block to `prepare` and is none, or is one with a twist: refused, or handled exactly.

Every trap is compared with its own code on routings that leave experts empty and that put all tokens on one.
"""

import copy
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import moe_compile

D, F, E = 8, 12, 4


class Expert(nn.Module):
    def __init__(self, features=F):
        super().__init__()
        self.up, self.down = nn.Linear(D, features), nn.Linear(features, D)
        self.act = nn.functional.silu

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """An honest loop; the traps below replace one step each."""

    top_k = 2

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList([Expert() for _ in range(E)])
        self.scale = 1.0

    def route(self, x):
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        return weights, ids

    def forward(self, x):
        weights, ids = self.route(x)
        out = self.start(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            out = self.step(out, x, number, expert, token, weights[token, slot, None])
        return self.end(out) * self.scale

    def start(self, x):
        return torch.zeros_like(x)

    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weight)
        return out

    def end(self, out):
        return out


class Threshold(Block):
    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 5:
            token, weight = token[:5], weight[:5]
        return super().step(out, x, number, expert, token, weight)


class FarThreshold(Block):
    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 1000:
            token, weight = token[:1000], weight[:1000]
        return super().step(out, x, number, expert, token, weight)


class ActiveElse(Block):
    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weight)
        else:
            out = out + expert.down.bias
        return out


class ElseOfLastExpert(Block):
    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weight)
        elif number == E - 1:
            out = out + 1
        return out


class CountsTheEmpty(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("empty", torch.zeros(E))

    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weight)
        else:
            self.empty[number] += 1
        return out


class CountsTheRows(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(E))

    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            self.rows[number] += token.numel()
        return super().step(out, x, number, expert, token, weight)


class Capacity(Block):
    def step(self, out, x, number, expert, token, weight):
        return super().step(out, x, number, expert, token[:3], weight[:3])


class RankAmongTheHit(Block):
    """The factor of an expert depends on how many experts before it had tokens."""

    def forward(self, x):
        weights, ids = self.route(x)
        out, rank = torch.zeros_like(x), 0
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            if token.numel() > 0:
                rank += 1
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None] * rank)
        return out


class Decays(Block):
    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            out = out * 0.5
            out.index_add_(0, token, expert(x[token]) * weight)
        return out


class StopsAtTheFirstEmpty(Block):
    def forward(self, x):
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            if token.numel() == 0:
                break
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class ValueTest(Block):
    def step(self, out, x, number, expert, token, weight):
        if weight.sum() > 1.0:
            return super().step(out, x, number, expert, token, weight)
        return out


class ReadsWhatAnotherWrote(Block):
    def start(self, x):
        return x.clone()

    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            out[token] = out[token] + expert(out[token]) * weight
        return out


class Shuffled(Block):
    order = (2, 0, 3, 1)

    def step(self, out, x, number, expert, token, weight):
        return super().step(out, x, number, self.experts[self.order[number]], token, weight)


class WeightsChangeInBetween(Block):
    def step(self, out, x, number, expert, token, weight):
        out = super().step(out, x, number, expert, token, weight)
        if number == 1:
            with torch.no_grad():
                self.experts[2].up.weight.mul_(1.5)
        return out


class OnlyTheFirstTwoHit(Block):
    def forward(self, x):
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        hit = torch.nn.functional.one_hot(ids, E).sum((0, 1)).nonzero()
        for number in hit[:2]:
            token, slot = torch.where(ids == number)
            out.index_add_(0, token, self.experts[int(number)](x[token]) * weights[token, slot, None])
        return out


class KeepsAnOutput(Block):
    """What an expert made can be seen from outside the block."""

    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            rows = expert(x[token]) * weight
            out.index_add_(0, token, rows)
            if number == 1:
                self.kept = rows.sum()
        return out


class KeepsTheRouting(Block):
    def route(self, x):
        self.last_weights, ids = super().route(x)
        return self.last_weights, ids


class CollectsOutputs(Block):
    def __init__(self):
        super().__init__()
        self.sums = []

    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            rows = expert(x[token]) * weight
            out.index_add_(0, token, rows)
            self.sums.append(rows.sum())
        return out


class OneOtherExpert(Block):
    class Negative(Expert):
        def forward(self, x):
            return -super().forward(x)

    def __init__(self):
        super().__init__()
        self.experts[2] = self.Negative()


class OtherActivation(Block):
    class Tanh(Expert):
        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    def __init__(self):
        super().__init__()
        self.experts[2] = self.Tanh()


class UnequalSizes(Block):
    def __init__(self):
        super().__init__()
        self.experts[1] = Expert(F + 4)


class TiedExperts(Block):
    def __init__(self):
        super().__init__()
        self.experts[3] = self.experts[0]


class BatchNorm(Block):
    def __init__(self):
        super().__init__()
        for expert in self.experts:
            expert.down = nn.Sequential(nn.Linear(F, D), nn.BatchNorm1d(D))
        self.train()

    def step(self, out, x, number, expert, token, weight):
        return super().step(out, x, number, expert, token, weight) if token.numel() > 1 else out


class Dropout(Block):
    def __init__(self):
        super().__init__()
        for expert in self.experts:
            expert.down = nn.Sequential(nn.Linear(F, D), nn.Dropout(0.3))
        self.train()


class MixesTokens(Block):
    """Not one row at a time: an expert sees how many tokens it got."""

    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            rows = expert(x[token])
            out.index_add_(0, token, (rows - rows.mean(0)) * weight)
        return out


class DividesByTheCount(Block):
    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weight / token.numel())
        return out


class LastOneWins(Block):
    """Assignment instead of a sum over a token's experts."""

    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            out[token] = expert(x[token]) * weight
        return out


class RepeatedIds(Block):
    """A token may choose one expert twice: `+=` on indices then counts it once."""

    def route(self, x):
        weights = self.router(x).softmax(-1)
        ids = torch.stack([weights.argmax(-1), (x[:, 0] > 0).long()], dim=1)
        return weights.gather(1, ids), ids

    def step(self, out, x, number, expert, token, weight):
        if token.numel() > 0:
            out[token] += expert(x[token]) * weight
        return out


class OtherCodeForManyTokens(Block):
    def forward(self, x):
        return super().forward(x) if x.shape[0] < 8 else super().forward(x) * 2


class SilentlySkipsExpertZero(Block):
    def step(self, out, x, number, expert, token, weight):
        return out if number == 0 else super().step(out, x, number, expert, token, weight)


# Refused: the reason holds these words.
REFUSED = {
    Threshold: "> 5",
    FarThreshold: "> 1000",
    ActiveElse: "without tokens",
    ElseOfLastExpert: "without tokens",
    CountsTheEmpty: "",
    RankAmongTheHit: "",
    Decays: "",
    StopsAtTheFirstEmpty: "",
    ValueTest: "",
    ReadsWhatAnotherWrote: "",
    WeightsChangeInBetween: "",
    OnlyTheFirstTwoHit: "",
    UnequalSizes: "",
    BatchNorm: "",
    Dropout: "random",
    MixesTokens: "",
}
# Refused or handled exactly.
EITHER = [
    CountsTheRows,
    Capacity,
    Shuffled,
    KeepsAnOutput,
    KeepsTheRouting,
    CollectsOutputs,
    OneOtherExpert,
    OtherActivation,
    TiedExperts,
    DividesByTheCount,
    LastOneWins,
    RepeatedIds,
    OtherCodeForManyTokens,
    SilentlySkipsExpertZero,
]


def tokens(count, seed=0):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def built(cls):
    torch.manual_seed(1)
    return cls() if cls in (Dropout, BatchNorm) else cls().eval()


def prepared(model, *args, **kwargs):
    return moe_compile.prepare(model, *(args if args or kwargs else (tokens(9),)), **kwargs)


def compiled(model, experts="grouped_mm", **options):
    return torch.compile(model, backend=moe_compile.backend(experts, compiler="eager"), **options)


def route_to(model, favourites):
    """Makes a router send everything to some experts."""
    with torch.no_grad():
        model.router.bias.zero_()
        model.router.bias[list(favourites)] += 50.0


def visible(model):
    """Everything of a module that a user can read after a call, beside its result."""
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    plain = {name: value for name, value in vars(model).items() if not name.startswith("_") and not callable(value)}
    return {**tensors, **torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), plain)}


def assert_like_its_own_code(model, original, function=None):
    """Compares outputs, gradients and what the call leaves behind, for several routings and sizes."""
    if function is None:
        function = compiled(model)
    for favourites, count in (((), 9), ((0, 1), 6), ((2, 3), 9), ((1, 2), 1)):
        for other in (model, original):
            route_to(other, favourites)
            other.zero_grad()
        x = tokens(count, seed=count)
        found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.manual_seed(7)
        expected = original(wanted)
        torch.manual_seed(7)
        actual = function(found)
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
        assert actual.requires_grad == expected.requires_grad
        if not expected.requires_grad:
            continue
        actual.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-4)
        for (name, p), q in zip(model.named_parameters(), original.parameters(), strict=True):
            zero = torch.zeros_like(p)
            actual_grad, expected_grad = (zero if g is None else g for g in (p.grad, q.grad))
            torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-4, atol=1e-4, msg=name)
        left, right = visible(model), visible(original)
        assert left.keys() == right.keys()
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=2e-5, atol=2e-5, msg=lambda m, n=name: n + m)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_the_honest_loop_is_prepared() -> None:
    model = built(Block)
    original = copy.deepcopy(model)
    report = prepared(model)
    assert [block.path for block in report.prepared] == [""]
    assert_like_its_own_code(model, original, compiled(model, fullgraph=True))


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_refused(cls: type[Block]) -> None:
    model = built(cls)
    original = copy.deepcopy(model)
    report = prepared(model)
    assert report.prepared == ()
    (refusal,) = report.not_prepared
    assert REFUSED[cls] in refusal.reason
    assert refusal.source.partition(":")[0].endswith(".py")
    original.load_state_dict(model.state_dict())  # the run before may have changed what prepare cannot know of
    with torch.no_grad():
        for other in (model, original):
            route_to(other, (0, 1))
        torch.manual_seed(7)
        expected = original(tokens(6))
        torch.manual_seed(7)
        torch.testing.assert_close(compiled(model)(tokens(6)), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cls", EITHER, ids=lambda cls: cls.__name__)
def test_refused_or_exact(cls: type[Block]) -> None:
    model = built(cls)
    original = copy.deepcopy(model)
    prepared(model)
    assert_like_its_own_code(model, original)


# What happens to a prepared model afterwards


def twins(cls=Block):
    """A prepared model and one that was not."""
    model = built(cls)
    original = copy.deepcopy(model)
    assert prepared(model).prepared
    return model, original


def test_prepare_leaves_no_trace_of_its_run() -> None:
    class Stateful(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.norm = nn.BatchNorm1d(D)

        def forward(self, x):
            self.calls += 1
            return super().forward(self.norm(x)) + torch.rand(())

    torch.manual_seed(1)
    model = Stateful().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    prepared(model)
    assert torch.equal(torch.rand(3), expected)
    assert all(child.training for child in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_preparing_again_changes_nothing() -> None:
    model, original = twins()
    forward, attributes = type(model).forward, set(vars(model))
    assert prepared(model).not_prepared == ()
    assert (type(model).forward, set(vars(model))) == (forward, attributes)
    assert_like_its_own_code(model, original)


def test_release_leaves_nothing() -> None:
    class Own(Block):
        pass

    model, other = Own().eval(), Own().eval()
    forward, attributes, names = Own.forward, dict(vars(model)), set(vars(Own))
    prepared(model)
    prepared(other)
    moe_compile.release(model)
    assert vars(model).keys() == attributes.keys()
    moe_compile.release(other)
    assert Own.forward is forward
    assert set(vars(Own)) == names
    moe_compile.release(model)  # once more is no error
    backend = moe_compile.backend("grouped_mm", compiler="eager")
    x = tokens(9)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert backend.blocks == {}
    assert prepared(model).prepared


def test_release_is_seen_by_code_that_was_compiled_before() -> None:
    model, _ = twins()
    backend = moe_compile.backend("grouped_mm", compiler="eager")
    function = torch.compile(model, backend=backend)
    x = tokens(9)
    torch.testing.assert_close(function(x), model(x))
    graphs = len(backend.graphs)
    moe_compile.release(model)
    torch.testing.assert_close(function(x), model(x))
    assert len(backend.graphs) > graphs or len(backend.blocks) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_another_dtype_afterwards(dtype: torch.dtype) -> None:
    model, _ = twins()
    model.to(dtype)
    backend = moe_compile.backend("grouped_mm", compiler="eager")
    function = torch.compile(model, backend=backend, fullgraph=True)
    x = tokens(9).to(dtype)
    actual, expected = function(x), model(x)
    assert actual.dtype == dtype
    tolerance = {torch.float64: 1e-10, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert [block.found for block in backend.blocks.values()] == ["prepared"]


def test_training_with_dropout_after_evaluation_without() -> None:
    model = built(Dropout).eval()
    original = copy.deepcopy(model)
    assert prepared(model).prepared
    function = compiled(model)
    for training in (False, True, False):
        model.train(training)
        original.train(training)
        assert_like_its_own_code(model, original, function)


def test_only_one_expert_trains() -> None:
    model = built(Dropout).eval()
    assert prepared(model).prepared
    model.experts[1].train()
    original = copy.deepcopy(model)
    moe_compile.release(original)
    assert_like_its_own_code(model, original)


def test_two_modules_of_one_class_with_different_settings() -> None:
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()
            self.second.top_k, self.second.scale = 1, 3.0

        def forward(self, x):
            return self.first(x) + self.second(x)

    torch.manual_seed(1)
    model = Both().eval()
    expected = model(tokens(9))
    assert {block.path for block in prepared(model).prepared} == {"first", "second"}
    torch.testing.assert_close(compiled(model, fullgraph=True)(tokens(9)), expected)


@pytest.mark.parametrize(("name", "value"), [("scale", 3.0), ("top_k", 1), ("top_k", 3)])
def test_an_attribute_that_is_set_afterwards_counts(name: str, value: float) -> None:
    model, original = twins()
    function = compiled(model)
    function(tokens(9))
    for one in (model, original):
        setattr(one, name, value)
    assert_like_its_own_code(model, original, function)


def test_an_attribute_that_is_set_before_the_first_trace_counts() -> None:
    model, original = twins()
    for one in (model, original):
        one.scale = 3.0
    assert_like_its_own_code(model, original)


def test_a_setting_of_a_submodule_counts() -> None:
    class Sloped(Block):
        def __init__(self):
            super().__init__()
            for expert in self.experts:
                expert.down = nn.Sequential(nn.LeakyReLU(0.1), nn.Linear(F, D))

    model, original = twins(Sloped)
    function = compiled(model)
    function(tokens(9))
    for one in (model, original):
        for expert in one.experts:
            expert.down[0].negative_slope = 0.7
    assert_like_its_own_code(model, original, function)


@pytest.mark.parametrize("name", ["act", "after"])
def test_a_function_that_is_replaced_counts(name: str) -> None:
    class WithFunctions(Block):
        def __init__(self):
            super().__init__()
            self.after = torch.tanh
            for expert in self.experts:
                expert.act = nn.functional.relu

        def end(self, out):
            return self.after(out)

    model, original = twins(WithFunctions)
    function = compiled(model, fullgraph=True)
    function(tokens(9))
    for one in (model, original):
        for part in (one, *one.experts):
            if hasattr(part, name):
                setattr(part, name, torch.sin)
    assert_like_its_own_code(model, original, function)


def test_an_expert_that_is_replaced_counts() -> None:
    model, original = twins()
    function = compiled(model)
    function(tokens(9))
    torch.manual_seed(3)
    other = OtherActivation.Tanh()
    model.experts[1], original.experts[1] = other, copy.deepcopy(other)
    assert_like_its_own_code(model, original, function)


def test_a_parameter_that_is_replaced_counts() -> None:
    model, original = twins()
    function = compiled(model)
    function(tokens(9))
    for one in (model, original):
        one.experts[1].up.weight = nn.Parameter(torch.full((F, D), 0.1))
    assert_like_its_own_code(model, original, function)


def test_experts_that_become_tied_count() -> None:
    model, original = twins()
    for one in (model, original):
        one.experts[1].up.weight = one.experts[0].up.weight
    assert_like_its_own_code(model, original)


@pytest.mark.parametrize("when", ["before", "after", "after compiling"])
def test_a_hook_on_an_expert_runs(when: str) -> None:
    model = built(Block)
    original = copy.deepcopy(model)
    hook = lambda module, args, output: output * 2  # noqa: E731
    original.experts[1].register_forward_hook(hook)
    if when == "before":
        model.experts[1].register_forward_hook(hook)
    prepared(model)
    function = compiled(model)
    if when == "after compiling":
        function(tokens(9))
    if when != "before":
        model.experts[1].register_forward_hook(hook)
    assert_like_its_own_code(model, original, function)


def test_a_hook_on_the_block_itself_runs() -> None:
    model, original = twins()
    for one in (model, original):
        one.register_forward_hook(lambda module, args, output: output + 1)
        one.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert_like_its_own_code(model, original)


def test_a_forward_that_is_replaced_on_an_expert_runs() -> None:
    model, original = twins()
    for one in (model, original):
        expert = one.experts[2]
        expert.forward = lambda x, expert=expert: expert.down(torch.tanh(expert.up(x)))
    assert_like_its_own_code(model, original)


def test_copies_and_pickles_are_prepared_and_apart() -> None:
    model, original = twins()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.state_dict().keys() == original.state_dict().keys()
        with torch.no_grad():
            twin.experts[0].up.weight.mul_(2)
        expected = copy.deepcopy(original)
        expected.load_state_dict(twin.state_dict())
        assert_like_its_own_code(twin, expected)
    assert_like_its_own_code(model, original)


def test_other_backends_and_uncompiled_calls_see_the_module_as_it_was() -> None:
    model, original = twins()
    graphs = []
    torch.compile(model, backend=lambda gm, inputs: graphs.append(gm.code) or gm.forward)(tokens(9))
    assert not any("moe" in code for code in graphs)
    assert torch.equal(model(tokens(9)), original(tokens(9)))


def test_no_grad_frozen_experts_and_autocast() -> None:
    class Casts(Block):
        def step(self, out, x, number, expert, token, weight):
            if token.numel() > 0:
                out.index_add_(0, token, (expert(x[token]) * weight).to(out.dtype))
            return out

    model, original = twins(Casts)
    function = compiled(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(function(tokens(9)), original(tokens(9)))
    for one in (model, original):
        one.experts[1].requires_grad_(False)
    assert_like_its_own_code(model, original, function)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = function(tokens(9)), original(tokens(9))
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)


def test_keyword_arguments_and_flags() -> None:
    class Flagged(Block):
        def forward(self, x, *, double=False):
            out = super().forward(x)
            return {"out": out * 2 if double else out, "double": double}

    torch.manual_seed(1)
    model = Flagged().eval()
    original = copy.deepcopy(model)
    assert prepared(model, x=tokens(9)).prepared
    function = compiled(model, fullgraph=True)
    for flag in (False, True):
        expected = original(x=tokens(6), double=flag)
        found = function(x=tokens(6), double=flag)
        assert found["double"] is flag
        torch.testing.assert_close(found["out"], expected["out"])


def test_compile_prepares_at_the_first_call() -> None:
    model = built(Block)
    original = copy.deepcopy(model)
    function = moe_compile.compile(model, moe_compile.backend("batched_mm", compiler="eager"), fullgraph=True)
    assert_like_its_own_code(model, original, function)


def test_dynamic_shapes_make_one_graph_for_all_sizes() -> None:
    model, original = twins()
    backend = moe_compile.backend("grouped_mm", compiler="eager")
    function = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for count in (9, 33, 6, 128):
        torch.testing.assert_close(function(tokens(count)), original(tokens(count)), rtol=2e-5, atol=2e-5)
    assert len(backend.graphs) == 1
