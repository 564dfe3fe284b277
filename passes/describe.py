"""What a graph's metadata says about a block: names, places, and what is known of the expert ids."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moe_compile.passes.block import arguments, aten
from moe_compile.passes.candidates import name_of, value_of
from moe_compile.passes.facts import Size, expression, same_size, shape_of
from moe_compile.passes.plan import GATES, ONE_TO_ONE, Plan, Product, term
from moe_compile.spec import ExpertsSpec, GateSpec, RoutingWeightPlace

_TORCH = torch.__path__[0]
_SOURCE = re.compile(r'File "([^"]+)", line (\d+)')
_PARAMETER = re.compile(r"(?:^|_)(?:parameters|buffers)_(.+?)_*$")
_CUTS_SLOTS = ("slice", "getitem", "narrow")
_KEEPS_SLOTS = ("view", "reshape", "flatten", "to", "int", "long", "contiguous", "_to_copy", "detach")
_LAYOUT = (
    *ONE_TO_ONE,
    aten.split.Tensor,
    aten.slice.Tensor,
    aten.select.int,
    aten.masked_fill.Scalar,
)
_ACTIVATIONS: dict[Any, str] = {
    aten.silu.default: "silu",
    aten.gelu.default: "gelu",
    aten.relu.default: "relu",
}


def module_path(node: Node) -> str:
    """The path of the module whose code a node came from, such as "model.layers.0.mlp"."""
    stack = node.meta.get("nn_module_stack") or {}
    name = next(reversed(list(stack.values())))[0] if stack else ""
    if "]" in name:
        name = name.partition("]")[2]
    steps = name.replace("._modules", "").replace("[", ".").replace("]", "").split(".")
    return ".".join(step.strip("'\"") for step in steps if step.strip("'\""))


def source_line(node: Node) -> str | None:
    """The innermost line of a model's code that a node came from."""
    found = [line for line in _SOURCE.findall(node.meta.get("stack_trace") or "") if not line[0].startswith(_TORCH)]
    return f"{found[-1][0].rpartition('/')[2]}:{found[-1][1]}" if found else None


def ids_differ(root: Node, top_k: Size) -> bool:
    """Whether the ids of a token are known to differ: they are one each, or places of a `topk`."""
    return same_size(top_k, 1) or _selection(root) is not None


def ids_below(root: Node) -> Size | None:
    """What all ids are known to be smaller than: the size of the axis that they are places on."""
    selection = _selection(root)
    if selection is None:
        return None
    size: Size = value_of(arguments(selection)[0]).shape[-1]
    return size


def _selection(node: Node) -> Node | None:
    """The topk or sort, along the last axis, whose second result some ids are."""
    while True:
        value = value_of(node)
        source = arguments(node)[0] if arguments(node) and isinstance(arguments(node)[0], Node) else None
        if source is None:
            return None
        if name_of(node) == "getitem" and arguments(node)[1] == 1 and name_of(source) in ("topk", "sort"):
            return source if _along_last_axis(source) else None
        if not isinstance(value, torch.Tensor) or not isinstance(value_of(source), torch.Tensor):
            return None
        keeps_slots = name_of(node) in _KEEPS_SLOTS and value.shape[-1:] == value_of(source).shape[-1:]
        # Some of a token's slots are as distinct as all.
        cuts_slots = name_of(node) in _CUTS_SLOTS and value.dim() == value_of(source).dim() and _is_cut(node)
        if value_of(source).is_floating_point() or not (keeps_slots or cuts_slots):
            return None
        node = source


def _is_cut(node: Node) -> bool:
    """Whether an item is made of slices alone."""
    if name_of(node) != "getitem":
        return True
    item = arguments(node)[1]
    return all(isinstance(part, slice) or part is Ellipsis for part in (item if isinstance(item, tuple) else (item,)))


def _along_last_axis(node: Node) -> bool:
    position = 2 if name_of(node) == "topk" else 1
    if node.kwargs.get("stable") is not None and len(arguments(node)) > 1 and isinstance(arguments(node)[1], bool):
        return False
    dim = arguments(node)[position] if len(arguments(node)) > position else node.kwargs.get("dim", -1)
    return dim in (-1, value_of(arguments(node)[0]).dim() - 1)


