"""What was found and what was done, as data that prints itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from tabulate import tabulate

from moe_compile.auto import Ladder, Rung
from moe_compile.experts_backends import EXPERTS_BACKENDS
from moe_compile.kernels.external.loading import LoadedKernel
from moe_compile.spec import ExpertsSpec
from moe_compile.stacking.weight import StackedWeight

Found = Literal["captured", "prepared", "graph"]

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
        found: "captured" while the model was traced, "prepared" before that, or recognised in the "graph".
        source: `file.py:line`, None if unknown.
        spec: layout and arithmetic.
        tokens: T, an int or the symbol's name.
        chosen: name of the experts backend that runs it, None where the model's own code stays, "auto" where one of
            `rungs` is chosen at each call.
        reasons: experts backend -> why it is not used: its rule, or why the block was not proven.
        ladder: what `auto` chooses by token count, and on what that rests; None where another backend was asked for.
        graph: index of the graph that holds it, None while it is in none.
        rungs: the choices that are open when the graph runs, empty where one was made when it was compiled.
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
    graph: int | None = None
    rungs: tuple[Rung, ...] = ()

    @property
    def keeps_own_code(self) -> bool:
        """Whether the model's own code runs this block."""
        return self.chosen in (None, "eager")

    @property
    def dtype(self) -> str:
        """Of the experts' weights, "?" if unknown."""
        return str(self.spec.weight_dtype or "?").removeprefix("torch.")

    @property
    def others(self) -> dict[str, str]:
        """Every experts backend that does not run the block -> why not."""
        allowed = "allowed here; another one was asked for"
        names = [name for name in EXPERTS_BACKENDS if name not in (self.chosen, str(self.chosen).partition("_fall")[0])]
        return {**dict.fromkeys(names, allowed), **self.reasons}


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
class Coverage:
    """Bytes of a model's parameters.

    Attributes:
        covered: of experts that were rewritten.
        not_covered: of experts that run as the model's own code, or that the compiler never saw.
        other: everything else; None where a function was explained, whose parameters cannot be listed.
    """

    covered: int
    not_covered: int
    other: int | None

    def __str__(self) -> str:
        other = f", {_size(self.other)} in the rest of the model" if self.other is not None else ""
        covered, left = _size(self.covered), _size(self.not_covered)
        return f"parameters: {covered} in experts that are rewritten, {left} in experts that are not{other}"


Table = tuple[str, Sequence[str], Sequence[Sequence[object]]]


