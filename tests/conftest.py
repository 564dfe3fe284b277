"""Shared by all tests: a fresh Dynamo for each, and the devices that are there."""

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _no_tables_of_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_COMPILE_CACHE_DIR", str(tmp_path / "moe_compile_cache"))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("cuda") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