def describe(plan: Plan) -> ExpertsSpec:
    """A block's layout and arithmetic, as far as they show."""
    block, products = plan.block, plan.products
    first = [p for p in products.values() if not _upstream(plan, p.rows)]
    last = list(products.values())[-1]
    up = first[0]
    hidden = plan.hidden.meta["val"]
    features_in, features_out = _features(up)
    width = features_out * len(first)
    inner = _features(last)[0]
    gated = len(products) > 1 and width == 2 * inner
    spec = ExpertsSpec(
        num_experts=plan.num_experts,
        top_k=block.top_k,
        hidden_size=features_in,
        intermediate_size=inner,
        weight_dtype=up.weights[0].meta["val"].dtype,
        activation_dtype=hidden.dtype,
        routing_dtype=plan.weights.meta["val"].dtype if plan.weights is not None else plan.dtype,
        gated=gated,
        concatenated=not (gated and len(first) == 1 and _is_interleaved(plan)),
        transposed=_is_transposed(up),
        gate=GateSpec(_activation(plan)),
        routing_weight=_place_of_weight(plan),
        post_expert_norm=not plan.ends_in_product and _reduces_after(plan),
        up=_attribute(plan, up.weights[0]),
        down=_attribute(plan, last.weights[0]),
    )
    if up.biases:
        spec = replace(spec, up_bias=_attribute(plan, up.biases[0]))
    if last.biases:
        spec = replace(spec, down_bias=_attribute(plan, last.biases[0]))
    return spec


def _features(product: Product) -> tuple[int, int]:
    shape = [int(expression(size)) for size in shape_of(product.weights[0])[-2:]]
    reads_in_first = product.transposed
    return (shape[0], shape[1]) if reads_in_first else (shape[1], shape[0])


def _is_transposed(product: Product) -> bool:
    if product.stacked:
        return product.transposed
    return product.weights[0].target not in (aten.t.default, aten.transpose.int, aten.permute.default)


def _upstream(plan: Plan, rows: Node) -> list[Node]:
    """The products that some rows were made of."""
    return [node for node in term(plan.block, rows) if node in plan.products] if rows in plan.block.facts else []


def _middle(plan: Plan) -> list[Node]:
    """The operators between the first products and the last."""
    last = list(plan.products.values())[-1]
    nodes = term(plan.block, last.rows) if last.rows in plan.block.facts else []
    behind = {node for product in list(plan.products)[:-1] for node in term(plan.block, product)}
    return [node for node in nodes if node not in behind]


def _activation(plan: Plan) -> str:
    """The usual name of a gate that is one activation and at most one multiplication, "custom" for any other."""
    moved = (*plan.block.passed, *plan.block.fills, *plan.block.cuts)
    operators = [n for n in _middle(plan) if isinstance(n.target, torch._ops.OpOverload)]
    nodes = [n for n in operators if n.target not in _LAYOUT and n not in moved]
    names = [_ACTIVATIONS[n.target] for n in nodes if n.target in _ACTIVATIONS]
    others = [n for n in nodes if n.target not in _ACTIVATIONS]
    if names == ["relu"] and len(others) == 1 and _squares(others[0]):
        return "relu2"
    if len(names) != 1 or len(others) > 1 or any(n.target is not aten.mul.Tensor for n in others):
        return "custom"
    (activation,) = (n for n in nodes if n.target in _ACTIVATIONS)
    if others and activation not in arguments(others[0]):
        return "custom"
    return "gelu_tanh" if activation.kwargs.get("approximate") == "tanh" else names[0]


def _squares(node: Node) -> bool:
    return (node.target is aten.pow.Tensor_Scalar and arguments(node)[1] == 2) or (
        node.target is aten.mul.Tensor and arguments(node)[0] is arguments(node)[1]
    )


def _is_interleaved(plan: Plan) -> bool:
    return any(n.target is aten.slice.Tensor and len(arguments(n)) > 4 and arguments(n)[4] == 2 for n in _middle(plan))


def _place_of_weight(plan: Plan) -> RoutingWeightPlace:
    if plan.weights is not None:
        return "output"
    block, nodes = plan.block, term(plan.block, plan.rows)
    if any(block.kind(o) in GATES for node in nodes for o in node.all_input_nodes):
        return "input"
    picked = [n for n in nodes if n in block.leaves and arguments(n)[0] is not plan.picked]
    return "input" if picked else "none"


def _reduces_after(plan: Plan) -> bool:
    last = list(plan.products)[-1]
    before = set(term(plan.block, last))
    norms = (aten.mean.dim, aten._fused_rms_norm.default, aten.native_layer_norm.default)
    return any(node.target in norms for node in term(plan.block, plan.rows) if node not in before)


def _attribute(plan: Plan, node: Node) -> str:
    """The attribute that a parameter was read from, as far as its name in the graph tells."""
    while node.op != "placeholder" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    outer = plan.block.form.inputs.get(node)
    if outer is None:
        return "weight"
    found = _PARAMETER.search(str(outer.target) if outer.op in ("placeholder", "get_attr") else outer.name)
    return found.group(1) if found else outer.name
