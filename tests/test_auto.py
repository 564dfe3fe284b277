"""`auto`: measured tables, the rule without one, and the ladder over token counts."""

import json
import runpy
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from zoo import standalone

import moe_compile
from moe_compile import tables, tune
from moe_compile.auto import Ladder, Rung, find_ladder
from moe_compile.errors import OptionError, TableWarning
from moe_compile.experts_backends import legal_names
from moe_compile.modes import CompileSettings
from moe_compile.roofline import estimate
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec
from moe_compile.tables import BlockSize, Measurement, Table

SPEC = ExpertsSpec(
    num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, weight_dtype=torch.bfloat16, gated=True
)
SIZE = BlockSize(128, 8, 2048, 768, "bfloat16")
H200 = Situation("cuda", (9, 0), has_triton=True, device_name="NVIDIA H200")
COUNTS = [1, 2, 3, 8, 17, 64, 200, 256, 1000, 4096, 8192, 100_000]


@pytest.fixture
def cache():
    return tables.cache_directory()


def make_table(times, *, device="NVIDIA H200", training=False, cuda_graphs=False, size=SIZE):
    measurement = Measurement(size, training, cuda_graphs, times)
    return Table(device, "cuda", (9, 0), "2026-12-01", {"torch": "2.11.0"}, (measurement,))


def keep(table):
    path = tables.cache_file(table.device)
    tables.write_table(table, path)
    return path


TIMES = {1: {"batched_mm": 10.0, "grouped_mm": 40.0}, 64: {"batched_mm": 640.0, "grouped_mm": 80.0}}


# Choosing ------------------------------------------------------------------------------------------------------------


def test_the_users_own_table_decides_and_explains_itself():
    keep(make_table(TIMES))
    ladder = find_ladder(SPEC, H200)
    assert [rung.name for rung in ladder.rungs] == ["batched_mm", "grouped_mm"]
    assert ladder.rungs[0].last + 1 == ladder.rungs[1].first
    assert 1 <= ladder.rungs[0].last < 64
    assert "NVIDIA H200" in str(ladder)
    assert "2026-12-01" in str(ladder)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_the_choice_is_the_fastest_measured_one_at_every_measured_count(cuda_graphs):
    situation = replace(H200, settings=CompileSettings("reduce-overhead")) if cuda_graphs else H200
    (shipped,) = tables.tables_for(situation)
    checked = 0
    for measurement in shipped.measurements:
        if measurement.training or measurement.cuda_graphs != cuda_graphs:
            continue
        size = measurement.size
        spec = replace(
            SPEC,
            num_experts=size.num_experts,
            top_k=size.top_k,
            hidden_size=size.hidden_size,
            intermediate_size=size.intermediate_size,
        )
        legal = legal_names(spec, situation)
        ladder = find_ladder(spec, situation)
        for tokens, times in measurement.microseconds.items():
            fastest = min(time for name, time in times.items() if name in legal)
            assert times[ladder.name_for(tokens)] <= 1.05 * fastest, (size, tokens)
            checked += 1
    assert checked >= 12


def test_a_choice_is_always_legal():
    keep(make_table(TIMES))
    for training in (False, True):
        for mode in (None, "reduce-overhead"):
            for dynamic in (False, True):
                situation = replace(H200, training=training, settings=CompileSettings(mode), dynamic_tokens=dynamic)
                legal = legal_names(SPEC, situation)
                ladder = find_ladder(SPEC, situation)
                assert {rung.name for rung in ladder.rungs} <= set(legal)


def test_an_unmeasured_but_similar_block_takes_its_neighbours_times_and_a_different_one_the_rule():
    keep(make_table(TIMES))
    similar = replace(SPEC, num_experts=64, hidden_size=2560)
    assert "measured" in find_ladder(similar, H200).basis
    assert "nothing was measured" in find_ladder(replace(SPEC, weight_dtype=torch.float32), H200).basis
    far = replace(SPEC, num_experts=16, hidden_size=256, intermediate_size=64)
    assert "nothing was measured" in find_ladder(far, H200).basis


def test_a_backend_that_was_given_up_is_not_chosen_beyond():
    times = {1: {"batched_mm": 10.0, "grouped_mm": 11.0}, 8: {"batched_mm": 20.0, "grouped_mm": 18.0}}
    keep(make_table({**times, 64: {"grouped_mm": 1e6}}))
    assert find_ladder(SPEC, H200).name_for(5000) == "grouped_mm"


