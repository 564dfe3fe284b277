"""Which gate a region is, read off its operators: fused kernels implement a few and must not guess.

    split = aten.split(rows, F, -1)                         part 0 and part 1 of 2
    mul   = aten.mul(aten.silu(split[0]), split[1])         silu, concatenated

A gate is named only if its operators are exactly those: an activation of the first part, times the second. A cast, a
clamp or a bias more makes it another function, and the answer is why.
"""

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moe_compile.passes.blocks import CanonicalBlock
from moe_compile.passes.region import Region, find_region
from moe_compile.passes.splice import trace
from moe_compile.spec import ExpertsSpec, GateSpec

aten = torch.ops.aten
_ACTIVATIONS = {aten.silu.default: "silu", aten.relu.default: "relu", aten.gelu.default: "gelu"}


@dataclass(frozen=True)
class Gate:
    """A gate that was recognised.

    Attributes:
        kind: "silu", "gelu", "gelu_tanh" or "relu", times the second part.
        concatenated: the parts are halves; False means interleaved.
        limit: the first part is clamped to at most this, the second to between its negative and it; None without.
    """

    kind: str
    concatenated: bool
    limit: float | None = None


def match_gate(gm: GraphModule, region: Region) -> Gate | str:
    """The gate of a region, or why it is none that is known.

    Args:
        gm: the root graph module.
        region: what stands between the projections.
    """
    if region.others:
        return f"the gate reads {region.others[0].name}"
    traced = trace(gm, region.function, (region.up,))
    returned: Any = traced.output_node().args[0]
    (result,) = returned
    if not _is(result, aten.mul.Tensor):
        return f"the gate ends in {_name(result)}, not in a product"
    for first, second in (result.args, result.args[::-1]):
        if isinstance(first, Node) and first.target in _ACTIVATIONS:
            limit, parts = _without_limit(first.args[0], second)
            gate, linear = (_part(traced, part) for part in parts)
            if gate is not None and linear is not None and gate[0] == linear[0] and (gate[1], linear[1]) == (0, 1):
                tanh = first.kwargs.get("approximate") == "tanh"
                return Gate("gelu_tanh" if tanh else _ACTIVATIONS[first.target], gate[0] == "half", limit)
    return "the gate is no activation of one half times the other half"


def describe_canonical(block: CanonicalBlock) -> ExpertsSpec:
    """What the canonical ops say of a block, with the gate between them, where it is one that is known."""
    spec, region = block.spec(), find_region(block)
    gate = region if isinstance(region, str) else match_gate(block.graph_module, region)
    if isinstance(gate, str):
        return spec
    kind = "swiglu_clamped" if gate.limit is not None and gate.kind == "silu" else gate.kind
    return replace(spec, gate=GateSpec(kind, limit=gate.limit), concatenated=gate.concatenated)


def _without_limit(gate: Any, linear: Any) -> tuple[float | None, tuple[Any, Any]]:
    """Looks through the clamps of both parts, if they are those of one limit."""
    if not (_is(gate, aten.clamp.default) and _is(linear, aten.clamp.default)):
        return None, (gate, linear)
    (source, *bounds), (other, *both) = gate.args, linear.args
    limit = bounds[-1]
    if len(bounds) == len(both) == 2 and bounds[0] is None and limit is not None and both == [-limit, limit]:
        return float(limit), (source, other)
    return None, (gate, linear)


def _part(graph: Graph, node: Any) -> tuple[str, int] | None:
    """("half", 0 or 1) or ("strided", 0 or 1): which part of the rows' features a value is."""
    rows = next(iter(graph.nodes))
    given: tuple[Any, ...] = node.args if isinstance(node, Node) else ()
    last = rows.meta["val"].dim() - 1
    size = rows.meta["val"].shape[last]
    if _is(node, operator.getitem) and _is(given[0], aten.split.Tensor):
        source, length, *rest = given[0].args
        if source is rows and rest and rest[0] in (-1, last) and statically_known_true(length * 2 == size):
            return "half", int(given[1])
    if not _is(node, aten.slice.Tensor):
        return None
    defaults: tuple[Any, ...] = (0, None, None, 1)
    source, axis, start, end, step = (*given, *defaults[len(given) - 1 :])
    if source is not rows:
        return None
    axis, start, step = axis % (last + 1), start or 0, step or 1
    if axis != last:
        return None
    to_end = end is None or end >= size
    if step == 2 and to_end and start in (0, 1):
        return "strided", int(start)
    if step == 1 and start == 0 and not to_end and statically_known_true(end * 2 == size):
        return "half", 0
    if step == 1 and to_end and statically_known_true(start * 2 == size):
        return "half", 1
    return None


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _name(node: Any) -> str:
    return str(node.target) if isinstance(node, Node) else str(node)
