"""The FX passes, in the order in which they run.

Each pass is a function over a `GraphModule` and a `Policy`, which knows what the user asked for. The passes decide
nothing themselves: they find, ask, and rewrite.
"""

from collections.abc import Callable
from typing import Protocol

from torch.fx import GraphModule

from moe_compile.passes.blocks import CanonicalBlock, Lowered, find_canonical_blocks
from moe_compile.passes.branch_by_tokens import Steps, branch_by_tokens
from moe_compile.passes.match import Match, Rejection
from moe_compile.passes.recognize import apply, recognize

Lowering = Callable[[GraphModule, CanonicalBlock], Lowered]


class Policy(Protocol):
    """What the passes ask of their caller."""

    def skips(self, path: str) -> bool:
        """Whether the code of the module at this path must stay as it is."""

    def admits(self, match: Match) -> str | None:
        """The tag under which a recognised block is rewritten, None to leave it."""

    def note_rejection(self, rejection: Rejection) -> None:
        """Takes note of what looks like an experts block but was not proven to be one."""

    def steps(self, block: CanonicalBlock) -> Steps:
        """Where the branches of a block end, and their tags; empty where one backend runs it at every token count."""

    def note_unbranched(self, block: CanonicalBlock) -> None:
        """Takes note of a block that could not be split: one backend has to do for every token count."""

    @property
    def opaque_branches(self) -> bool:
        """Whether branches must be one op, because `torch.cond` would be taken out of CUDA graphs."""

    def lowering(self, block: CanonicalBlock) -> Lowering | None:
        """How to lower a canonical block; None leaves the reference ops in the graph."""

    def note_lowered(self, block: CanonicalBlock, outcome: Lowered) -> None:
        """Takes note of what runs a block now."""


def recognize_experts(gm: GraphModule, policy: Policy) -> None:
    """Rewrites the experts blocks that are spelled out in the graph to canonical ops."""
    matches, rejections = recognize(gm, policy.skips)
    for rejection in rejections:
        policy.note_rejection(rejection)
    admitted = [(match, tag) for match in matches if (tag := policy.admits(match)) is not None]
    if admitted:
        apply(gm, admitted)


def branch_experts(gm: GraphModule, policy: Policy) -> None:
    """Splits the blocks whose backend is chosen when the graph runs into branches."""
    for block in find_canonical_blocks(gm):
        steps = policy.steps(block)
        if steps and not branch_by_tokens(block, steps, opaque=policy.opaque_branches):
            policy.note_unbranched(block)
        elif steps:
            block.graph_module.graph.lint()
            block.graph_module.recompile()


def lower_experts(gm: GraphModule, policy: Policy) -> None:
    """Replaces each block's canonical ops by the kernels of the backend that was chosen for it."""
    blocks = find_canonical_blocks(gm)
    for block in blocks:
        lowering = policy.lowering(block)
        if lowering is not None:
            policy.note_lowered(block, lowering(gm, block))
    for module in {id(block.graph_module): block.graph_module for block in blocks}.values():
        module.graph.lint()
        module.recompile()


PASSES: tuple[tuple[Callable[[GraphModule, Policy], None], str], ...] = (
    (recognize_experts, "first: lowering knows canonical ops alone, whoever put them there"),
    (branch_experts, "before lowering: every branch is lowered by its own backend"),
    (lower_experts, "last: nothing after it has to know what an experts block is"),
)


def run_passes(gm: GraphModule, policy: Policy, note: Callable[[str, GraphModule], None] | None = None) -> None:
    """Runs all passes on a graph module, in place.

    Args:
        gm: the graph module.
        policy: what the user asked for.
        note: told "before" and then the name of each pass, with the graph as it then is.
    """
    if note is not None:
        note("before", gm)
    for run, _ in PASSES:
        run(gm, policy)
        if note is not None:
            note(run.__name__, gm)
