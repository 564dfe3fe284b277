"""Rewrites one graph: the policy that the passes ask, and what became of every block."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.fx import GraphModule

from moe_compile.decision import OnReject, decide
from moe_compile.errors import KernelLoadError, RequirementError
from moe_compile.experts_backends import EXPERTS_BACKENDS
from moe_compile.journey import Journey
from moe_compile.passes import Lowering, run_passes
from moe_compile.passes.blocks import CanonicalBlock, Lowered
from moe_compile.passes.branch_by_tokens import Steps
from moe_compile.passes.match import Match, Rejection
from moe_compile.passes.match_gate import describe_canonical
from moe_compile.report import Block, GraphSummary, Rejected
from moe_compile.rules import Situation
from moe_compile.selection import Selection

log = logging.getLogger("moe_compile")


def unique_tag(path: str, taken: dict[str, Block]) -> str:
    """A name for one more block at a module path: a module may run several times in one graph."""
    count = sum(block.path == path for block in taken.values())
    return f"{path}#{count}"


def token_count(tokens: int | torch.SymInt | None) -> int | str:
    """T for reports: the number, or the symbol's name."""
    return tokens if isinstance(tokens, int) else "?" if tokens is None else str(tokens)


def count_operations(gm: GraphModule) -> int:
    """Operations in a graph and its subgraphs."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    return sum(node.op.startswith("call_") for graph in graphs for node in graph.nodes)


@dataclass
class Rewriter:
    """The policy of one graph.

    Attributes:
        selection: what the user asked for.
        on_reject: what happens where a rule forbids it.
        situation: what surrounds the blocks of this graph.
        warn: told that something else runs than what was asked for.
        blocks: tag -> block; the captured ones at first, all of them in the end.
        rejected: what looks like an experts block and was left alone.
    """

    selection: Selection
    on_reject: OnReject
    situation: Situation
    warn: Callable[[str], None]
    blocks: dict[str, Block] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    _branches: dict[str, tuple[str, str]] = field(default_factory=dict)  # tag of a branch -> tag of its block, name

    def rewrite(self, gm: GraphModule) -> GraphSummary:
        """Rewrites a graph module in place."""
        before, journey = count_operations(gm), Journey()
        run_passes(gm, self, journey.note)
        rewritten = sum(not block.keeps_own_code for block in self.blocks.values())
        summary = GraphSummary(before, count_operations(gm), rewritten)
        journey.tell(self.blocks.values(), self.rejected, summary)
        return summary

    def skips(self, path: str) -> bool:
        kept = [block.path for block in self.blocks.values() if block.path and block.keeps_own_code]
        return any(path == module or path.startswith(f"{module}.") for module in kept)

    def admits(self, match: Match) -> str | None:
        where = match.path or match.source or ""
        decision = decide(
            self.selection.name_for(match.path, ""),
            match.spec,
            replace(self.situation, own_code_traces_whole=True),
            tokens=match.num_tokens,
            where=where,
            on_reject=self.on_reject,
            warn=self.warn,
        )
        tag = unique_tag(match.path, self.blocks)
        self.blocks[tag] = Block(
            path=match.path,
            form=match.form,
            found="graph",
            source=match.source,
            spec=match.spec,
            tokens=token_count(match.num_tokens),
            chosen=decision.name,
            reasons=decision.reasons,
            ladder=decision.ladder,
            rungs=decision.rungs,
        )
        return None if decision.keeps_own_code else tag

    def note_rejection(self, rejection: Rejection) -> None:
        log.debug("left %s alone: %s", rejection.path or rejection.source, rejection.reason)
        self.rejected.append(Rejected(rejection.path, rejection.form, rejection.reason, rejection.source))

    def steps(self, block: CanonicalBlock) -> Steps:
        record = self.blocks.get(_tag(block)) or self._note_written(block)
        names = {f"{_tag(block)}@{index}": rung for index, rung in enumerate(record.rungs)}
        self._branches |= {tag: (_tag(block), rung.name) for tag, rung in names.items()}
        return [(rung.last, tag) for tag, rung in names.items()]

    def note_unbranched(self, block: CanonicalBlock) -> None:
        record = self.blocks[_tag(block)]
        self.blocks[_tag(block)] = replace(record, chosen=record.rungs[-1].name, rungs=())

    @property
    def opaque_branches(self) -> bool:
        return self.situation.settings.cuda_graphs

    def lowering(self, block: CanonicalBlock) -> Lowering | None:
        if block.tag in self._branches:
            tag, chosen = self._branches[block.tag]
            return self._lowering(chosen, self.blocks[tag])
        record = self.blocks.get(_tag(block)) or self._note_written(block)
        return self._lowering(record.chosen, record) if record.chosen is not None else None

    def _lowering(self, name: str, record: Block) -> Lowering | None:
        """A backend's lowering; the next legal one's where its kernel cannot be loaded, which shows only now."""
        lower = EXPERTS_BACKENDS[name].lower
        names = list(EXPERTS_BACKENDS)
        others = [n for n in names if n not in record.reasons and n != name and EXPERTS_BACKENDS[n].lower is not None]
        if lower is None or not others or (self.on_reject != "fallback" and record.ladder is None):
            return lower

        def lower_or_next(gm: GraphModule, block: CanonicalBlock) -> Lowered:
            try:
                return lower(gm, block)
            except (RequirementError, KernelLoadError) as error:
                reasons = {**record.reasons, name: f"{error.asked}: {error.found}"}
            self.warn(f"experts={name!r}: {reasons[name]}. {others[0]} runs instead.")
            following = self._lowering(others[0], replace(record, reasons=reasons))
            assert following is not None
            outcome = following(gm, block)
            return Lowered(outcome.name, {**outcome.reasons, name: reasons[name]})

        return lower_or_next

    def _note_written(self, block: CanonicalBlock) -> Block:
        """Decides on canonical ops that a user wrote."""
        spec, tokens = describe_canonical(block), block.num_tokens()
        decision = decide(
            self.selection.name_for("", ""),
            spec,
            replace(self.situation, own_code_traces_whole=True),
            tokens=tokens,
            where="a canonical block",
            on_reject=self.on_reject,
            warn=self.warn,
        )
        record = Block(
            path="",
            form="canonical ops",
            found="graph",
            source=None,
            spec=spec,
            tokens=token_count(tokens),
            chosen=decision.name,
            reasons=decision.reasons,
            ladder=decision.ladder,
            rungs=decision.rungs,
        )
        self.blocks[_tag(block)] = record
        return record

    def note_lowered(self, block: CanonicalBlock, outcome: Lowered) -> None:
        tag = self._branches[block.tag][0] if block.tag in self._branches else _tag(block)
        record = self.blocks[tag]
        reasons = {**record.reasons, **outcome.reasons}
        chosen = record.chosen if record.rungs else outcome.name
        self.blocks[tag] = replace(record, chosen=chosen, reasons=reasons)


def _tag(block: CanonicalBlock) -> str:
    return block.tag or block.dispatch.name
