"""Proofs that hold for equal layers: a model of 48 of them is proven once.

Two candidates are equal if their nodes call the same things in the same order, on each other and on inputs in the same
places, and the inputs agree in all that a fake tensor knows. What a proof says of one then holds for the other, node by
node. Where a block stands in its graph, and who else reads and writes there, is none of a proof's business.
"""

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from moe_compile.passes.boundary import is_assertion
from moe_compile.passes.candidates import Candidate, value_of
from moe_compile.passes.describe import ids_below, ids_differ
from moe_compile.passes.match import NotProvenError
from moe_compile.spec import ExpertsSpec


@dataclass(frozen=True)
class Proof:
    """What was found out about a candidate: all fields are empty if it is no experts block.

    Attributes:
        failure: why it was not proven, with the node of the graph that stands against it.
        form: the spelling.
        spec: layout and arithmetic.
        canonical: the block in canonical ops; see `Replacement`.
        inputs: what its placeholders stand for.
        outputs: the nodes that hold the block's output.
        origin: the node that computed it.
        reads: all that the block's nodes read from outside.
        nodes: the block's nodes.
    """

    failure: NotProvenError | None = None
    form: str = ""
    spec: ExpertsSpec | None = None
    canonical: Graph | None = None
    inputs: tuple[Node, ...] = ()
    outputs: tuple[Node, ...] = ()
    origin: Node | None = None
    reads: tuple[Node, ...] = ()
    nodes: tuple[Node, ...] = ()


class Proofs:
    """The proofs of one graph module and the graph modules in it."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[list[Node], Proof]] = {}
        self._asked: tuple[Candidate, Hashable, list[Node]] | None = None

    def find(self, candidate: Candidate) -> Proof | None:
        """The proof of an equal candidate, in terms of this one's nodes."""
        key, nodes = _fingerprint(candidate)
        if key not in self._found:
            self._asked = candidate, key, nodes
            return None
        theirs, proof = self._found[key]
        return _translated(proof, dict(zip(theirs, nodes, strict=True)))

    def keep(self, candidate: Candidate, proof: Proof) -> Proof:
        """Remembers the proof of the candidate that was asked for last."""
        assert self._asked is not None
        asked, key, nodes = self._asked
        assert asked is candidate
        self._found[key] = nodes, proof
        return proof


def _fingerprint(candidate: Candidate) -> tuple[Hashable, list[Node]]:
    """A candidate's structure, and its nodes and inputs in the order in which the structure counts them."""
    index: dict[Node, int] = {}
    for node in candidate.nodes:
        for operand in node.all_input_nodes:
            index.setdefault(operand, len(index))
        index.setdefault(node, len(index))

    def number(argument: Any) -> Hashable:
        if isinstance(argument, Node):
            return "node", index[argument]
        if isinstance(argument, tuple | list):
            return (type(argument).__name__, *map(number, argument))
        if isinstance(argument, dict):
            return tuple((key, number(value)) for key, value in argument.items())
        if isinstance(argument, slice):
            return "slice", number(argument.start), number(argument.stop), number(argument.step)
        return type(argument).__name__, repr(argument)

    inside = set(candidate.nodes)
    # The message of an assertion names symbols that are new in every layer.
    calls = tuple(
        (node.op, node.target, number(node.args[:1] if is_assertion(node) else node.args), number(node.kwargs))
        for node in candidate.nodes
    )
    inputs = tuple((place, _metadata(value_of(node))) for node, place in index.items() if node not in inside)
    below = ids_below(candidate.root)
    known = (
        ids_differ(candidate.root, candidate.top_k),
        str(below),
        str(candidate.top_k),
        str(candidate.num_tokens),
        candidate.autocast,
    )
    return (candidate.form, index.get(candidate.root), known, calls, inputs), list(index)


def _metadata(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return type(value).__name__, str(value)
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    exact = tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)
    return exact, value.dtype, value.device, type(value).__name__, id(getattr(value, "fake_mode", None))


def _translated(proof: Proof, moved: dict[Node, Node]) -> Proof:
    failure = proof.failure
    if failure is not None:
        node = failure.node
        return Proof(failure=NotProvenError(failure.reason, None if node is None else moved.get(node, node)))
    values = {f.name: getattr(proof, f.name) for f in fields(proof)}
    return replace(proof, **tree_map_only(Node, moved.__getitem__, values))
