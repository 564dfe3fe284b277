"""`moe_compile.rewrite(...)`: the passes alone, on a graph module or an exported program."""

import copy
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from moe_compile.backend import situation_of
from moe_compile.decision import OnReject, check_on_reject
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
        UnknownBackendError, SelectionError, OptionError: for a name, a mapping or a policy that does not exist, and
            for a key of the mapping that matches no module path of the graph.
        RuleError: if the experts backend is not legal for a block and `on_reject` is "error".
    """
    if not isinstance(program, GraphModule | ExportedProgram):
        raise RewriteError(
            f"rewrite({type(program).__name__})",
            "this is neither a GraphModule nor an ExportedProgram",
            "Trace the model first, with torch.export.export(model, args)",
        )
    selection, on_reject = Selection.of(experts), check_on_reject(on_reject)
    gm = _copy(program.graph_module if isinstance(program, ExportedProgram) else program)
    selection.check_keys(_module_paths(gm), ())
    _share_one_mode(gm)
    inputs = [_fake(node) for node in gm.graph.nodes if node.op == "placeholder"]
    if inputs and all(value is None for value in inputs):
        raise RewriteError(
            "rewrite(GraphModule)",
            "its nodes carry no shapes and dtypes",
            "Trace it with torch.export, make_fx or Dynamo, not with torch.fx.symbolic_trace",
        )
    rewriter = Rewriter(selection, on_reject, situation_of(inputs, CompileSettings(), fullgraph=False), _warn)
    summary = rewriter.rewrite(gm)
    if summary.blocks == 0 and not rewriter.blocks:
        warnings.warn("moe_compile found no experts block in this graph", NoExpertsWarning, stacklevel=2)
    if not isinstance(program, ExportedProgram):
        return gm
    signature = copy.deepcopy(program.graph_signature)
    # It lists the outputs in their order, by names that the rewritten graph need not have.
    for spec, output in zip(signature.output_specs, pytree.tree_leaves(gm.graph.output_node().args), strict=True):
        if isinstance(output, Node):
            spec.arg.name = output.name
    rewritten = program._update(gm, signature)
    rewritten.validate()
    return rewritten


def _copy(original: GraphModule) -> GraphModule:
    """A deep copy whose nodes keep their names: a copy renames some, and an exported program's signature lists them."""
    gm = copy.deepcopy(original)
    for node, source in zip(gm.graph.nodes, original.graph.nodes, strict=True):
        node.name = source.name
    return gm


def _module_paths(gm: GraphModule) -> list[str]:
    """Paths of the modules that a graph's nodes come from."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in gm.graph.nodes)
    return list(dict.fromkeys(path for stack in stacks for path, _ in stack.values()))


def _share_one_mode(gm: GraphModule) -> None:
    """Puts a graph's fake tensors into one mode, where `make_fx(tracing_mode="real")` gave each its own."""
    nodes = [node for node in gm.graph.nodes if "val" in node.meta]
    fakes = [leaf for node in nodes for leaf in pytree.tree_leaves(node.meta["val"]) if isinstance(leaf, FakeTensor)]
    if len({id(fake.fake_mode) for fake in fakes}) < 2:
        return
    with FakeTensorMode():
        for node in nodes:
            node.meta["val"] = pytree.tree_map_only(FakeTensor, _like, node.meta["val"])


def _like(value: FakeTensor) -> torch.Tensor:
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fresh.requires_grad_(value.requires_grad)


def _warn(text: str) -> None:
    warnings.warn(text, FallbackWarning, stacklevel=2)


def _fake(node: Node) -> object:
    return node.meta.get("example_value", node.meta.get("val"))
