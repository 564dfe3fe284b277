"""What kernels of other projects need: every branch on described machines, and the description of made-up ones."""

import sys
import types
from dataclasses import replace

import pytest
from external_kernels import BLACKWELL, HOPPER

from moe_compile.external import describe_environment, external_kernels
from moe_compile.kernels.external import environment as environment_module
from moe_compile.kernels.external.environment import Environment, Toolkit, find_toolkit, parse_local_kernels
from moe_compile.kernels.external.requirements import KERNELS, missing_requirements, parse_version, sources


def toolkit(**changes):
    return replace(HOPPER.toolkit, **changes)


def without(distribution, environment=HOPPER):
    kept = {name: version for name, version in environment.distributions.items() if name != distribution}
    return replace(environment, distributions=kept)


def with_version(distribution, version):
    return replace(HOPPER, distributions={**HOPPER.distributions, distribution: version})


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("deepgemm", HOPPER),
        ("deepgemm", replace(HOPPER, toolkit=toolkit(version=(12, 3)))),
        ("deepgemm", replace(HOPPER, toolkit=toolkit(version=(13, 0)))),
        ("deepgemm", BLACKWELL),
        ("deepgemm", replace(without("kernels"), modules=frozenset({"deep_gemm"}))),
        ("deepgemm", replace(without("kernels"), loaders=frozenset({"deepgemm"}))),
        ("deepgemm_megamoe", BLACKWELL),
        ("sonicmoe", HOPPER),
        ("sonicmoe", replace(HOPPER, toolkit=None)),
        ("sonicmoe", replace(HOPPER, capability=(12, 0))),
        ("sonicmoe", replace(with_version("nvidia-cutlass-dsl", "4.4.2"), modules=frozenset({"sonicmoe"}))),
        ("sonicmoe", replace(HOPPER, distributions={}, loaders=frozenset({"sonicmoe"}))),
        ("deepgemm", replace(HOPPER, local_kernels={"nonsense": None}, loaders=frozenset({"deepgemm"}))),
    ],
)
def test_nothing_is_missing(name, environment):
    assert missing_requirements(name, environment) == ()


@pytest.mark.parametrize(
    ("name", "environment", "words"),
    [
        ("deepgemm", Environment(modules=frozenset({"deep_gemm"})), ["deepgemm needs a CUDA device"]),
        ("deepgemm", replace(HOPPER, capability=(8, 0)), ["SM90", "SM100", "this device's is 8.0"]),
        ("deepgemm", replace(HOPPER, capability=(12, 0)), ["SM100", "this device's is 12.0"]),
        ("deepgemm_megamoe", HOPPER, ["SM100", "this device's is 9.0"]),
        ("sonicmoe", replace(HOPPER, capability=(8, 9)), ["9.0 or higher", "this device's is 8.9"]),
        ("deepgemm", without("kernels"), ["`kernels`", "pip install kernels", "sgl-deep-gemm"]),
        ("sonicmoe", without("kernels"), ["`kernels`", "pip install kernels", "sonic-moe"]),
        ("sonicmoe", without("nvidia-cutlass-dsl"), ["nvidia-cutlass-dsl >= 4.6.0", "not installed", "pip install"]),
        ("sonicmoe", without("apache-tvm-ffi"), ["apache-tvm-ffi >= 0.1.10", "not installed"]),
        ("sonicmoe", with_version("nvidia-cutlass-dsl", "4.5.9"), [">= 4.6.0", "4.5.9 is installed"]),
        ("sonicmoe", with_version("apache-tvm-ffi", "0.1.9"), [">= 0.1.10", "0.1.9 is installed"]),
        (
            "sonicmoe",
            replace(with_version("nvidia-cutlass-dsl", "4.3.0"), modules=frozenset({"sonicmoe"})),
            [">= 4.4.2", "4.3.0 is installed"],
        ),
        (
            "sonicmoe",
            replace(
                with_version("nvidia-cutlass-dsl", "4.4.2"),
                modules=frozenset({"sonicmoe"}),
                local_kernels={"kernels-community/sonic-moe": "/here"},
            ),
            [">= 4.6.0", "4.4.2 is installed"],
        ),
        ("deepgemm", replace(HOPPER, local_kernels={"nonsense": None}), ["LOCAL_KERNELS", "'nonsense'"]),
        ("deepgemm", replace(HOPPER, toolkit=None), ["nvcc 12.3", "CUDA_HOME, CUDA_PATH, PATH", "/usr/local/cuda"]),
        ("deepgemm", replace(HOPPER, toolkit=toolkit(has_nvcc=False, version=None)), ["runtime-only", "/opt/cuda"]),
        ("deepgemm", replace(HOPPER, toolkit=toolkit(version=None)), ["cannot be read", "CUDA_HOME"]),
        ("deepgemm", replace(HOPPER, toolkit=toolkit(version=(12, 2))), ["nvcc 12.3", "is 12.2", "found by CUDA_HOME"]),
        ("deepgemm", replace(BLACKWELL, toolkit=toolkit(version=(12, 8))), ["nvcc 12.9", "is 12.8"]),
        ("deepgemm_megamoe", replace(BLACKWELL, toolkit=toolkit(version=(12, 8))), ["nvcc 12.9", "is 12.8"]),
    ],
)
def test_what_is_missing_is_named_with_how_to_get_it(name, environment, words):
    (found,) = missing_requirements(name, environment)
    for word in words:
        assert word in found


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (Environment(), ()),
        (HOPPER, ("kernels-community/deep-gemm version 2, by kernels 0.17.2",)),
        (
            replace(
                HOPPER,
                modules=frozenset({"deep_gemm"}),
                loaders=frozenset({"deepgemm"}),
                distributions={**HOPPER.distributions, "sgl-deep-gemm": "0.1.4"},
            ),
            (
                "a registered loader",
                "kernels-community/deep-gemm version 2, by kernels 0.17.2",
                "the installed sgl-deep-gemm 0.1.4",
            ),
        ),
        (replace(without("kernels"), modules=frozenset({"deep_gemm"})), ("the installed deep_gemm",)),
        (
            replace(HOPPER, offline=True),
            ("kernels-community/deep-gemm version 2 from its cache alone (HF_HUB_OFFLINE), by kernels 0.17.2",),
        ),
        (
            replace(HOPPER, offline=True, local_kernels={"kernels-community/deep-gemm": "/here"}),
            ("kernels-community/deep-gemm in /here (LOCAL_KERNELS), by kernels 0.17.2",),
        ),
    ],
)
def test_where_a_kernel_would_be_looked_for(environment, expected):
    assert sources("deepgemm", environment) == expected


