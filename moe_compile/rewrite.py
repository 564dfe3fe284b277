"""`moe_compile.rewrite(...)`: the passes alone, on a graph module or an exported program."""

import copy
import warnings

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from moe_compile.backend import situation_of
from moe_compile.decision import OnReject
from moe_compile.errors import FallbackWarning, NoExpertsWarning, RewriteError
from moe_compile.modes import CompileSettings
from moe_compile.rewriter import Rewriter
from moe_compile.selection import Experts, Selection


def rewrite(
    program: GraphModule | ExportedProgram, experts: Experts = "auto", *, on_reject: OnReject = "error"
) -> GraphModule | ExportedProgram:
    """Rewrites the experts blocks of a traced graph.

    Args:
        program: a graph with fake tensors in its metadata, as Dynamo, `make_fx` and `torch.export` make them.
        experts: an experts backend's name, or a mapping of globs over module paths to names.
        on_reject: as for `backend()`.

    Returns:
        A rewritten copy of the same kind; what was passed stays as it was.

    Raises:
        RewriteError: if `program` is neither of the two, or its nodes carry no fake tensors.
        RuleError: if the experts backend is not legal for a block and `on_reject` is "error".
    """
    if not isinstance(program, GraphModule | ExportedProgram):
        raise RewriteError(
            f"rewrite({type(program).__name__})",
            "this is neither a GraphModule nor an ExportedProgram",
            "Trace the model first, with torch.export.export(model, args)",
        )
    exported = isinstance(program, ExportedProgram)
    gm = _copy(program.graph_module if isinstance(program, ExportedProgram) else program)
    inputs = [_fake(node) for node in gm.graph.nodes if node.op == "placeholder"]
    if inputs and all(value is None for value in inputs):
        raise RewriteError(
            "rewrite(GraphModule)",
            "its nodes carry no shapes and dtypes",
            "Trace it with torch.export, make_fx or Dynamo, not with torch.fx.symbolic_trace",
        )
    rewriter = Rewriter(
        Selection.of(experts), on_reject, situation_of(inputs, CompileSettings(), fullgraph=False), _warn
    )
    summary = rewriter.rewrite(gm)
    if summary.blocks == 0 and not rewriter.blocks:
        warnings.warn("moe_compile found no experts block in this graph", NoExpertsWarning, stacklevel=2)
    if not exported:
        return gm
    assert isinstance(program, ExportedProgram)
    rewritten = program._update(gm, program.graph_signature)
    rewritten.validate()
    return rewritten


def _copy(original: GraphModule) -> GraphModule:
    """A deep copy whose nodes keep their names: a copy renames some, and an exported program's signature lists them."""
    gm = copy.deepcopy(original)
    for node, source in zip(gm.graph.nodes, original.graph.nodes, strict=True):
        node.name = source.name
    return gm


def _warn(text: str) -> None:
    warnings.warn(text, FallbackWarning, stacklevel=2)


def _fake(node: torch.fx.Node) -> object:
    return node.meta.get("example_value", node.meta.get("val"))
