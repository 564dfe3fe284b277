"""The journey of one graph through the passes, told to `TORCH_LOGS`, to tlparse and to `moe_compile.inspect`.

    TORCH_LOGS="moe_compile"     one line per compile
    TORCH_LOGS="+moe_compile"    and the graph after each pass that changed it, and what was left alone
    TORCH_TRACE=folder           the same as artifacts of torch's structured trace, which tlparse reads

Nothing is written down while nobody listens.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch._logging._internal import trace_log, trace_structured
from torch.fx import GraphModule

from moe_compile.capture.tracing import clean_path
from moe_compile.inspection.source import CAPTURED, count_targets, marked, module_paths, to_source
from moe_compile.report import Block, GraphSummary, Rejected, plain

log = logging.getLogger("moe_compile")

ARTIFACT = "moe_compile/"


@dataclass(frozen=True)
class Stage:
    """A graph at one moment.

    Attributes:
        name: "before", or a pass's.
        source: as a Python program.
        counts: operation -> how often it is called.
        paths: node -> paths of the modules that it stems from.
    """

    name: str
    source: str
    counts: dict[str, int]
    paths: dict[str, list[str]]


@dataclass
class Journey:
    """Records a graph before the passes and after each one that changed it."""

    stages: list[Stage] = field(default_factory=list)

    @staticmethod
    def has_listeners() -> bool:
        """Whether the structured trace or the debug log is on."""
        return bool(trace_log.handlers) or log.isEnabledFor(logging.DEBUG)

    def note(self, name: str, gm: GraphModule) -> None:
        """Takes down the graph as it is now; called before the passes ("before") and after each of them."""
        if not self.has_listeners():
            return
        file = f"{name}.py"
        source = to_source(gm, _TITLES.get(name, f"The graph after the pass {name}."), file)
        previous = self.stages[-1].source if self.stages else ""
        if _code(source) != _code(previous):
            self.stages.append(Stage(name, source, count_targets(gm), module_paths(gm)))

    def tell(self, blocks: Iterable[Block], rejected: Iterable[Rejected], summary: GraphSummary) -> None:
        """Tells what happened, once it is known which lines belong to experts blocks."""
        blocks = tuple(blocks)
        words = sorted({str(block.chosen) for block in blocks if not block.keeps_own_code})
        log.info(
            "%d operations became %d, %d of %d experts blocks were rewritten to %s",
            summary.nodes_before,
            summary.nodes_after,
            summary.blocks,
            len(blocks),
            ", ".join(words) or "nothing",
        )
        if not self.stages:
            return
        for stage in self.stages:
            text = marked(stage.source, _blocks_of(stage, blocks))
            log.debug("the graph, %s\n%s", stage.name, text)
            self._artifact(f"{stage.name}.py", text)
        report: dict[str, Any] = {
            "summary": plain(summary),
            "blocks": plain(blocks),
            "rejected": plain(tuple(rejected)),
            "stages": [{"name": stage.name, "operations": stage.counts} for stage in self.stages],
        }
        self._artifact("report.json", json.dumps(report, indent=1))

    @staticmethod
    def _artifact(name: str, text: str) -> None:
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": ARTIFACT + name, "encoding": "string"},
            payload_fn=lambda: text,
        )


_TITLES = {"before": "The graph as Dynamo traced it."}


def _code(source: str) -> str:
    """A program without its docstring, which names the stage."""
    return source.rpartition('"""')[2]


def _blocks_of(stage: Stage, blocks: tuple[Block, ...]) -> dict[str, str]:
    """Node -> path of the experts block that it belongs to."""
    found = {}
    for node, paths in stage.paths.items():
        cleaned = [clean_path(path) if "]" in path else path for path in paths]
        for block in blocks:
            if block.path and block.path in cleaned:
                found[node] = block.path
        if CAPTURED in paths and not any(block.path for block in blocks):
            found[node] = "(the whole model)"
    return found
