"""Experts that never reach the compiler: one warning with class, line and remedy, and a line in `explain()`."""

import inspect
import warnings

import pytest
import torch
from forms import FORMS, Form
from torch import nn
from zoo import build

import moe_compile
from moe_compile.capture.structure import holds_experts
from moe_compile.errors import UnseenExpertsWarning

# What Dynamo leaves to Python, or splits, unless it is told otherwise.
UNSEEN = [
    FORMS[name]
    for name in (
        "mixtral_where_loop",
        "qwen2_moe_expert_hit",
        "deepseek_v3_hf",
        "deepseek_v2_moe_infer",
        "jetmoe_parallel_linear",
        "torchtitan_for_loop",
        "dbrx_flat_chunk",
        "makemoe_bool_masks",
        "fastmoe_repeat_bmm",
        "sparse_dispatcher",
        "experts_shared_by_two_layers",
    )
]
SEEN = [FORMS["gpt_fast_gather_einsum"], FORMS["gpt_oss_dense_bmm"], FORMS["torchtitan_grouped_mm"]]


def compiled(model, experts="grouped_mm", **options):
    return torch.compile(model, backend=moe_compile.backend(experts, compiler="eager"), **options)


def run(function, *args, **kwargs):
    """The result, and the warnings about unseen experts."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        result = function(*args, **kwargs)
    return result, [str(w.message) for w in caught if issubclass(w.category, UnseenExpertsWarning)]


def first(result):
    return torch.utils._pytree.tree_leaves(result)[0]


class Tokens(nn.Module):
    """A router and three experts in a loop; what else happens to the tokens is up to the class below."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)])

    def loop(self, x):
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(ids == number)
            if token.numel() > 0:
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out

    def forward(self, x):
        return self.loop(x)


class Layers(nn.Module):
    def __init__(self, count=2):
        super().__init__()
        self.layers = nn.ModuleList([Tokens() for _ in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("form", UNSEEN, ids=lambda form: form.name)
def test_one_warning_names_class_line_and_remedy(form: Form) -> None:
    model, inputs = form.build(), form.inputs(7)
    result, told = run(compiled(model), *inputs)
    (text,) = told
    assert f"experts of {type(model).__name__} never reach the compiler" in text
    assert "moe_compile.compile(" in text
    assert "moe_compile.prepare(" in text
    lines, start = inspect.getsourcelines(type(model))
    line = int(text.partition("forms.py:")[2].partition(" ")[0])
    assert line in range(start, start + len(lines)) or line == 720  # the dispatcher's weights are made in a helper
    torch.testing.assert_close(first(result), first(model(*inputs)))


@pytest.mark.parametrize("form", UNSEEN[:6], ids=lambda form: form.name)
def test_explain_lists_it(form: Form) -> None:
    model = nn.ModuleDict({"block": form.build()})
    with torch.no_grad():
        found, told = run(moe_compile.explain, lambda x: model["block"](x), *form.inputs(7), backend="grouped_mm")
    assert told == []
    assert [(item.path, item.class_name) for item in found.unseen] == [("block", type(model["block"]).__name__)]
    assert "forms.py:" in found.unseen[0].source
    assert "never seen by the compiler" in str(found)
    assert found.to_dict()["unseen"][0]["reason"] == found.unseen[0].reason


def test_fullgraph_is_told_before_dynamo_refuses() -> None:
    form = FORMS["makemoe_bool_masks"]
    with pytest.warns(UnseenExpertsWarning, match="MakeMoe"), pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(form.build(), fullgraph=True)(*form.inputs(7))


@pytest.mark.parametrize("form", SEEN, ids=lambda form: form.name)
def test_what_is_traced_whole_is_not_called_unseen(form: Form) -> None:
    model = form.build()
    assert run(compiled(model), *form.inputs(7))[1] == []
    assert run(moe_compile.explain, model, *form.inputs(7))[0].unseen == ()


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_captured_classes_are_not_called_unseen_even_when_they_keep_their_loop(experts: str) -> None:
    model, arguments = build("qwen3_moe", torch.float32, "eager")
    found, told = run(moe_compile.explain, model, backend=experts, **arguments)
    assert told == []
    assert found.unseen == ()
    assert run(compiled(model, experts), **arguments)[1] == []


def test_a_class_of_transformers_that_is_not_captured_is_named() -> None:
    model, arguments = build("dbrx", torch.float32, "eager")
    (text,) = run(compiled(model), **arguments)[1]
    assert "DbrxExperts never reach the compiler" in text
    assert "modeling_dbrx.py:" in text


def test_layers_of_one_class_are_told_of_once_and_listed_each() -> None:
    model, x = Layers(), torch.randn(5, 8)
    (text,) = run(compiled(model), x)[1]
    assert "experts of Tokens" in text
    found, _ = run(moe_compile.explain, model, x)
    assert [item.path for item in found.unseen] == ["layers.0", "layers.1"]


def test_a_split_beside_a_block_that_was_found_is_no_matter() -> None:
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = FORMS["gpt_fast_gather_einsum"].make()
            self.experts, self.seen = self.block.w1, []

        def forward(self, x):
            out = self.block(x)
            self.seen.append(out.sum().item())
            return out * 2

    model, (x,) = Counting(), FORMS["gpt_fast_gather_einsum"].inputs(7)
    assert holds_experts(model)
    assert run(compiled(model), x)[1] == []
    assert run(moe_compile.explain, model, x)[0].unseen == ()


def test_layers_are_no_experts_although_dynamo_stops_at_them() -> None:
    class Early(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                if x.sum() > 1e9:
                    return x
            return x

    assert run(compiled(Early()), torch.randn(5, 8))[1] == []


def test_other_backends_hear_nothing_and_ours_does_afterwards() -> None:
    model, x = Tokens(), torch.randn(5, 8)
    assert run(torch.compile(model, backend="eager"), x)[1] == []
    assert len(run(compiled(model), x)[1]) == 1
    options = {"experts": "grouped_mm", "compiler": "eager"}
    torch._dynamo.reset()
    assert len(run(torch.compile(model, backend="moe_compile", options=options), x)[1]) == 1


def test_warnings_as_errors_leave_dynamo_intact() -> None:
    model, x = Tokens(), torch.randn(5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnseenExpertsWarning)
        torch.testing.assert_close(compiled(model)(x), model(x))
    torch._dynamo.reset()  # asserts that no compilation is thought to be running
    assert len(run(compiled(model), x)[1]) == 1


def test_no_flag_of_dynamo_is_left_changed() -> None:
    before = torch._dynamo.config.save_config()
    model, x = Tokens(), torch.randn(5, 8)
    run(compiled(model), x)
    run(moe_compile.explain, model, x)
    assert torch._dynamo.config.save_config() == before


def test_structure_of_experts() -> None:
    class Stacked(nn.Module):
        def __init__(self, router):
            super().__init__()
            self.up = nn.Parameter(torch.zeros(4, 8, 6))
            if router:
                self.gate = nn.Linear(6, 4)

    class Experts(nn.ModuleList):
        pass

    class ManyHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    assert holds_experts(Tokens())
    assert holds_experts(Stacked(router=True))
    assert holds_experts(Experts([nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert not holds_experts(Stacked(router=False))
    assert not holds_experts(ManyHeads())
    assert not holds_experts(Layers())
    assert not holds_experts(nn.TransformerEncoderLayer(8, 2))
    assert not holds_experts(nn.Sequential(nn.Conv1d(8, 8, 3), nn.Linear(8, 8)))
