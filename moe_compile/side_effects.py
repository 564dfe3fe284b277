"""What running a model changes beside its result: buffers, random state, attributes of its modules."""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


class Attributes:
    """The attributes of a module and the modules in it, as they are now."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._saved = [(child, dict(vars(child)), _contents(vars(child))) for child in module.modules()]

    def changed(self) -> list[str]:
        """Names of the attributes that are other objects now, or containers that hold other objects."""
        names: list[str] = []
        for child, attributes, contents in self._saved:
            now = vars(child)
            names += [name for name in {**attributes, **now} if now.get(name, self) is not attributes.get(name, self)]
            names += [name for name, saved in contents.items() if not _holds(attributes[name], saved)]
        return names

    def restore(self) -> None:
        """Puts every attribute back, and what lists, dicts and sets among them hold."""
        for child, attributes, contents in self._saved:
            vars(child).clear()
            vars(child).update(attributes)
            for name, saved in contents.items():
                container = attributes[name]
                if not _holds(container, saved):
                    container.clear()
                    getattr(container, "extend" if isinstance(container, list) else "update")(saved)


def _contents(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value.copy() for name, value in attributes.items() if type(value) in (list, dict, set)}


def _holds(container: Any, saved: Any) -> bool:
    """Whether a container still holds the very same objects."""
    if isinstance(saved, dict):
        return list(container) == list(saved) and all(container[key] is saved[key] for key in saved)
    if isinstance(saved, set):
        return bool(container == saved)
    return len(container) == len(saved) and all(a is b for a, b in zip(container, saved, strict=True))


@contextlib.contextmanager
def undone(model: Any) -> Iterator[None]:
    """Puts a model's buffers and attributes and the random number generators back as they were."""
    attributes = Attributes(model) if isinstance(model, torch.nn.Module) else None
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    copies = [buffer.clone() for buffer in buffers]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(drawn)
            if attributes is not None:
                attributes.restore()
            for buffer, copy in zip(buffers, copies, strict=True):
                _put_back(buffer, copy)


def _put_back(buffer: torch.Tensor, copy: torch.Tensor) -> None:
    """Puts a value back, but only where it changed: a graph that is yet to go backward may have saved the buffer."""
    if buffer.is_meta or torch.equal(buffer, copy):
        return
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        buffer.copy_(copy)
