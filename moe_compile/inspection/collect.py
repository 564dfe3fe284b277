"""Listens to torch's structured trace, where our own artifacts and Inductor's generated code pass by."""

import json
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

from moe_compile.journey import ARTIFACT

# Records of other compilers' stages that are kept as they are: name in the trace -> name of the file.
_KEPT = {
    "aot_forward_graph": "aot_forward.txt",
    "aot_backward_graph": "aot_backward.txt",
    "aot_inference_graph": "aot_inference.txt",
}


@dataclass
class GraphDump:
    """What was heard of one graph.

    Attributes:
        compile_id: Dynamo's name for it, such as "0/0".
        stages: name of a file -> the graph as a Python program, "before.py" first, then one per pass.
        generated: name of a file -> code that Inductor generated, or a graph of AOTAutograd.
        report: blocks, operations, and what was left alone.
    """

    compile_id: str
    stages: dict[str, str] = field(default_factory=dict)
    generated: dict[str, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


class Collector(logging.Handler):
    """A handler of the structured trace that keeps what belongs to our graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[GraphDump] = []
        self._lock_of_graphs = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Takes one record; never raises into the compiler that it listens to."""
        metadata, payload = getattr(record, "metadata", {}), getattr(record, "payload", None)
        if not isinstance(payload, str):
            return
        try:
            with self._lock_of_graphs:
                self._take(metadata, payload)
        except Exception:
            self.handleError(record)

    def _take(self, metadata: dict[str, Any], payload: str) -> None:
        compile_id = f"{metadata.get('frame_id', '-')}/{metadata.get('frame_compile_id', '-')}"
        name = (metadata.get("artifact") or {}).get("name", "")
        if name == f"{ARTIFACT}before.py":
            self.graphs.append(GraphDump(compile_id))
        # The latest of its name: a frame may be compiled again.
        graph = next((graph for graph in reversed(self.graphs) if graph.compile_id == compile_id), None)
        if graph is None:
            return
        if name == f"{ARTIFACT}report.json":
            graph.report = json.loads(payload)
        elif name.startswith(ARTIFACT):
            graph.stages[name.removeprefix(ARTIFACT)] = payload
        elif "inductor_output_code" in metadata:
            number = sum(file.startswith("inductor") for file in graph.generated)
            graph.generated[f"inductor_{number}.py"] = payload
        for kept, file in _KEPT.items():
            if kept in metadata:
                graph.generated[file] = payload
