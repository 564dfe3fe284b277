"""What was found and what was done, as data that prints itself."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tabulate import tabulate

from moe_compile.auto import Ladder
from moe_compile.kernels.external.loading import LoadedKernel
from moe_compile.spec import ExpertsSpec

Found = Literal["captured", "graph"]

UNSEEN_REMEDY = (
    "Compile with moe_compile.compile(model, experts), or call moe_compile.prepare(model, *example_args) before "
    "torch.compile: the block then becomes part of one graph"
)


@dataclass(frozen=True)
class Block:
    """One experts block of a compiled model.

    Attributes:
        path: module path relative to the compiled model, "" if unknown.
        form: how the block is spelled: the captured class, or the recogniser's name.
        found: "captured" while the model was traced, or recognised in the "graph".
        source: `file.py:line`, None if unknown.
        spec: layout and arithmetic.
        tokens: T, an int or the symbol's name.
        chosen: name of the experts backend that runs it, None where the model's own code stays.
        reasons: experts backend -> why it is not used: its rule, or why the block was not proven.
        ladder: what `auto` chooses by token count, and on what that rests; None where another backend was asked for.
    """

    path: str
    form: str
    found: Found
    source: str | None
    spec: ExpertsSpec
    tokens: int | str
    chosen: str | None
    reasons: Mapping[str, str]
    ladder: Ladder | None = None

    @property
    def keeps_own_code(self) -> bool:
        """Whether the model's own code runs this block."""
        return self.chosen in (None, "eager")


@dataclass(frozen=True)
class Rejected:
    """Something that looks like an experts block and was left alone.

    Attributes:
        path: module path, "" if unknown.
        form: the recogniser that looked at it.
        reason: why it is not rewritten, naming the node.
        source: `file.py:line`, None if unknown.
    """

    path: str
    form: str
    reason: str
    source: str | None


@dataclass(frozen=True)
class Unseen:
    """Experts that never reached the compiler: their Python code runs uncompiled, or was split around their routing.

    Attributes:
        path: module path, "" if unknown.
        class_name: the module's class.
        reason: why Dynamo stopped in its code, in Dynamo's words.
        source: `file.py:line` where it stopped.
    """

    path: str
    class_name: str
    reason: str
    source: str


@dataclass(frozen=True)
class GraphSummary:
    """One graph that Dynamo handed over.

    Attributes:
        nodes_before: operations that Dynamo traced.
        nodes_after: operations after rewriting.
        blocks: how many experts blocks were rewritten in it.
    """

    nodes_before: int
    nodes_after: int
    blocks: int


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo split the model.

    Attributes:
        reason: Dynamo's words, the first line.
        source: `file.py:line` of the user's code, None if unknown.
    """

    reason: str
    source: str | None


@dataclass(frozen=True)
class Explanation:
    """What `explain()` found; `str()` of it is a report.

    Attributes:
        graphs: the graphs that were traced.
        graph_breaks: where the model was split, and why.
        blocks: the experts blocks.
        rejected: what looks like an experts block and was left alone.
        error: why the model does not compile, None if it does.
        kernels: kernels of other projects that were loaded for it, from where and in which version.
        unseen: experts that never reached the compiler.
    """

    graphs: tuple[GraphSummary, ...]
    graph_breaks: tuple[GraphBreak, ...]
    blocks: tuple[Block, ...]
    rejected: tuple[Rejected, ...]
    error: str | None = None
    kernels: tuple[LoadedKernel, ...] = ()
    unseen: tuple[Unseen, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and strings, for JSON."""
        return _plain(asdict(self))

    def __str__(self) -> str:
        parts = [f"{len(self.blocks)} experts blocks, {len(self.graphs)} graphs, {len(self.graph_breaks)} graph breaks"]
        if self.blocks:
            rows = [
                (b.path or "?", b.form, b.spec.summary(), b.tokens, b.chosen or "own code", _short(b.source))
                for b in self.blocks
            ]
            parts.append(tabulate(rows, ["path", "form", "spec", "T", "chosen", "source"]))
            ladders = dict.fromkeys((b.spec.summary(), b.ladder) for b in self.blocks if b.ladder is not None)
            parts += [f"auto for {spec}: {ladder}" for spec, ladder in ladders]
            reasons = {(name, why) for b in self.blocks for name, why in b.reasons.items()}
            parts += [f"not {name}: {why}" for name, why in sorted(reasons)]
        if self.graphs:
            rows_g = [(i, g.nodes_before, g.nodes_after, g.blocks) for i, g in enumerate(self.graphs)]
            parts.append(tabulate(rows_g, ["graph", "nodes traced", "nodes rewritten", "blocks"]))
        if self.rejected:
            rows_r = [(r.path or "?", r.form, r.reason, _short(r.source)) for r in self.rejected]
            parts.append(tabulate(rows_r, ["left alone", "form", "reason", "source"]))
        if self.unseen:
            rows_u = [(u.path or "?", u.class_name, u.reason, _short(u.source)) for u in self.unseen]
            parts.append(tabulate(rows_u, ["never seen by the compiler", "class", "Dynamo stopped because", "source"]))
            parts.append(UNSEEN_REMEDY)
        if self.graph_breaks:
            rows_k = [(_short(k.source) or "?", k.reason) for k in self.graph_breaks]
            parts.append(tabulate(rows_k, ["graph break", "reason"]))
        parts += [f"{k.name} is {k.version or 'of unknown version'}, {k.source}: {k.origin}" for k in self.kernels]
        if self.error is not None:
            parts.append(f"does not compile: {self.error}")
        return "\n\n".join(parts)


def _short(source: str | None) -> str:
    """A source line without the folders that an installed package lies in."""
    return (source or "").rpartition("site-packages/")[2]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
