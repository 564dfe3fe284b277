"""Loading kernels of other projects: sources in order, once, and what happens with bad ones."""

import sys
import threading
import types
from dataclasses import replace

import pytest
import torch
from external_kernels import (
    BLACKWELL,
    DEEP_GEMM,
    HOPPER,
    REPOSITORIES,
    SONIC_MOE,
    import_package,
    write_local_kernel,
    write_package,
)

from moe_compile import external
from moe_compile.compatibility.machine import Machine
from moe_compile.diagnosis import Diagnosis
from moe_compile.errors import KernelLoadError, KernelResultError, RegistrationError, RequirementError
from moe_compile.external import external_kernels, loaded_kernels, register_loader
from moe_compile.kernels.external import deepgemm, loading
from moe_compile.kernels.external.loading import forget_kernel, load_kernel


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A Hopper machine with nothing but the `kernels` package, whatever this one is."""
    here = types.SimpleNamespace(environment=HOPPER)
    monkeypatch.setattr(
        loading, "describe_environment", lambda *_, loaders=frozenset(): replace(here.environment, loaders=loaders)
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    yield here
    for name in ("deepgemm", "deepgemm_megamoe", "sonicmoe"):
        register_loader(name, None)


def local(monkeypatch, tmp_path, name, sources):
    pytest.importorskip("kernels")
    monkeypatch.setenv("LOCAL_KERNELS", write_local_kernel(tmp_path / "local", name, sources))


def stand_in(tmp_path, sources=DEEP_GEMM):
    return import_package(write_package(tmp_path / "stand_in", sources), "stand_in_for_loading")


def test_a_registered_loader_comes_first(monkeypatch, tmp_path):
    local(monkeypatch, tmp_path, "deep_gemm", DEEP_GEMM)
    module = stand_in(tmp_path)
    module.__version__ = "7.1"
    register_loader("deepgemm", lambda: module)
    assert load_kernel("deepgemm").module is module
    (report,) = loaded_kernels()
    assert (report.name, report.source, report.version) == ("deepgemm", "registered loader", "7.1")
    assert report.origin == module.__file__
    register_loader("deepgemm", None)
    assert load_kernel("deepgemm").report.source == "kernels package"


@pytest.mark.parametrize(
    ("name", "module", "sources"), [("deepgemm", "deep_gemm", DEEP_GEMM), ("sonicmoe",) * 2 + (SONIC_MOE,)]
)
def test_a_local_kernel_folder(monkeypatch, tmp_path, name, module, sources):
    local(monkeypatch, tmp_path, module, sources)
    loaded = load_kernel(name)
    assert loaded.report.source == "kernels package"
    assert loaded.report.version == f"local, {REPOSITORIES[module]}"
    assert str(tmp_path) in loaded.report.origin
    assert {status.name: status.loaded for status in external_kernels()}[name] == loaded.report


def test_the_hub_is_asked_for_the_pinned_kernel(monkeypatch, tmp_path):
    asked = []
    module = stand_in(tmp_path)

    def get_kernel(repo_id, **pinned):
        asked.append((repo_id, pinned))
        return module

    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace(get_kernel=get_kernel))
    assert load_kernel("deepgemm").report.version == "2"
    assert asked == [("kernels-community/deep-gemm", {"version": 2})]


def test_an_installed_distribution_is_taken_where_the_hub_has_none(monkeypatch, tmp_path, machine):
    write_package(tmp_path / "deep_gemm", DEEP_GEMM)
    monkeypatch.syspath_prepend(str(tmp_path))
    machine.environment = replace(HOPPER, modules=frozenset({"deep_gemm"}))
    try:
        loaded = load_kernel("deepgemm")
        assert loaded.report.source == "installed distribution"
        assert loaded.module is sys.modules["deep_gemm"]
    finally:
        forget_kernel("deepgemm")
    assert "deep_gemm" not in sys.modules


def test_offline_the_hubs_cache_is_read_alone(monkeypatch, tmp_path):
    pytest.importorskip("kernels")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RequirementError, match="not available in the local cache"):
        load_kernel("deepgemm")
    repository, commit = tmp_path / "kernels--kernels-community--deep-gemm", "c0ffee" * 6 + "beef"
    write_local_kernel(repository / "snapshots" / commit, "deep_gemm", DEEP_GEMM)
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text(commit)
    report = load_kernel("deepgemm").report
    assert (report.source, report.version) == ("kernels package", "2")
    assert commit in report.origin


def test_kernels_are_loaded_on_demand_for_reports(monkeypatch, tmp_path):
    module = stand_in(tmp_path)
    register_loader("deepgemm", lambda: module)
    register_loader("sonicmoe", lambda: 1 / 0)
    monkeypatch.setattr(external, "_describe", lambda loaders: replace(HOPPER, loaders=loaders))
    assert [status.loaded for status in external_kernels()] == [None] * 3
    found = {status.name: status for status in external_kernels(load=True)}
    assert found["deepgemm"].loaded.origin == module.__file__
    assert found["deepgemm"].error is None
    assert "ZeroDivisionError" in found["sonicmoe"].error
    assert "SM100" in found["deepgemm_megamoe"].missing[0]
    assert found["deepgemm_megamoe"].error is None
    report = Diagnosis((Machine.here("cpu"),), (), tuple(found.values()), ())
    assert not report.healthy
    assert module.__file__ in str(report).replace("\n", "").replace(" ", "")


def test_nothing_to_load_names_every_source():
    pytest.importorskip("kernels")
    with pytest.raises(ImportError, match="no source offers it") as caught:
        load_kernel("deepgemm")
    assert isinstance(caught.value, RequirementError)
    for word in ("registered loader", "kernels package", "installed distribution", "pip install sgl-deep-gemm"):
        assert word in str(caught.value)
    assert loaded_kernels() == ()


def test_a_missing_requirement_is_an_import_error_and_nothing_is_imported(machine):
    machine.environment = replace(HOPPER, toolkit=None)
    register_loader("deepgemm", None)
    with pytest.raises(ImportError, match=r"needs nvcc 12\.3"):
        load_kernel("deepgemm")


BAD = {
    "lacks a symbol": (
        {**DEEP_GEMM, "__init__.py": DEEP_GEMM["__init__.py"].replace("def m_grouped_bf16_gemm_nn", "def another")},
        "lacks m_grouped_bf16_gemm_nn_contiguous",
    ),
    "raises on import": ({"__init__.py": "raise RuntimeError('built for another torch')"}, "built for another torch"),
    "misses a module": ({"__init__.py": "import no_such_module"}, "no_such_module"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("source", ["kernels package", "registered loader", "installed distribution"])
def test_a_bad_kernel_is_named_and_the_next_attempt_works(monkeypatch, tmp_path, machine, bad, source):
    sources, words = BAD[bad]
    folder = tmp_path / "deep_gemm"
    if source == "kernels package":
        local(monkeypatch, tmp_path, "deep_gemm", sources)
    elif source == "registered loader":
        register_loader("deepgemm", lambda: import_package(folder, "bad_stand_in"))
    else:
        monkeypatch.syspath_prepend(str(tmp_path))
        machine.environment = replace(HOPPER, modules=frozenset({"deep_gemm"}))
    write_package(folder, sources)
    with pytest.raises(KernelLoadError, match=words) as caught:
        load_kernel("deepgemm")
    assert isinstance(caught.value, ImportError)
    assert source in str(caught.value)
    assert loaded_kernels() == ()

    write_package(folder, DEEP_GEMM)
    if source == "kernels package":
        local(monkeypatch, tmp_path, "deep_gemm", DEEP_GEMM)
    assert load_kernel("deepgemm").report.source == source
    forget_kernel("deepgemm")


def test_a_kernel_that_returns_something_else_is_forgotten(monkeypatch, tmp_path):
    answers = ["128", 0, 24]
    module = stand_in(tmp_path)
    register_loader("deepgemm", lambda: module)
    for answer in answers:
        monkeypatch.setattr(module, "get_mk_alignment_for_contiguous_layout", lambda answer=answer: answer)
        with pytest.raises(KernelResultError, match="get_mk_alignment_for_contiguous_layout of deepgemm"):
            deepgemm.alignment()
        assert loaded_kernels() == ()
    monkeypatch.setattr(module, "get_mk_alignment_for_contiguous_layout", lambda: 32)
    assert deepgemm.alignment() == 32

    x, layout = torch.ones(16, 8, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)
    weight, ends = torch.ones(2, 4, 8, dtype=torch.bfloat16), torch.tensor([16, 16], dtype=torch.int32)
    for wrong in (lambda out: out.float(), lambda out: out[:3], lambda out: "done"):
        forget_kernel("deepgemm")
        monkeypatch.setattr(module, "m_grouped_bf16_gemm_nt_contiguous", lambda a, b, d, g, wrong=wrong: wrong(d))
        with pytest.raises(KernelResultError, match=r"instead of \(16, 4\) bfloat16"):
            deepgemm.grouped_gemm(x, weight, layout, ends, False)
        assert loaded_kernels() == ()
    monkeypatch.setattr(module, "m_grouped_bf16_gemm_nt_contiguous", lambda a, b, d, g: d.fill_(3))
    assert deepgemm.grouped_gemm(x, weight, layout, ends, False).eq(3).all()


def test_threads_load_once(tmp_path):
    calls, barrier = [], threading.Barrier(8)
    module = stand_in(tmp_path)

    def loader():
        calls.append(threading.get_ident())
        return module

    register_loader("deepgemm", loader)
    found = []

    def load():
        barrier.wait()
        found.append(load_kernel("deepgemm"))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len({id(loaded) for loaded in found}) == 1


def test_it_is_never_loaded_while_dynamo_traces(tmp_path):
    register_loader("deepgemm", lambda: pytest.fail("loaded"))
    monkey = torch.compiler.is_dynamo_compiling
    torch.compiler.is_dynamo_compiling = lambda: True
    try:
        with pytest.raises(AssertionError, match="while Dynamo traces"):
            load_kernel("deepgemm")
    finally:
        torch.compiler.is_dynamo_compiling = monkey


def test_megamoe_needs_blackwell(machine):
    pytest.importorskip("kernels")
    with pytest.raises(ImportError, match="SM100"):
        load_kernel("deepgemm_megamoe")
    machine.environment = BLACKWELL
    with pytest.raises(ImportError, match="no source offers it"):
        load_kernel("deepgemm_megamoe")


@pytest.mark.parametrize(("name", "loader"), [("deep_gemm", lambda: None), ("deepgemm", "module")])
def test_loaders_are_checked(name, loader):
    with pytest.raises(RegistrationError):
        register_loader(name, loader)
