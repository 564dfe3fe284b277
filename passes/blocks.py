"""Finds the canonical blocks of a graph: each dispatch with the operations that read what it returned.

    rows, offsets, order = moe::dispatch(x, ids, E, tag)          block.dispatch
    h                    = moe::grouped_linear(rows, w, b, offsets, transposed)      block.linears
    y                    = moe::combine(gate(h), weights, order, dtype, offsets)      block.combines

A block is held together by `offsets` and `order`, which only its own dispatch can have produced. Whatever else lies
between the canonical ops is none of a lowering's business.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moe_compile.errors import RewriteError
from moe_compile.kernels.quantised_linear import quantisation_of
from moe_compile.ops import NAMESPACE
from moe_compile.spec import ExpertsSpec

_CANONICAL = tuple(
    getattr(getattr(torch.ops, NAMESPACE), name)
    for name in ("dispatch", "grouped_linear", "grouped_linear_backward", "combine", "quantised_linear")
)
_DISPATCH, _GROUPED_LINEAR, _, _COMBINE, QUANTISED_LINEAR = _CANONICAL


@dataclass(frozen=True)
class Lowered:
    """What a lowering made of a block.

    Attributes:
        name: what runs the block, which is more precise than the experts backend's name where that names a family.
        reasons: member of the family -> why it does not run the block.
    """

    name: str
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CanonicalBlock:
    """One experts block, spelled in canonical ops.

    Attributes:
        graph_module: the module whose graph holds the nodes: the root, or a subgraph of it, as under activation
            checkpointing.
        dispatch: the `moe::dispatch` node.
        rows: the nodes that take the rows (N, D) out of its result.
        offsets: the nodes that take the offsets (E,) out of it.
        order: the nodes that take the order (N,) out of it.
        linears: the `moe::grouped_linear` and `moe::quantised_linear` nodes that read the offsets, in graph order.
        combines: the `moe::combine` nodes that read the order, in graph order.
        tag: the name under which the block is reported.
    """

    graph_module: GraphModule
    dispatch: Node
    rows: tuple[Node, ...]
    offsets: tuple[Node, ...]
    order: tuple[Node, ...]
    linears: tuple[Node, ...]
    combines: tuple[Node, ...]
    tag: str

    def spec(self) -> ExpertsSpec:
        """What the canonical ops alone say of the block: sizes, dtypes and layout, but not the gate in between.

        Sizes that are symbolic are left open.
        """
        dispatch = op_arguments(self.dispatch)
        x, ids = fake_value(dispatch["x"]), fake_value(dispatch["ids"])
        up, down = (op_arguments(linear) for linear in (self.linears[0], self.linears[-1]))
        transposed = up["transposed"]
        up_out, down_in = fake_value(up["weight"]).shape[-1 if transposed else 1], fake_value(down["rows"]).shape[1]
        combine = op_arguments(self.combines[0]) if self.combines else None
        return ExpertsSpec(
            num_experts=dispatch["num_experts"],
            top_k=_known(ids.shape[1]),
            hidden_size=_known(x.shape[1]),
            intermediate_size=_known(down_in),
            weight_dtype=fake_value(up["weight"]).dtype,
            activation_dtype=x.dtype,
            routing_dtype=fake_value(combine["weights"]).dtype if combine else None,
            gated=up_out != down_in,
            transposed=transposed,
            quantisation=quantisation_of(fake_value(up["weight"])),
            scale_format=None if "scale" not in up else scale_format_of(fake_value(up["scale"])),
            process_group=up.get("group") or None,
            up=str(up["weight"]),
            down=str(down["weight"]),
            up_bias=None if up["bias"] is None else str(up["bias"]),
            down_bias=None if down["bias"] is None else str(down["bias"]),
        )

    def num_tokens(self) -> int | torch.SymInt:
        """T, which may be symbolic."""
        return fake_value(op_arguments(self.dispatch)["x"]).shape[0]


def find_canonical_blocks(gm: GraphModule) -> list[CanonicalBlock]:
    """Finds the canonical blocks of a graph module and of the graph modules in it.

    Args:
        gm: a graph from Dynamo, or one of ATen operators before autograd, such as an exported program's.

    Returns:
        The blocks, in the order of their dispatches, the root's first.

    Raises:
        RewriteError: if a canonical op belongs to no block, as when its offsets were computed elsewhere: no
            lowering could follow.
    """
    blocks: list[CanonicalBlock] = []
    for module in gm.modules():
        if isinstance(module, GraphModule):
            blocks += _blocks_of(module)
    return blocks


def is_canonical(node: Node) -> bool:
    """Whether a node calls one of the canonical ops."""
    return any(_calls(node, packet) for packet in _CANONICAL)


def is_linear(node: Node) -> bool:
    """Whether a node is a projection of a canonical block."""
    return _calls(node, _GROUPED_LINEAR) or _calls(node, QUANTISED_LINEAR)


def is_quantised(node: Node) -> bool:
    """Whether a projection's weight is quantised."""
    return _calls(node, QUANTISED_LINEAR)


