"""`moe_compile.backend()` as users call it: selection, rules, errors and switching, through torch.compile."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from zoo import build, first_output

import moe_compile
from moe_compile.errors import (
    FallbackWarning,
    NoExpertsWarning,
    OptionError,
    RuleError,
    SelectionError,
    UnknownBackendError,
)

BOTH_EXPERTS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


@pytest.fixture(scope="module")
def qwen3():
    model, arguments = build("qwen3_moe", torch.float32, "eager")
    with torch.no_grad():
        return model, arguments, first_output(model(**arguments))


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def make(experts="grouped_mm", **kwargs):
    return moe_compile.backend(experts, **{"compiler": "aot_eager", **kwargs})


def run(case, backend, **kwargs):
    """Relative error against eager, and the backend's blocks by path."""
    model, arguments, reference = case
    output = first_output(torch.compile(model, backend=backend, **kwargs)(**arguments))
    error = ((output - reference).abs().max() / reference.abs().max()).item()
    return error, {block.path: block.chosen for block in backend.blocks.values()}


@pytest.mark.parametrize(("experts", "chosen"), [("grouped_mm", "grouped_mm_fallback"), ("batched_mm", "batched_mm")])
def test_an_eager_model_becomes_one_graph(qwen3, experts, chosen):
    backend = make(experts)
    error, blocks = run(qwen3, backend, fullgraph=True)
    assert error < 1e-5
    assert blocks == dict.fromkeys(BOTH_EXPERTS, chosen)
    assert len(backend.graphs) == 1
    assert backend.graphs[0].blocks == 2


def test_eager_runs_the_models_own_code_with_its_graph_breaks(qwen3):
    backend = make("eager")
    error, blocks = run(qwen3, backend)
    assert error == 0
    assert set(blocks.values()) == {"eager"}
    assert len(backend.graphs) > 1


def test_a_path_may_keep_its_own_code_while_the_rest_is_rewritten(qwen3):
    backend = make({"": "grouped_mm", "model.layers.0.*": "eager"})
    error, blocks = run(qwen3, backend)
    assert error < 1e-5
    assert blocks == {BOTH_EXPERTS[0]: "eager", BOTH_EXPERTS[1]: "grouped_mm_fallback"}


def test_the_longest_matching_path_wins(qwen3):
    backend = make({"": "eager", "model.*": "batched_mm", "model.layers.1.*": "grouped_mm"})
    _, blocks = run(qwen3, backend, fullgraph=True)
    assert blocks == {BOTH_EXPERTS[0]: "batched_mm", BOTH_EXPERTS[1]: "grouped_mm_fallback"}


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "settings", [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}]
)
def test_grouped_mm_is_refused_in_cuda_graph_modes(qwen3, settings, fullgraph):
    compiled = []
    backend = make(compiler=lambda gm, inputs: compiled.append(gm) or gm.forward)
    with pytest.raises(RuleError, match=r"model\.layers\.0\.mlp\.experts.*CUDA graphs.*batched_mm"):
        run(qwen3, backend, fullgraph=fullgraph, **settings)
    assert not compiled


@pytest.mark.parametrize("by_name", [False, True])
def test_grouped_mm_is_refused_where_the_compiler_records_cuda_graphs(qwen3, by_name):
    options = {"experts": "grouped_mm", "compiler": "cudagraphs"}
    chosen = {"backend": "moe_compile", "options": options} if by_name else {"backend": moe_compile.backend(**options)}
    with pytest.raises(RuleError, match=r'compiler="cudagraphs" uses.*batched_mm.*compiler="inductor"'):
        torch.compile(qwen3[0], fullgraph=True, **chosen)(**qwen3[1])


