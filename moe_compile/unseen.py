"""Experts blocks that never reach the compiler, told from where Dynamo stops.

Dynamo stops in a method of a module that holds experts
  ├─ and leaves the frame to Python, or refuses fullgraph=True     unseen
  ├─ and splits the frame; the rest is traced, still no block      unseen
  └─ and a block was found on either side of the split             seen: the split was about something else
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import CodeType

from torch import nn

from moe_compile.capture.structure import has_line, holds_experts
from moe_compile.capture.tracing import Attempt, Stop
from moe_compile.report import Unseen

Experts = type[nn.Module]


class UnseenExperts:
    """What is known so far about the classes of experts in whose code Dynamo stopped."""

    def __init__(self) -> None:
        self._suspected: dict[Experts, Unseen] = {}
        self._told: list[Experts] = []
        self._reached: set[Experts] = set()
        self._codes_with_blocks: set[CodeType] = set()

    def reach(self, cls: Experts) -> None:
        """Notes that a block of a class was found."""
        self._reached.add(cls)

    def reach_code(self, code: CodeType) -> None:
        """Notes that a block was found in what Dynamo traced of a frame."""
        self._codes_with_blocks.add(code)

    def after(self, attempt: Attempt, known: Iterable[nn.Module]) -> Unseen | None:
        """Learns from a frame that Dynamo is done with.

        Args:
            attempt: the frame.
            known: modules of the compiled model.

        Returns:
            What has now been shown to be out of the compiler's sight, once per block.
        """
        if not attempt.stops and not self._suspected:
            return None
        modules = _by_class(known)
        stopped = [found for found in (_where(stop, modules) for stop in attempt.stops) if found is not None]
        for cls, unseen in stopped:
            self._suspected.setdefault(cls, unseen)
        certain: Experts | None = None
        if attempt.one_graph and attempt.gave_up:
            certain = stopped[-1][0] if stopped else None
        elif attempt.gave_up or (attempt.resumes and not attempt.stops):
            certain = next((cls for cls in self._suspected if _runs(attempt.code, cls)), None)
        if certain is None or self._was_reached(certain):
            return None
        around = [cls for cls in self._suspected if not self._was_reached(cls) and _contains(modules, cls, certain)]
        certain = max(around, key=lambda cls: sum(_contains(modules, cls, other) for other in around), default=certain)
        if any(_contains(modules, told, certain) or _contains(modules, certain, told) for told in self._told):
            return None
        self._told.append(certain)
        return self._suspected[certain]

    def listing(self, paths: Mapping[nn.Module, str]) -> tuple[Unseen, ...]:
        """Every module that no block was found of, once nothing more is to come; of nested ones the outermost.

        Args:
            paths: where the modules of the compiled model are.
        """
        unseen = {cls: found for cls, found in self._suspected.items() if not self._was_reached(cls)}
        listed: dict[str, Unseen] = {}
        for path, cls in sorted((path, type(module)) for module, path in paths.items() if type(module) in unseen):
            if not any(path.startswith(f"{outer}." if outer else "") for outer in listed):
                listed[path] = replace(unseen[cls], path=path)
        return tuple(listed.values())

    def _was_reached(self, cls: Experts) -> bool:
        return cls in self._reached or any(_runs(code, cls) for code in self._codes_with_blocks)


def _by_class(modules: Iterable[nn.Module]) -> dict[Experts, list[nn.Module]]:
    found: dict[Experts, list[nn.Module]] = {}
    for module in modules:
        found.setdefault(type(module), []).append(module)
    return found


def _where(stop: Stop, modules: dict[Experts, list[nn.Module]]) -> tuple[Experts, Unseen] | None:
    """The innermost class of experts in whose code Dynamo stopped."""
    for frame in reversed(stop.stack):
        for cls, members in modules.items():
            if (
                frame.lineno is not None
                and has_line(cls, frame.filename, frame.lineno)
                and any(map(holds_experts, members))
            ):
                return cls, Unseen("", cls.__name__, stop.reason, f"{frame.filename}:{frame.lineno}")
    return None


def _runs(code: CodeType, cls: Experts) -> bool:
    return has_line(cls, code.co_filename, code.co_firstlineno)


def _contains(modules: dict[Experts, list[nn.Module]], outer: Experts, inner: Experts) -> bool:
    """Whether modules of one class hold modules of the other, or the two are one."""
    return any(type(part) is inner for module in modules.get(outer, [])[:1] for part in module.modules())
