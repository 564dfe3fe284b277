"""Runs a model without a trace left."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def undone(model: Any) -> Iterator[None]:
    """Puts a model's buffers and the random number generators back as they were."""
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    copies = [buffer.clone() for buffer in buffers]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, copy in zip(buffers, copies, strict=True):
                    buffer.copy_(copy)