def test_all_that_is_missing_is_named():
    poor = replace(HOPPER, capability=(8, 0), distributions={}, toolkit=None)
    assert len(missing_requirements("sonicmoe", poor)) == 3


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("4.4.2.post1", (4, 4, 2)),
        ("0.1.15.post2", (0, 1, 15)),
        ("4.6.0rc1", (4, 6, 0)),
        ("1.0+cu130", (1, 0)),
        ("x", ()),
    ],
)
def test_versions(text, numbers):
    assert parse_version(text) == numbers
    assert parse_version("0.1.10") > parse_version("0.1.9")


def make_toolkit(folder, *, nvcc=True, version_json=None, version_txt=None, header=None, prints=None):
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    if nvcc:
        script = f"#!/bin/sh\necho '{prints}'\n" if prints else "#!/bin/sh\nexit 1\n"
        (folder / "bin" / "nvcc").write_text(script)
        (folder / "bin" / "nvcc").chmod(0o755)
    for name, text in (("version.json", version_json), ("version.txt", version_txt), ("include/cuda.h", header)):
        if text is not None:
            (folder / name).write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"version_json": '{"cuda": {"version": "12.8.1"}, "cuda_nvcc": {"version": "12.9.86"}}'}, (12, 9)),
        ({"version_json": '{"cuda": {"version": "12.8.1"}}'}, (12, 8)),
        ({"version_json": "{", "version_txt": "CUDA Version 12.3.103"}, (12, 3)),
        ({"header": "#pragma once\n#define CUDA_VERSION 12090\n"}, (12, 9)),
        ({"prints": "Cuda compilation tools, release 13.0, V13.0.48"}, (13, 0)),
        ({}, None),
        ({"nvcc": False, "header": "#define CUDA_VERSION 12090"}, None),
    ],
)
def test_the_version_of_a_toolkit(tmp_path, files, version):
    home = make_toolkit(tmp_path / "cuda", **files)
    found = find_toolkit({"CUDA_HOME": home}, default="/nowhere")
    assert found == Toolkit(home, "CUDA_HOME", files.get("nvcc", True), version)


def test_where_a_toolkit_is_looked_for(tmp_path):
    homes = {name: make_toolkit(tmp_path / name) for name in ("home", "path", "on_path", "default")}
    variables = {"CUDA_HOME": homes["home"], "CUDA_PATH": homes["path"], "PATH": homes["on_path"] + "/bin"}
    for name in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        assert find_toolkit(variables, default=homes["default"]).found_by == name
        variables[name] = None
    assert find_toolkit(variables, default=homes["default"]).home == homes["default"]
    assert find_toolkit(variables, default=str(tmp_path / "missing")) is None


def test_what_was_named_is_used_even_if_it_is_not_whole(tmp_path):
    runtime, whole = make_toolkit(tmp_path / "runtime", nvcc=False), make_toolkit(tmp_path / "whole")
    found = find_toolkit({"CUDA_HOME": runtime, "PATH": whole + "/bin"}, default="/nowhere")
    assert found.home == runtime
    assert not found.has_nvcc


def test_describing_this_machine_follows_what_changes(tmp_path, monkeypatch):
    home = make_toolkit(tmp_path / "cuda", version_txt="CUDA Version 12.5.0")
    monkeypatch.setenv("CUDA_HOME", home)
    assert describe_environment().toolkit.version == (12, 5)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "sonicmoe" not in describe_environment().modules
    (tmp_path / "sonicmoe.py").write_text("")
    monkeypatch.setattr(
        environment_module, "_stamp", lambda folder, stamp=environment_module._stamp: (*stamp(folder), 1)
    )
    assert "sonicmoe" in describe_environment().modules


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, {}), ("a/b=/c", {"a/b": "/c"}), ("a/b=/c:d/e=/f=g", {"a/b": "/c", "d/e": "/f=g"}), ("", {"": None})],
)
def test_local_kernels_are_read_as_the_package_reads_them(text, expected, monkeypatch):
    assert parse_local_kernels(text) == expected
    if text is not None:
        monkeypatch.setenv("LOCAL_KERNELS", text)
        assert describe_environment().local_kernels == expected


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_offline_is_what_the_hubs_client_takes_for_it(text, expected, monkeypatch):
    monkeypatch.delitem(sys.modules, "huggingface_hub.constants", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", text)
    assert describe_environment().offline is expected
    # Once it is imported, the variable changes nothing any more.
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", types.SimpleNamespace(HF_HUB_OFFLINE=not expected))
    assert describe_environment().offline is not expected


def test_the_status_of_every_kernel_is_data():
    statuses = external_kernels()
    assert [status.name for status in statuses] == list(KERNELS)
    for status in statuses:
        assert status.missing == missing_requirements(status.name, describe_environment())
