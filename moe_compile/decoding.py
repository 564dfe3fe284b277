"""The decode stage of generation: `backend("grouped_mm", decode="batched_mm")`.

transformers switches a model from grouped_mm to batched_mm around the decoding loop of `generate`, on a GPU, and back
afterwards. The same context marks the stage here. Compiled code is guarded by the mark, so that prefill and decoding
each have their own and nothing is compiled again when they alternate.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

SWITCHED_FROM = "grouped_mm"
"""The experts backend that `decode` replaces, as transformers does; any other keeps running."""


class _Stage(threading.local):
    """Whether the thread is decoding: another thread may be in its prefill."""

    decoding = False


STAGE = _Stage()


@contextlib.contextmanager
def decoding() -> Iterator[None]:
    """Marks the decode stage; for generation loops that are not `generate` of transformers."""
    before = STAGE.decoding
    STAGE.decoding = True
    try:
        yield
    finally:
        STAGE.decoding = before


def switches_on(device_type: str) -> bool:
    """Whether the decode stage switches on a kind of device: on CPU grouped_mm is the better one throughout."""
    return device_type == "cuda"


def capture_generation(module: ModuleType) -> None:
    """Lets the context in which transformers decodes mark the stage; wraps nothing twice."""
    mixin = getattr(module, "GenerationMixin", None)
    original = getattr(mixin, "_optimize_model_for_decode", None)  # transformers 5.0 has none yet
    if original is None or hasattr(original, "_moe_compile_previous"):
        return

    @functools.wraps(original)
    @contextlib.contextmanager
    def _optimize_model_for_decode(self: Any) -> Iterator[None]:
        with decoding(), original(self):
            yield

    _optimize_model_for_decode._moe_compile_previous = original  # type: ignore[attr-defined]
    mixin._optimize_model_for_decode = _optimize_model_for_decode  # type: ignore[union-attr]