def test_explain_judges_by_the_compiler_as_well(qwen3):
    backend = moe_compile.backend("grouped_mm", compiler="cudagraphs")
    blocks = moe_compile.explain(qwen3[0], **qwen3[1], backend=backend).blocks
    assert all('compiler="cudagraphs"' in block.reasons["grouped_mm"] for block in blocks)
    assert [block.chosen for block in blocks] == [None, None]


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs"])
def test_grouped_mm_is_legal_in_the_other_modes(qwen3, mode):
    error, _ = run(qwen3, make(), mode=mode, fullgraph=True)
    assert error < 1e-5


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_batched_mm_is_legal_in_cuda_graph_modes(qwen3, mode):
    error, blocks = run(qwen3, make("batched_mm"), mode=mode, fullgraph=True)
    assert error < 1e-5
    assert set(blocks.values()) == {"batched_mm"}


def test_eager_is_refused_with_fullgraph(qwen3):
    with pytest.raises(RuleError, match=r"one graph.*grouped_mm"):
        run(qwen3, make("eager"), fullgraph=True)


def test_eager_is_legal_with_fullgraph_where_the_models_own_code_traces_whole(qwen3):
    model, arguments = build("qwen3_moe", torch.float32, "batched_mm")
    error, blocks = run((model, arguments, qwen3[2]), make("eager"), fullgraph=True)
    assert error < 1e-5
    assert blocks == dict.fromkeys(BOTH_EXPERTS, "eager")


def test_fallback_takes_the_next_legal_backend_and_warns_once(qwen3):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error, blocks = run(qwen3, make(on_reject="fallback"), mode="reduce-overhead", fullgraph=True)
    assert error < 1e-5
    assert set(blocks.values()) == {"batched_mm"}
    ours = [str(warning.message) for warning in caught if warning.category is FallbackWarning]
    assert len(ours) == 1
    assert "batched_mm runs instead" in ours[0]


def test_keep_leaves_the_models_own_code_and_says_why(qwen3):
    backend = make(on_reject="keep")
    with pytest.warns(FallbackWarning, match="own code"):
        error, blocks = run(qwen3, backend, mode="reduce-overhead")
    assert error == 0
    assert set(blocks.values()) == {None}
    assert "CUDA graphs" in next(iter(backend.blocks.values())).reasons["grouped_mm"]


def test_auto_is_never_illegal(qwen3):
    _, by_default = run(qwen3, make("auto"), fullgraph=True)
    torch._dynamo.reset()
    _, with_graphs = run(qwen3, make("auto"), mode="reduce-overhead", fullgraph=True)
    assert set(by_default.values()) == {"grouped_mm_fallback"}
    assert set(with_graphs.values()) == {"batched_mm"}


@pytest.mark.parametrize("wrap", ["forward", "compile", "layer"])
def test_every_way_to_compile_reaches_the_blocks(qwen3, wrap):
    _, arguments, reference = qwen3
    model, _ = build("qwen3_moe", torch.float32, "eager")
    backend = make()
    if wrap == "forward":
        model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    elif wrap == "compile":
        model.compile(backend=backend, fullgraph=True)
    else:
        for layer in model.model.layers:
            layer.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(first_output(model(**arguments)), reference, rtol=1e-5, atol=1e-5)
    paths = {block.path for block in backend.blocks.values()}
    assert paths == ({"mlp.experts"} if wrap == "layer" else set(BOTH_EXPERTS))


# Names, mappings, modes and options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", None, 3, "groupedmm", "Grouped_mm"])
def test_unknown_names_are_refused_when_the_backend_is_made(name):
    with pytest.raises(UnknownBackendError, match=r"auto, grouped_mm, batched_mm, .*eager"):
        moe_compile.backend(name)


def test_the_nearest_name_is_suggested():
    with pytest.raises(UnknownBackendError, match="did you mean 'grouped_mm'"):
        moe_compile.backend("groupedmm")


@pytest.mark.parametrize("mapping", [{}, {3: "eager"}])
def test_malformed_mappings_are_refused(mapping):
    with pytest.raises(SelectionError, match="mapping needs"):
        moe_compile.backend(mapping)


