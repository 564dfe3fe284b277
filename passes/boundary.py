"""What a rewrite does to the rest of the graph, and whether that is safe.

    acc = torch.zeros_like(h)                     the buffer, part of the block
    acc.index_add_(0, tok_0, ...)   }
    ...                             } in place    erased
    acc.index_add_(0, tok_7, ...)   }             <- last: the canonical ops go here
    out = acc.view(b, s, d)                       reads their result instead of `acc`

The proof speaks of values; a graph has memory, too. A node of the block may go if nothing reads it any more, a write
may go if nothing reads what it wrote, and nobody else may write, between the block's first node and its last, to what
the block reads.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from moe_compile.passes.candidates import mutated_arguments, name_of, storage_of, value_of
from moe_compile.passes.match import NotProvenError

Contexts = Mapping[Node, tuple[object, tuple[tuple[object, ...], ...]]]
_CONTEXT_SWITCHES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


@dataclass(frozen=True)
class Boundary:
    """A block's nodes among all others.

    Attributes:
        region: the block's nodes, in graph order.
        contexts: see `find_contexts`.
    """

    region: Sequence[Node]
    contexts: Contexts = field(default_factory=dict)

    def span(self) -> Iterator[Node]:
        """All nodes of the graph from the block's first to its last; memory of the block's own is not known before."""
        node = self.region[0]
        while node is not self.region[-1]:
            yield node
            node = node.next
        yield node

    def written(self) -> dict[StorageWeakRef, list[Node]]:
        """Memory that the block writes to -> the nodes that do."""
        found: dict[StorageWeakRef, list[Node]] = {}
        for node in self.region:
            for target in mutated_arguments(node):
                storage = storage_of(target)
                if storage is None:
                    raise NotProvenError(f"{node.name} writes to something that is no plain tensor", node)
                found.setdefault(storage, []).append(node)
        return found

    def last(self, origin: Node, outputs: Iterable[Node]) -> Node:
        """Where the output is complete: the node that computed it, or the last that wrote to its memory."""
        written = self.written()
        writers = [w for node in outputs for w in written.get(storage_of(node), ())]  # type: ignore[arg-type]
        return max([origin, *writers])

    def dead_after(self, outputs: Sequence[Node], inputs: Iterable[Node], last: Node) -> set[Node]:
        """The nodes of the block that nothing needs once the canonical ops stand behind `last`.

        Raises:
            NotProvenError: if something else reads what only the block's own writes would have put there.
        """
        inside, needed = set(self.region), set(inputs)
        writers = {writer for nodes in self.written().values() for writer in nodes}
        dead: set[Node] = set()
        for node in reversed(self.region):
            after = node > last
            users = [u for u in node.users if u not in dead and not (node in outputs and u > last)]
            unused_before = not node.users and node not in writers and not is_assertion(node)
            if not users and node not in needed and not after and not unused_before:
                dead.add(node)
        self._require_unread(inside, dead, outputs, last)
        return dead

    def _require_unread(self, inside: set[Node], dead: set[Node], outputs: Sequence[Node], last: Node) -> None:
        written = {storage for storage, nodes in self.written().items() if any(node in dead for node in nodes)}
        for node in self.span():
            if storage_of(node) not in written:
                continue
            if node not in inside:
                # Later views show the new output, as they are made of it.
                if node < last:
                    raise NotProvenError(f"{node.name} shares memory with what the experts write to", node)
                continue
            for user in node.users:
                replaced = node in outputs and user > last
                if user not in dead and not replaced:
                    raise NotProvenError(f"{user.name} reads {node.name}, which the experts write to", user)

    def require_undisturbed(self, inputs: Iterable[Node], last: Node) -> None:
        """Nobody else writes to what the block reads while it runs, and no context changes.

        Raises:
            NotProvenError: if somebody does, or if the block's nodes run under different grad modes or autocast.
        """
        inside, shared = set(self.region), {storage_of(node) for node in inputs} - {None}
        read: set[StorageWeakRef | None] = set()
        for node in self.span():
            if node in inside:
                read |= {storage_of(operand) for operand in node.all_input_nodes} & shared
            else:
                for target in mutated_arguments(node):
                    if storage_of(target) in read:
                        raise NotProvenError(f"{node.name} writes to {target.name} while the experts run", node)
            if node is last:
                break
        self._require_one_context(last)

    def _require_one_context(self, last: Node) -> None:
        for node in self.region if self.contexts else ():
            if node > last:
                break
            if _is_mask(node):  # the same under any grad mode and any autocast
                continue
            if self.contexts[node][1] != self.contexts[last][1]:
                raise NotProvenError(f"{node.name} runs under another autocast than {last.name}", node)
            if self.contexts[node] != self.contexts[last]:
                raise NotProvenError(f"{node.name} runs in another grad mode than {last.name}", node)


def _is_mask(node: Node) -> bool:
    value = value_of(node)
    values = value if isinstance(value, tuple | list) else [value]
    return all(isinstance(v, torch.Tensor) and not (v.is_floating_point() or v.is_complex()) for v in values)


def find_contexts(graph: Graph) -> Contexts:
    """Grad mode and autocast settings, outermost first, at every node; empty if the graph itself sets neither."""
    switches = [node for node in graph.nodes if name_of(node) in _CONTEXT_SWITCHES]
    if not switches:
        return {}
    # Contexts are left again, so the graph ends in the grad mode in which it began.
    grad_modes = [node.args[0] for node in switches if name_of(node) == "_set_grad_enabled"]
    grad_mode = grad_modes[-1] if grad_modes else True
    settings: tuple[tuple[object, ...], ...] = ()
    states: dict[Node, tuple[object, tuple[tuple[object, ...], ...]]] = {}
    for node in graph.nodes:
        name = name_of(node)
        if name == "_set_grad_enabled":
            grad_mode = node.args[0]
        elif name == "_enter_autocast":
            settings = (*settings, tuple(node.args))
        elif name == "_exit_autocast":
            settings = settings[:-1]
        states[node] = grad_mode, settings
    return states


def without_foreign_writes(nodes: Sequence[Node]) -> list[Node]:
    """Leaves out what writes to memory from outside, such as a counter of tokens per expert, and what depends on it."""
    inside = set(nodes)
    outside = {storage_of(o) for node in nodes for o in node.all_input_nodes if o not in inside}
    return [node for node in nodes if not any(storage_of(t) in outside for t in mutated_arguments(node))]


def is_assertion(node: Node) -> bool:
    """Whether a node checks something and returns nothing."""
    return name_of(node) in ("_assert_scalar", "_assert_tensor_metadata", "_check", "sym_constrain_range_for_size")