def test_what_only_a_table_knows_may_be_chosen(monkeypatch):
    """A backend that was added is timed and picked like the others."""
    from moe_compile.experts_backends import EXPERTS_BACKENDS

    record = replace(EXPERTS_BACKENDS["batched_mm"], name="another")
    monkeypatch.setitem(EXPERTS_BACKENDS, "another", record)
    keep(make_table({1: {"another": 1.0, "grouped_mm": 2.0}, 64: {"another": 9.0, "grouped_mm": 3.0}}))
    assert [rung.name for rung in find_ladder(SPEC, H200).rungs] == ["another", "grouped_mm"]


def test_a_gain_within_noise_is_no_rung_of_its_own():
    keep(make_table({1: {"batched_mm": 10.0, "grouped_mm": 10.2}, 64: {"batched_mm": 10.3, "grouped_mm": 10.0}}))
    assert len(find_ladder(SPEC, H200).rungs) == 1


def test_nothing_is_chosen_where_nothing_is_legal():
    situation = Situation(fullgraph=True)
    assert find_ladder(ExpertsSpec(quantisation="fp8"), situation) is None


def test_a_ladder_in_words():
    ladder = Ladder((Rung("a", 0, 1), Rung("b", 2, 64), Rung("c", 65, None)), "basis")
    assert str(ladder) == "a up to T=1, b up to T=64, c beyond (basis)"
    assert [ladder.name_for(tokens) for tokens in (0, 1, 2, 64, 65, 10**9)] == ["a", "a", "b", "b", "c", "c"]


# The rule ------------------------------------------------------------------------------------------------------------


def test_by_the_roofline_more_tokens_never_cost_less():
    for name in ("grouped_mm", "batched_mm", "triton"):
        times = [estimate(name, SPEC, H200, tokens) for tokens in COUNTS]
        assert times == sorted(times)
        assert times[0] < times[-1]


def test_by_the_roofline_gathering_weights_loses_beyond_a_few_tokens():
    for situation in (replace(H200, has_triton=False), Situation("cpu")):
        ladder = find_ladder(replace(SPEC, weight_dtype=torch.float16), replace(situation, device_name=None))
        assert "roofline" in ladder.basis
        assert ladder.name_for(1) == ("batched_mm" if situation.device_type == "cpu" else "grouped_mm")
        assert ladder.name_for(64) == ladder.name_for(100_000) == "grouped_mm"


def test_without_sizes_the_first_legal_backend_is_taken():
    assert find_ladder(ExpertsSpec(weight_dtype=torch.bfloat16), H200).rungs[0].name == "grouped_mm"


# Files ---------------------------------------------------------------------------------------------------------------


def test_a_table_reads_back_as_it_was_written(cache):
    table = make_table(TIMES)
    path = keep(table)
    assert path.parent == cache
    assert tables.read_table(path) == table
    assert [file.name for file in cache.iterdir()] == [path.name]  # nothing temporary is left


def test_the_cache_follows_xdg_and_its_key_has_device_and_versions(monkeypatch, tmp_path):
    monkeypatch.delenv("MOE_COMPILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tables.cache_file("NVIDIA H200")
    assert path.parent == tmp_path / "moe_compile"
    release = ".".join(torch.__version__.split(".")[:2])
    assert path.name == f"nvidia-h200-torch{release}-moe_compile{moe_compile.__version__}.json"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "no table"),
        ("{}", "no table"),
        ("[1, 2]", "no table"),
        ('{"format": 99}', "format"),
        (json.dumps({**make_table(TIMES).to_dict(), "blocks": [{"E": 8}]}), "no table"),
        (json.dumps(make_table({1: {"grouped_mm": 1.0}}).to_dict()).replace("1.0}", "-1.0}"), "positive"),
        (json.dumps(make_table(TIMES, device="NVIDIA B200").to_dict()), "measured on NVIDIA B200"),
    ],
)
def test_a_damaged_or_foreign_file_is_warned_of_and_not_used(content, problem):
    path = tables.cache_file("NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.warns(TableWarning, match=problem) as caught:
        ladder = find_ladder(SPEC, H200)
    assert str(path) in str(caught[0].message)
    assert ladder == find_shipped()


def find_shipped():
    tables.cache_file("NVIDIA H200").unlink()
    return find_ladder(SPEC, H200)


def test_a_failed_write_leaves_the_old_file(monkeypatch):
    path = keep(make_table(TIMES))
    monkeypatch.setattr(json, "dump", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        tables.write_table(make_table({1: {"grouped_mm": 1.0}}), path)
    assert tables.read_table(path) == make_table(TIMES)
    assert len(list(path.parent.iterdir())) == 1


def test_shipped_tables_are_complete_and_part_of_the_package():
    shipped = tables.shipped_files()
    assert {path.stem for path in shipped} >= {"h200", "cpu"}
    for path in shipped:
        table = tables.read_table(path)
        assert table.measurements
        assert table.versions["torch"]
        assert table.date >= "2026-01-01"


def test_the_docs_show_the_shipped_data():
    program = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "auto_page.py"))
    text = program["PAGE"].read_text()
    assert program["page"](text) == text