def op_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node that calls an operator, by the names in its schema, defaults filled in."""
    packet = node.target
    overload = packet if isinstance(packet, torch._ops.OpOverload) else packet.default  # type: ignore[union-attr]
    arguments = overload._schema.arguments
    given = dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def fake_value(node: Node) -> Any:
    """The fake tensor, or tuple of them, that a node stands for.

    Raises:
        RewriteError: if the graph carries none.
    """
    for key in META_KEYS:
        if node.meta.get(key) is not None:
            return node.meta[key]
    raise RewriteError(
        f"lowering the experts block at {node.name}",
        "the node carries no fake tensor in its meta",
        "Pass a graph from torch.compile or torch.export, or run FakeTensorProp on it first",
    )


def needs_gradient(linear: Node) -> bool:
    """Whether a backward may follow a `moe::grouped_linear`.

    Dynamo knows, and guards on it. Graphs of other tracers do not say who will run them, so there it may.
    """
    value = linear.meta.get("example_value")
    return value is None or bool(value.requires_grad)


def scale_format_of(scale: torch.Tensor) -> str:
    """Format of quantisation scales, by their dtype."""
    return "ue8m0" if scale.dtype == torch.float8_e8m0fnu else "float32"


META_KEYS = ("example_value", "val")
"""Where Dynamo, and where every ATen-level tracer, keeps a node's fake value."""


def _known(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else None


def _calls(node: Node, packet: Any) -> bool:
    return node.op == "call_function" and node.target in (packet, packet.default)


def _blocks_of(module: GraphModule) -> list[CanonicalBlock]:
    blocks = [_block(module, node) for node in module.graph.nodes if _calls(node, _DISPATCH)]
    claimed = {node for block in blocks for node in (block.dispatch, *block.linears, *block.combines)}
    for node in module.graph.nodes:
        if is_canonical(node) and node not in claimed:
            raise RewriteError(
                f"lowering {node.target} at {node.name}",
                "no moe::dispatch in the same graph produced its offsets or order",
                "Emit dispatch, grouped_linear and combine of a block into one graph, before autograd",
            )
    return blocks


def _block(module: GraphModule, dispatch: Node) -> CanonicalBlock:
    rows, offsets, order = (tuple(_outputs(dispatch, index)) for index in range(3))
    users = {user: None for node in (*offsets, *order) for user in node.users}
    position = {node: index for index, node in enumerate(module.graph.nodes) if node in users}
    linears = (node for node in users if is_linear(node) and op_arguments(node)["offsets"] in offsets)
    combines = (node for node in users if _calls(node, _COMBINE) and op_arguments(node)["order"] in order)
    return CanonicalBlock(
        module,
        dispatch,
        rows,
        offsets,
        order,
        tuple(sorted(linears, key=position.__getitem__)),
        tuple(sorted(combines, key=position.__getitem__)),
        op_arguments(dispatch)["block"],
    )


def _outputs(node: Node, index: int) -> Iterator[Node]:
    for user in node.users:
        if user.op == "call_function" and user.target is operator.getitem and user.args[1] == index:
            yield user
