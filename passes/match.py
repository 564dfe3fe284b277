"""What a recogniser answers: a block it has proven, or the reason why not."""

from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from moe_compile.spec import ExpertsSpec


@dataclass(frozen=True)
class Replacement:
    """How a match is written into its graph. Nothing here is changed by recognising.

    Attributes:
        graph_module: the module whose graph holds the block: the root, or a subgraph of it.
        canonical: ATen and canonical operators, with one placeholder per input and a tuple of one output.
        inputs: the nodes that the placeholders stand for.
        outputs: the nodes whose value after the block is the output. More than one when an accumulator was written in
            place: the buffer, and what each in-place operation returned.
        last: the last node of the block; the canonical operators go after it.
        region: the block's nodes, in graph order. Those that nothing outside reads are erased.
    """

    graph_module: GraphModule
    canonical: Graph
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    last: Node
    region: tuple[Node, ...]


@dataclass(frozen=True)
class Match:
    """An experts block that was proven to compute what the canonical ops compute.

    Attributes:
        form: the spelling that was found ("grouped_mm", "batched_mm", "expert_loop").
        path: the module path, such as "model.layers.0.mlp"; "" if the graph does not say.
        source: "file.py:123" of the block's output, None if the graph does not say.
        spec: layout and arithmetic.
        num_tokens: T, a number or a symbol.
        replacement: what to write, and where.
    """

    form: str
    path: str
    source: str | None
    spec: ExpertsSpec
    num_tokens: int | torch.SymInt
    replacement: Replacement = field(repr=False, compare=False)


@dataclass(frozen=True)
class Rejection:
    """Something that looks like an experts block and was left as it is.

    Attributes:
        form: the spelling it looks like.
        path: the module path, "" if the graph does not say.
        reason: why it was not proven, naming the operation.
        node: name of the node in the graph that stood against it.
        source: "file.py:123" of that node, None if the graph does not say.
    """

    form: str
    path: str
    reason: str
    node: str
    source: str | None


class NotProvenError(Exception):
    """Raised inside a recogniser when a proof fails; never leaves the passes.

    Args:
        reason: a sentence fragment that names the operation.
        node: where, in the normal form or in the graph itself.
    """

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