# tune ----------------------------------------------------------------------------------------------------------------


@pytest.mark.inductor
def test_tune_measures_this_machine_and_auto_follows(cache, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    command = ["--shapes", "4,2,32,16", "--dtypes", "float32", "--tokens", "3", "--device", "cpu", "--rounds", "3"]
    assert tune.run(parser.parse_args(command)) == 0
    assert "written to" in capsys.readouterr().out
    table = tables.read_table(tables.cache_file(tables.device_name("cpu")))
    (measurement,) = table.measurements
    assert measurement.size == BlockSize(4, 2, 32, 16, "float32")
    assert set(measurement.microseconds[3]) >= {"grouped_mm", "batched_mm"}
    spec = replace(SPEC, num_experts=4, top_k=2, hidden_size=32, intermediate_size=16, weight_dtype=torch.float32)
    situation = Situation("cpu", device_name=tables.device_name("cpu"))
    ladder = find_ladder(spec, situation)
    times = measurement.microseconds[3]
    assert ladder.name_for(3) == min(times, key=times.__getitem__)
    assert ladder.basis == table.origin


def test_measuring_again_keeps_other_blocks():
    other = replace(SIZE, num_experts=64)
    older, newer = make_table(TIMES), make_table({1: {"grouped_mm": 5.0}}, size=other)
    merged = tune.merge(newer, older)
    assert {m.size for m in merged.measurements} == {SIZE, other}
    assert tune.merge(newer, make_table(TIMES, device="NVIDIA B200")) == newer
    again = tune.merge(make_table({8: {"grouped_mm": 5.0}}), older)
    assert [m.microseconds for m in again.measurements] == [{8: {"grouped_mm": 5.0}}]


@pytest.mark.parametrize(
    "arguments",
    [
        {"shapes": [(4, 8, 32, 16)]},
        {"shapes": [(4, 2, 32)]},
        {"shapes": [(4, 2, 0, 16)]},
        {"shapes": []},
        {"dtypes": ["int8"]},
        {"tokens": [0, 1]},
        {"device": "tpu"},
    ],
)
def test_tune_refuses_what_cannot_be(arguments):
    with pytest.raises(OptionError):
        tune.tune(**{"device": "cpu", **arguments})


# In a model ----------------------------------------------------------------------------------------------------------


def test_explain_shows_the_ladder():
    module, inputs = standalone("qwen3_moe")
    explanation = moe_compile.explain(module, *inputs, backend="auto")
    (block,) = explanation.blocks
    assert block.ladder.name_for(block.tokens) in (block.chosen, block.chosen.removesuffix("_fallback"))
    assert str(block.ladder) in str(explanation)
    assert json.loads(json.dumps(explanation.to_dict()))["blocks"][0]["ladder"]["rungs"]
    assert moe_compile.explain(module, *inputs, backend="grouped_mm").blocks[0].ladder is None


def test_canonical_ops_that_a_user_wrote_are_reported_and_chosen_by_their_token_count():
    def block(x, ids, weights, up, down):
        return moe_compile.experts_block(x, ids, weights, up=up, gate=torch.relu, down=down)

    ids = torch.tensor([[0], [1], [1]])
    inputs = (torch.randn(3, 8), ids, torch.rand(3, 1), torch.randn(2, 16, 8), torch.randn(2, 8, 16))
    backend = moe_compile.backend("auto", compiler="aot_eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(block, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    (found,) = backend.blocks.values()
    assert (found.form, found.tokens, found.spec.num_experts) == ("canonical ops", 3, 2)