@pytest.mark.parametrize("key", ["text_config", "model.layer.0.*"])
def test_a_key_that_matches_nothing_is_refused(qwen3, key):
    with pytest.raises(SelectionError, match=r"matches none.*model\.layers\.0\.mlp\.experts"):
        run(qwen3, make({"": "grouped_mm", key: "eager"}), fullgraph=True)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "reduce-overhea"}, "did you mean 'reduce-overhead'"),
        ({"options": {"triton.cudagraph": True}}, "did you mean 'triton.cudagraphs'"),
        ({"options": {"max_autotune": "yes"}}, "max_autotune"),
        ({"options": {"experts": "grouped_mm"}}, "no Inductor option 'experts'"),
    ],
)
def test_mode_and_option_typos_are_refused(qwen3, settings, message, fullgraph):
    with pytest.raises(OptionError, match=message):
        run(qwen3, make(), fullgraph=fullgraph, **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_reject": "ignore"}, "error, fallback, keep"),
        ({"compiler": "aot_eagerr"}, "did you mean 'aot_eager'"),
        ({"compiler": "moe_compile"}, "knows no such backend"),
        ({"compiler": 3}, "neither a name nor callable"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        moe_compile.backend("grouped_mm", **arguments)


def test_a_model_without_experts_compiles_and_warns_once():
    backend = make()
    model = torch.nn.Linear(4, 3)
    x = torch.randn(2, 4)
    with pytest.warns(NoExpertsWarning, match="no experts block"):
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoExpertsWarning)
        torch.compile(torch.nn.Linear(3, 3), backend=backend)(torch.randn(2, 3))


# The object -----------------------------------------------------------------------------------------------------------


def test_set_is_seen_by_the_next_call_and_switching_back_compiles_nothing(qwen3):
    model, arguments, reference = qwen3
    backend = make("grouped_mm")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for turn in range(10):
        experts = ("grouped_mm", "batched_mm")[turn % 2]
        backend.set(experts)
        torch.testing.assert_close(first_output(compiled(**arguments)), reference, rtol=1e-5, atol=1e-5)
        assert backend.get() == {"": experts}
    assert len(backend.graphs) == 2
    backend.set({"": "batched_mm", "model.layers.1.*": "grouped_mm"})
    compiled(**arguments)
    assert {block.path: block.chosen for block in backend.blocks.values()} == {
        BOTH_EXPERTS[0]: "batched_mm",
        BOTH_EXPERTS[1]: "grouped_mm_fallback",
    }


def test_a_refused_set_leaves_the_choice_as_it_was():
    backend = make("grouped_mm")
    with pytest.raises(UnknownBackendError):
        backend.set("nonsense")
    assert backend.get() == {"": "grouped_mm"}


def test_backends_are_equal_when_they_would_compile_alike(qwen3):
    one, other = make("grouped_mm"), make("grouped_mm")
    assert one == other
    assert hash(one) == hash(other)
    assert one.__name__ == "moe_compile"
    other.set("batched_mm")
    assert one != other
    assert one != make("grouped_mm", on_reject="keep")
    assert one != make("grouped_mm", compiler="eager")


def test_equal_backends_share_compiled_code_and_part_when_one_is_set(qwen3):
    one, other = make("grouped_mm"), make("grouped_mm")
    run(qwen3, one, fullgraph=True)
    run(qwen3, other, fullgraph=True)
    assert (len(one.graphs), len(other.graphs)) == (1, 0)
    other.set("batched_mm")
    _, blocks = run(qwen3, other, fullgraph=True)
    assert set(blocks.values()) == {"batched_mm"}


def test_copies_and_pickles_are_equal():
    backend = make({"": "grouped_mm", "text_config": "eager"}, on_reject="keep")
    assert copy.deepcopy(backend) == backend
    assert pickle.loads(pickle.dumps(backend)) == backend
    assert "text_config" in repr(backend)


def test_reset_forgets_and_compiles_again(qwen3):
    backend = make()
    run(qwen3, backend, fullgraph=True)
    torch._dynamo.reset()
    assert not backend.graphs
    run(qwen3, backend, fullgraph=True)
    assert len(backend.graphs) == 1


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="in torch 2.11 the process dies when two threads compile at once, whatever the backend",
)
def test_threads_do_not_see_each_others_backends():
    results = {}

    def work(name):
        model, arguments = build("qwen3_moe", torch.float32, "eager")
        backend = make(name)
        with torch.no_grad():
            torch.compile(model, backend=backend, fullgraph=True)(**arguments)
        results[name] = {block.chosen for block in backend.blocks.values()}

    threads = [threading.Thread(target=work, args=(name,)) for name in ("grouped_mm", "batched_mm")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"grouped_mm": {"grouped_mm_fallback"}, "batched_mm": {"batched_mm"}}