@dataclass(frozen=True)
class Explanation:
    """What `explain()` found; `str()` of it is a report, and notebooks show it as tables.

    Attributes:
        graphs: the graphs that were traced.
        graph_breaks: where the model was split, and why.
        blocks: the experts blocks.
        rejected: what looks like an experts block and was left alone.
        error: why the model does not compile, None if it does.
        kernels: kernels of other projects that were loaded for it, from where and in which version.
        unseen: experts that never reached the compiler.
        coverage: how many bytes of parameters the rewritten blocks hold.
        weights: path of a module, and weights of its experts that were separate parameters and lie in one buffer.
    """

    graphs: tuple[GraphSummary, ...]
    graph_breaks: tuple[GraphBreak, ...]
    blocks: tuple[Block, ...]
    rejected: tuple[Rejected, ...]
    error: str | None = None
    kernels: tuple[LoadedKernel, ...] = ()
    unseen: tuple[Unseen, ...] = ()
    coverage: Coverage = Coverage(0, 0, None)
    weights: tuple[tuple[str, StackedWeight], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and strings, for JSON."""
        derived = [{"dtype": block.dtype, "others": block.others} for block in self.blocks]
        blocks = [{**plain(block), **more} for block, more in zip(self.blocks, derived, strict=True)]
        return {**plain(self), "blocks": blocks}

    def to_html(self) -> str:
        """A page by itself."""
        from moe_compile.report_page import to_page

        return to_page(self)

    def _repr_html_(self) -> str:
        from moe_compile.report_page import to_fragment

        return to_fragment(self)

    def headline(self) -> str:
        """How much of what."""
        return f"{len(self.blocks)} experts blocks, {len(self.graphs)} graphs, {len(self.graph_breaks)} graph breaks"

    def tables(self) -> list[Table]:
        """(title, header, rows) of everything that was found."""
        found: list[Table] = []
        if self.blocks:
            rows = [
                (b.path or "?", b.form, b.spec.summary(), b.tokens, b.chosen or "own code", _short(b.source))
                for b in self.blocks
            ]
            found.append(("experts blocks", ("path", "form", "spec", "T", "chosen", "source"), rows))
            places = [
                (b.path or "?", _FOUND[b.found], "-" if b.graph is None else b.graph, b.dtype) for b in self.blocks
            ]
            found.append(("where they are", ("path", "how it was found", "in graph", "dtype"), places))
            ladders = dict.fromkeys((b.spec.summary(), str(b.ladder)) for b in self.blocks if b.ladder is not None)
            if ladders:
                found.append(("auto", ("auto for", "chooses"), list(ladders)))
            reasons = dict.fromkeys((name, why) for b in self.blocks for name, why in b.others.items())
            found.append(("not chosen", ("not", "because"), sorted(reasons)))
        if self.graphs:
            rows_g = [(i, g.nodes_before, g.nodes_after, g.blocks) for i, g in enumerate(self.graphs)]
            found.append(("graphs", ("graph", "nodes traced", "nodes rewritten", "blocks"), rows_g))
        if self.weights:
            rows_w = [
                (path or "?", w.name, w.num_experts, w.nbytes, w.copied_because or "no") for path, w in self.weights
            ]
            header_w = ("module", "stacked weights", "experts", "bytes", "copied at every call")
            found.append(("stacked weights", header_w, rows_w))
        if self.rejected:
            rows_r = [(r.path or "?", r.form, r.reason, _short(r.source)) for r in self.rejected]
            found.append(("left alone", ("left alone", "form", "reason", "source"), rows_r))
        if self.unseen:
            rows_u = [(u.path or "?", u.class_name, u.reason, _short(u.source)) for u in self.unseen]
            header = ("never seen by the compiler", "class", "Dynamo stopped because", "source")
            found.append(("never seen by the compiler", header, rows_u))
        if self.graph_breaks:
            rows_k = [(_short(k.source) or "?", k.reason) for k in self.graph_breaks]
            found.append(("graph breaks", ("graph break", "reason"), rows_k))
        return found

    def remarks(self) -> list[str]:
        """What is said in sentences, below the tables: what to do, bytes covered, where kernels came from."""
        said = [UNSEEN_REMEDY] if self.unseen else []
        if self.blocks or self.unseen:
            said.append(str(self.coverage))
        said += [f"{k.name} is {k.version or 'of unknown version'}, {k.source}: {k.origin}" for k in self.kernels]
        return said

    def __str__(self) -> str:
        parts = [self.headline()]
        for title, header, rows in self.tables():
            if title in ("auto", "not chosen"):
                parts.append("\n".join(f"{header[0]} {name}: {why}" for name, why in rows))
            else:
                parts.append(tabulate(rows, header))
        parts += self.remarks()
        if self.error is not None:
            parts.append(f"does not compile: {self.error}")
        return "\n\n".join(parts)


_FOUND = {
    "captured": "captured before tracing",
    "prepared": "prepared before tracing",
    "graph": "recognised in the graph",
}


def _size(count: int) -> str:
    """Bytes in the largest unit of 1000 that leaves a number of at least one: "49.2 kB", "3.1 GB"."""
    amount, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"


def _short(source: str | None) -> str:
    """A source line without the folders that an installed package lies in."""
    return (source or "").rpartition("site-packages/")[2]


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as plain containers of strings and numbers, for JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        # Not asdict(), which copies: a spec may hold symbolic sizes, and behind those are the trace's own objects.
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
