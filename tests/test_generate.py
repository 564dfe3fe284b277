"""`model.generate` of transformers: the decode switch, static caches and `CompileConfig`."""

import copy
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import CompileConfig
from zoo import build

import moe_compile
from moe_compile import decoding
from moe_compile.errors import RuleError, UnknownBackendError
from moe_compile.selection import Selection

PROMPT = torch.tensor([[5, 9, 3, 7, 11]])


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def switches_on_cpu(monkeypatch):
    """Lets the tests see on a CPU what happens on a GPU."""
    monkeypatch.setattr(decoding, "switches_on", lambda device_type: True)


def record_choices(backend):
    """Chosen backends of each graph, in the order in which they were compiled."""
    graphs = []

    def compiler(gm, inputs):
        graphs.append({block.chosen.removesuffix("_fallback") for block in backend.blocks.values()})
        return gm.forward

    backend.compiler = compiler
    return graphs


def language_model(experts_implementation="grouped_mm"):
    return build("qwen3_moe", torch.float32, experts_implementation)[0]


def generate(model, tokens=4, **kwargs):
    return model.generate(PROMPT, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **kwargs)


# The decode switch ---------------------------------------------------------------------------------------------------


def test_prefill_and_decoding_get_code_of_their_own_and_are_not_compiled_again(switches_on_cpu):
    model = language_model()
    expected = generate(model)
    backend = moe_compile.backend("grouped_mm", decode="batched_mm")
    graphs = record_choices(backend)
    model.forward = torch.compile(model.forward, backend=backend, dynamic=True, fullgraph=True)
    for _ in range(2):
        assert torch.equal(generate(model, cache_implementation="static"), expected)
        assert not decoding.STAGE.decoding
        compiled = len(graphs)
    assert graphs[0] == {"grouped_mm"}
    assert graphs[-1] == {"batched_mm"}
    assert {name for graph in graphs for name in graph} == {"grouped_mm", "batched_mm"}
    generate(model, cache_implementation="static")
    assert len(graphs) == compiled


def test_on_cpu_grouped_mm_stays():
    model = language_model()
    backend = moe_compile.backend("grouped_mm", decode="batched_mm")
    graphs = record_choices(backend)
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    generate(model, cache_implementation="static")
    assert set.union(*graphs) == {"grouped_mm"}


def test_only_grouped_mm_entries_switch():
    experts = {"": "grouped_mm", "text_config": "grouped_mm", "vision_config": "eager", "model.layers.0.*": "auto"}
    selection = Selection.of(experts, "batched_mm").while_decoding()
    assert dict(selection.entries) == {**experts, "": "batched_mm", "text_config": "batched_mm"}
    assert Selection.of("grouped_mm").while_decoding() == Selection.of("grouped_mm")


def test_the_switch_reaches_the_backbone_of_a_sub_config(switches_on_cpu):
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 48, "head_dim": 8,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision)).eval()
    experts = {"": "eager", "text_config": "grouped_mm"}
    backend = moe_compile.backend(experts, decode="batched_mm", compiler="aot_eager")
    compiled = torch.compile(model, backend=backend)
    inputs = {"input_ids": torch.randint(64, (1, 6)), "use_cache": False}
    compiled(**inputs)
    assert [block.chosen for block in backend.blocks.values()] == ["grouped_mm_fallback"]
    with model._optimize_model_for_decode():
        compiled(**inputs)
    assert [block.chosen for block in backend.blocks.values()] == ["batched_mm"]
    count = len(backend.graphs)
    compiled(**inputs)
    assert len(backend.graphs) == count


def test_the_stage_ends_with_an_error_and_belongs_to_its_thread():
    seen = []

    def decode_and_fail():
        with decoding.decoding():
            thread = threading.Thread(target=lambda: seen.append(decoding.STAGE.decoding))
            thread.start()
            thread.join()
            seen.append(decoding.STAGE.decoding)
            raise KeyError

    with pytest.raises(KeyError):
        decode_and_fail()
    assert seen == [False, True]
    assert not decoding.STAGE.decoding


@pytest.mark.parametrize("decode", ["", "batched", 3, {"": "batched_mm"}])
def test_an_unknown_name_is_refused(decode):
    with pytest.raises(UnknownBackendError, match="decode="):
        moe_compile.backend("grouped_mm", decode=decode)


def test_decode_is_part_of_the_object():
    backend = moe_compile.backend("grouped_mm", decode="batched_mm")
    assert backend != moe_compile.backend("grouped_mm")
    assert backend == moe_compile.backend("grouped_mm", decode="batched_mm")
    assert "decode='batched_mm'" in repr(backend)
    backend.set("auto")
    backend.set("grouped_mm")
    assert backend == moe_compile.backend("grouped_mm", decode="batched_mm")


def test_decode_by_name(switches_on_cpu):
    model = language_model("eager")
    options = {"experts": "grouped_mm", "decode": "eager", "compiler": "aot_eager"}
    compiled = torch.compile(model, backend="moe_compile", options=options, fullgraph=True)
    compiled(input_ids=PROMPT, use_cache=False)
    with decoding.decoding(), pytest.raises(RuleError, match="one graph"):
        compiled(input_ids=PROMPT, use_cache=False)
    with pytest.raises(UnknownBackendError, match="decode='nothing'"):
        torch.compile(model, backend="moe_compile", options={**options, "decode": "nothing"})(input_ids=PROMPT)


# CompileConfig -------------------------------------------------------------------------------------------------------


def compile_config(backend, **kwargs):
    config = CompileConfig(backend=backend, fullgraph=True, **kwargs)
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_generate_with_a_static_cache_and_compile_config(mode):
    model = language_model("eager")
    expected = generate(model, 6)
    backend = moe_compile.backend("auto", compiler="aot_eager")
    config = compile_config(backend, mode=mode)
    for _ in range(2):
        assert torch.equal(generate(model, 6, cache_implementation="static", compile_config=config), expected)
    assert len(backend.graphs) == 1  # one graph decodes; the copy that generate makes of the config is this object
    assert len(backend.blocks) == 2


@pytest.mark.inductor
def test_generate_in_reduce_overhead_through_inductor():
    model = language_model("eager")
    expected = generate(model, 6)
    backend = moe_compile.backend("auto")
    config = compile_config(backend, mode="reduce-overhead")
    assert torch.equal(generate(model, 6, cache_implementation="static", compile_config=config), expected)
    assert {block.chosen for block in backend.blocks.values()} <= {"batched_mm", "grouped_mm", "grouped_mm_fallback"}


def test_a_copy_is_the_backend_itself():
    backend = moe_compile.backend("grouped_mm")
    copied = copy.deepcopy(backend)
    backend.set("batched_mm")
    assert copied.get() == {"": "batched_mm"}


@pytest.mark.inductor
def test_the_benchmark_runs_on_a_tiny_model(tmp_path):
    root = Path(__file__).parents[1]
    command = [sys.executable, root / "benchmarks" / "generate.py", "--tiny", "--batches", "2", "--new-tokens", "4"]
    command += ["--rounds", "1", "--contenders", "auto", "--json", tmp_path / "out.json"]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["tokens/s"] > 0
    assert row["agree"] == 1
    assert row["runs"]