# By name --------------------------------------------------------------------------------------------------------------


def test_the_backend_is_reachable_by_name(qwen3):
    model, arguments, reference = qwen3
    options = {"experts": "batched_mm", "compiler": "aot_eager", "mode": "reduce-overhead"}
    compiled = torch.compile(model, backend="moe_compile", options=options, fullgraph=True)
    torch.testing.assert_close(first_output(compiled(**arguments)), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"experts": "grouped_mm", "mode": "max-autotune"}, RuleError),
        ({"experts": "nonsense"}, UnknownBackendError),
        ({"expert": "grouped_mm"}, OptionError),
        ({"experts": "grouped_mm", "mode": "quick"}, OptionError),
    ],
)
def test_by_name_the_same_errors_arrive(qwen3, options, error):
    model, arguments, _ = qwen3
    compiled = torch.compile(model, backend="moe_compile", options={"compiler": "aot_eager", **options}, fullgraph=True)
    with pytest.raises(error):
        compiled(**arguments)


# What a mapping may not say, at every place where it can be said ------------------------------------------------------


def test_a_key_that_matches_nothing_is_refused_after_set(qwen3):
    model, arguments, _ = qwen3
    backend = make("grouped_mm")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(**arguments)
    backend.set({"": "grouped_mm", "model.layer.0.*": "eager"})
    for _ in range(2):
        with pytest.raises(SelectionError, match="matches none"):
            compiled(**arguments)
    backend.set("grouped_mm")
    compiled(**arguments)
    assert len(backend.graphs) == 1 + 2  # the refused ones were rewritten, and never compiled


def test_the_keys_of_a_function_that_calls_a_model_are_those_of_the_model(qwen3):
    holder = {"model": qwen3[0]}
    function = lambda **arguments: holder["model"](**arguments)  # noqa: E731
    backend = make({"": "grouped_mm", "model.layers.0.*": "batched_mm"})
    _, blocks = run((function, *qwen3[1:]), backend, fullgraph=True)
    assert blocks == {BOTH_EXPERTS[0]: "batched_mm", BOTH_EXPERTS[1]: "grouped_mm_fallback"}
    with pytest.raises(SelectionError, match="matches none of the 3"):
        run((function, *qwen3[1:]), make({"": "grouped_mm", "model.layer.0.*": "eager"}), fullgraph=True)


def test_get_answers_per_sub_config_whatever_the_globs(qwen3):
    backend = make({"": "grouped_mm", "*": "batched_mm"})
    run(qwen3, backend, fullgraph=True)
    assert backend.get() == {"": "grouped_mm", "*": "batched_mm"}


def test_keep_is_no_way_around_fullgraph(qwen3):
    with pytest.raises(RuleError, match=r"CUDA graphs.*batched_mm"):
        run(qwen3, make(on_reject="keep"), mode="reduce-overhead", fullgraph=True)


def test_an_option_that_is_no_string_is_refused(qwen3):
    with pytest.raises(OptionError, match="no Inductor option 3"):
        run(qwen3, make(), options={3: True})
