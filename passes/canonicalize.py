"""Writes a proven block down in canonical ops.

    rows, offsets, order = moe.dispatch(x, ids, E)
    h = moe.grouped_linear(rows, w, bias, offsets, transposed)      for every product with an expert's own weight
    ...                                                             every other operator once, on the dispatched rows
    out = moe.combine(h, weights, order, dtype)

The operators between the products are run again, on rows in expert order, whatever order they were found in: axes that
count rows take the new length, features keep theirs, and values that run along tokens or pairs are picked in the new
order. The result is traced with `make_fx`, so every new node has its fake value and all shapes have been checked.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from moe_compile.passes.block import OPEN, arguments, aten
from moe_compile.passes.candidates import value_of
from moe_compile.passes.facts import Label, expression, is_tensor, is_tokens, same_size, shape_of, wide
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.normalize import probe, trace
from moe_compile.passes.plan import GATES, Plan, Product, of_first_expert, unrepeated, without_unit_axes
from moe_compile.passes.recognize_grouped_mm import untransposed
from moe_compile.passes.rowwise import VIEWS, shape_equal

Lookup = Callable[[Node], Any]


def write(plan: Plan, kept: dict[Node, Node]) -> tuple[Graph, tuple[Node, ...]]:
    """Traces the canonical form of a block.

    Args:
        plan: the block.
        kept: value in the normal form -> node of the graph that holds it and will stay.

    Returns:
        A graph with one output, and the nodes that its placeholders stand for.

    Raises:
        NotProvenError: if an operator needs something that the canonical form does not have.
    """
    found: dict[Node, Any] = {}
    try:
        return _traced(plan, kept, found)
    except NotProvenError:
        raise
    except Exception as error:
        # An operator that the canonical form cannot run, such as one that wants a layout that the new rows do not have.
        reason = f"the canonical form cannot be traced: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise NotProvenError(reason, plan.output) from error


def _traced(plan: Plan, kept: dict[Node, Node], found: dict[Node, Any]) -> tuple[Graph, tuple[Node, ...]]:
    probe(lambda: _Writer(plan, kept, lambda node: found.setdefault(node, value_of(node))).run(), plan.mode)
    nodes = tuple(found)

    def canonical(*given: Any) -> Tensor:
        return _Writer(plan, kept, dict(zip(nodes, given, strict=True)).__getitem__).run()

    graph = trace(canonical, [value_of(node) for node in nodes])
    _straighten(graph)
    graph.eliminate_dead_code()
    return graph, nodes


def _straighten(graph: Graph) -> None:
    """Skips chains of views that end in the shape that they began with, such as an axis that comes and goes."""
    for node in graph.nodes:
        source = node
        while source.target in _DETOURS:
            before = arguments(source)[0]
            if not same_size(before.meta["val"].numel(), node.meta["val"].numel()):
                break
            source = before
            if shape_equal(source, node):
                node.replace_all_uses_with(source)
                break


_DETOURS = (*VIEWS, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default)


class _Writer:
    """Runs a block's operators on dispatched rows."""

    def __init__(self, plan: Plan, kept: dict[Node, Node], lookup: Lookup) -> None:
        self.plan, self.block = plan, plan.block
        self.kept, self.lookup = kept, lookup
        self.values: dict[tuple[Node, bool], Any] = {}
        self.constants: dict[Node, Any] = {}

    def run(self) -> Tensor:
        """The block's output."""
        plan, block = self.plan, self.block
        ids = self.outside(block.root)
        self.ids_TK = ids if ids.dim() == 2 else ids.reshape(-1, block.top_k)
        self.routed_TK = self.ids_TK
        self.hidden = self.outside(plan.hidden)
        if self.hidden.dim() != 2:
            self.hidden = self.hidden.flatten(0, -2)
        if plan.kept is not None:
            # A pair that is not kept is a sentinel's: no expert runs on it.
            kept_TK = self.gates_TK(plan.kept, self.hidden) != 0
            self.ids_TK = torch.where(kept_TK, self.ids_TK, plan.num_experts)
        routed = self.ids_TK.reshape(-1, 1) if plan.per_pair else self.ids_TK
        self.rows, self.offsets, self.order = torch.ops.moe.dispatch(self.hidden, routed, plan.num_experts)
        y = self.value(plan.rows, True)
        y_NO = y.reshape(self.rows.shape[0], -1) if y.dim() != 2 else y
        weights = self.weights_TK(y_NO)
        offsets = None if plan.ends_in_product else self.offsets
        out = torch.ops.moe.combine(y_NO, weights, self.order, plan.dtype, offsets)
        if plan.start is not None:
            out = self.outside(plan.start) + out
        shape = shape_of(plan.output)
        return out if len(shape) == 2 else out.reshape([self._size(size) for size in shape])

    def weights_TK(self, y_NO: Tensor) -> Tensor:  # noqa: N802
        """The routing weights, ones if there are none at the end."""
        weights = self.plan.weights
        if weights is None:
            return y_NO.new_ones(self.ids_TK.shape)
        if self.block.kind(weights) in GATES:
            return self.gates_TK(weights, y_NO)
        if self.plan.weights_per_slot:
            return self.outside(weights).reshape(self.ids_TK.shape)
        # (T, K, 1) and (T, K) from outside need no picking.
        per_slot = [*shape_of(weights)[:2]], [self.block.num_tokens, self.block.top_k]
        if weights not in self.block.facts and len(per_slot[0]) == 2 and all(map(same_size, *per_slot)):
            return self.outside(weights).reshape(self.ids_TK.shape)
        return self.operand(weights, self.plan.weights_labels, False).reshape(self.ids_TK.shape)

    def gates_TK(self, node: Node, like: Tensor) -> Tensor:  # noqa: N802
        """The numbers that a matrix of tokens and experts, or a column of it, holds for the pairs."""
        fact = self.block.facts[node]
        if node.target is aten.gather.default:
            node = self.block.facts[arguments(node)[0]].base  # type: ignore[assignment]
            fact = self.block.facts[node]
        if fact.kind == "mask":
            return like.new_ones(self.ids_TK.shape, dtype=value_of_node(node).dtype)
        if fact.expert is not None and fact.base is not None and self.block.kind(fact.base) is None:
            found = self.outside(fact.base).reshape(self.ids_TK.shape)
            return found.to(value_of_node(node).dtype)
        matrix = node if fact.expert is None else fact.base
        assert matrix is not None
        labels = self.block.facts[matrix].labels
        value = self.outside(matrix)
        if "ET" in labels:
            value_TE = value.reshape(self.plan.num_experts, -1).t()
        else:
            axes = [axis for axis, label in enumerate(labels) if label is not None and label != "E"]
            others = [axis for axis, label in enumerate(labels) if label is None]
            value_TE = value.permute(*axes, labels.index("E"), *others).reshape(-1, self.plan.num_experts)
        return value_TE.gather(1, self.routed_TK.long()).to(value_of_node(node).dtype)

    # Values of the block ---------------------------------------------------------------------------------------------

    def value(self, node: Node, in_order: bool) -> Any:
        """An operator of the block, on rows in expert order, or on pairs in their own order."""
        key = node, in_order
        if key not in self.values:
            self.values[key] = self._value(node, in_order)
        return self.values[key]

    def _value(self, node: Node, in_order: bool) -> Any:
        block = self.block
        product = self.plan.products.get(node)
        if product is not None:
            return self._product(node, product)
        if node in block.tokens:
            return self._along(self.hidden, 0, "T", in_order).reshape(self._shape(node))
        if block.kind(node) in GATES:
            weights = self.gates_TK(node, self.hidden).flatten()
            return self._along(weights, 0, "N", in_order).reshape(self._shape(node))
        if node in block.fills:
            rows = self.value(of_first_expert(block.fills[node]), in_order)
            if "E" in block.facts[node].labels:
                return rows.unsqueeze(block.facts[node].labels.index("E"))
            return rows.unsqueeze(1) if block.facts[node].labels[:2] == ("T", "K") else rows
        if node in block.passed:
            return self.operand(block.passed[node], block.facts[node].labels, in_order)
        if node in block.leaves:
            return self._pick(node, in_order)
        if node.target is operator.getitem:
            return self.value(arguments(node)[0], in_order)[arguments(node)[1]]
        if node.target is aten.select_scatter.default:
            base, source, dim = arguments(node)[:3]
            return self.value(source, in_order).unsqueeze(dim % len(shape_of(base)))
        if node.target in VIEWS:
            return self.operand(arguments(node)[0], None, in_order).reshape(self._shape(node))
        if node.target is aten.expand.default:
            return self.operand(arguments(node)[0], None, in_order).expand(self._shape(node))
        return self._again(node, in_order)

    def _again(self, node: Node, in_order: bool) -> Any:
        if node not in self.block.facts and node not in self.block.outputs:
            raise NotProvenError(f"{node.name} depends on the routing in a way that was not proven", node)
        fact = self.block.fact(node)
        assert isinstance(node.target, torch._ops.OpOverload)
        pointwise = torch.Tag.pointwise in node.target.tags
        labels = fact.labels if fact is not None and pointwise else None

        def convert(argument: Any) -> Any:
            if isinstance(argument, list | tuple):
                return [convert(item) for item in argument]
            if not isinstance(argument, Node):
                return argument
            return self.operand(argument, labels, in_order)

        args = [convert(argument) for argument in arguments(node)]
        return node.target(*args, **{key: convert(v) for key, v in node.kwargs.items()})

    def operand(self, node: Any, labels: tuple[Label, ...] | None, in_order: bool) -> Any:
        """An operand; one from outside that runs along some of these labels is picked in the order of the rows."""
        if node in self.block.facts or node in self.block.outputs:
            return self.value(node, in_order)
        if labels is None or not is_tensor(node):
            return self.outside(node)
        shape = shape_of(node)
        assert len(labels) >= len(shape), "an operand has more axes than the result"
        own = labels[len(labels) - len(shape) :]
        runs = {label: axis for axis, label in enumerate(own) if label and not same_size(shape[axis], 1)}
        if not runs:
            return self.outside(node)
        if in_order and runs == {"N": 0} and self._is_repeated_hidden(without_unit_axes(self.block, node)):
            return self.rows.reshape(self.rows.shape[0], *shape[1:])
        value = self.outside(node)
        if set(runs) == {"N"}:
            return self._along(value, runs["N"], "N", in_order)
        if set(runs) == {"T", "K"}:
            return self._along(value.flatten(runs["T"], runs["K"]), runs["T"], "N", in_order).unsqueeze(runs["K"])
        if set(runs) == {"T"}:
            return self._along(value, runs["T"], "T", in_order)
        raise NotProvenError(f"{node.name} runs along {', '.join(sorted(runs))} alone", node)

    def _is_repeated_hidden(self, node: Node) -> bool:
        return node is self.plan.repeated or (
            not self.plan.per_pair and unrepeated(self.block, node) is self.plan.hidden
        )

    def _along(self, value: Tensor, axis: int, label: Label, in_order: bool) -> Tensor:
        """Picks from an outside value what belongs to each row."""
        if not in_order and label == "N":
            return value
        top_k = self.block.top_k
        pair = self.order if in_order else torch.arange(self.order.shape[0], device=self.order.device)
        index = pair if label == "N" or top_k == 1 else pair // top_k if label == "T" else pair % top_k
        return value.index_select(axis, index)

    def _pick(self, node: Node, in_order: bool) -> Tensor:
        base, indices = arguments(node)[0], arguments(node)[1]
        if node.target is aten.index.Tensor:
            axis = next(i for i, index in enumerate(indices) if index is not None)
            kinds = [self.block.facts[index].kind for index in indices if index is not None]
            counted = {"token": "T", "slot": "K", "pair": "N"}
            labels = [counted.get(kind) for kind in kinds]
            if kinds in (["mask"], ["gates"]):
                labels = list(self.block.facts[indices[axis]].labels)
        elif node.target is aten.gather.default and self.block.kind(base) == "gates":
            weights = self.gates_TK(node, self.hidden).flatten()
            return self._along(weights, 0, "N", in_order).reshape(self._shape(node))
        else:
            axis = int(indices) % len(shape_of(base))
            labels = ["T" if self.block.facts[arguments(node)[2]].kind == "token" else "N"]
        if self.block.kind(base) == "gates":
            weights = self.gates_TK(base, self.hidden).flatten()
            return self._along(weights, 0, "N", in_order).reshape(self._shape(node))
        if in_order and axis == 0 and base is self.plan.picked:
            return self.rows
        if in_order and axis == 1 and self._is_unsqueezed_hidden(base):
            return self.rows.unsqueeze(0)
        value = self.outside(base)
        if is_tokens(wide(tuple(labels))):
            value, labels = value.flatten(axis, axis + len(labels) - 1), ["T"]
        if len(labels) == 2:
            value = (value.transpose(axis, axis + 1) if labels == ["K", "T"] else value).flatten(axis, axis + 1)
            labels = ["N"]
        return self._along(value, axis, labels[0], in_order)

    def _is_unsqueezed_hidden(self, base: Any) -> bool:
        return (
            base.target is aten.unsqueeze.default
            and arguments(base)[0] is self.plan.picked
            and arguments(base)[1] in (0, -3)
        )

    def _shape(self, node: Node) -> list[Any]:
        """A view's shape, with rows of the new kind."""
        labels, shape = self.block.facts[node].labels, shape_of(node)
        sizes: list[Any] = []
        for axis, (label, size) in enumerate(zip(labels, shape, strict=True)):
            # Of tokens along several axes, the first takes all rows.
            if label in ("K", "E") or (label is not None and label[0] == "T" and label[1:] not in ("", "0")):
                sizes.append(1)
            elif label is not None:
                sizes.append(self.rows.shape[0])
            elif isinstance(size, int):
                sizes.append(size)
            else:
                sizes.append(self.outside(arguments(node)[1][axis]))
        return sizes

    def _size(self, size: Any) -> Any:
        """A size of the output, as the traced inputs have it."""
        wanted = expression(size)
        if wanted.is_Integer:
            return int(wanted)
        for value in self.constants.values():
            for own in value.shape if isinstance(value, Tensor) else (value,):
                if isinstance(own, torch.SymInt) and expression(own) == wanted:
                    return own
        raise NotProvenError(f"a size of the output, {wanted}, is none of the inputs'", self.plan.output)

    # Products --------------------------------------------------------------------------------------------------------

    def _product(self, node: Node, product: Product) -> Tensor:
        along_pairs: tuple[Label, ...] = ("N", *(None,) * (len(shape_of(product.rows)) - 1))
        rows = self.operand(product.rows, along_pairs, True)
        if rows.dim() != 2:
            rows = rows.reshape(self.rows.shape[0], -1)
        if len(product.weights) == 1 and product.stacked:
            weight, transposed = self.outside(product.weights[0]), product.transposed
        else:
            weight, transposed = self._stacked_layout(list(product.weights))
        bias = None
        if product.biases:
            bias = self.outside(product.biases[0]) if product.stacked else self._stacked(list(product.biases))
            bias = bias.reshape(bias.shape[0], bias.shape[-1])
        out = torch.ops.moe.grouped_linear(rows, weight, bias, self.offsets, transposed)
        if "E" in self.block.facts[node].labels:
            return out.reshape(self._shape(node))
        return out.unsqueeze(product.column) if product.column else out

    def _stacked_layout(self, weights: list[Node]) -> tuple[Tensor, bool]:
        inner = [untransposed(weight) for weight in weights]
        if all(not transposed for _, transposed in inner):
            return self._stacked([weight for weight, _ in inner]), False
        return self._stacked(weights), True

    def _stacked(self, parts: list[Node]) -> Tensor:
        """Each expert's own tensor, stacked; the stack itself if they were taken out of one."""
        first = parts[0]
        if all(part.target is aten.select.int and arguments(part)[:2] == (arguments(first)[0], 0) for part in parts):
            return self._source_of([int(arguments(part)[2]) for part in parts], arguments(first)[0], parts)
        unbound = [arguments(part)[0] if part.target is operator.getitem else None for part in parts]
        source: Any = unbound[0]
        along_experts = isinstance(source, Node) and source.target is aten.unbind.int and len(source.args) == 1
        if along_experts and all(same_call(other, source) for other in unbound):
            return self._source_of([int(arguments(part)[1]) for part in parts], arguments(source)[0], parts)
        if all(part.target is aten._to_copy.default and part.kwargs == first.kwargs for part in parts):
            return torch.ops.aten._to_copy.default(self._stacked([arguments(p)[0] for p in parts]), **first.kwargs)
        return torch.stack([self.outside(part) for part in parts])

    def _source_of(self, numbers: list[int], source: Any, parts: list[Node]) -> Tensor:
        held = int(shape_of(source)[0])
        for expert, number in enumerate(numbers):
            if number % held != expert:
                raise NotProvenError(f"expert {expert} uses the weight of expert {number % held}", parts[expert])
        if held != len(parts):
            raise NotProvenError(f"{len(parts)} of the {held} experts in {source.name} run", parts[-1])
        return self.outside(source)

    # Values from outside ---------------------------------------------------------------------------------------------

    def outside(self, node: Any) -> Any:
        """A value from outside the block: a node of the graph, or what a few operators make of some."""
        if not isinstance(node, Node):
            return node
        if node not in self.constants:
            self.constants[node] = self._outside(node)
        return self.constants[node]

    def _outside(self, node: Node) -> Any:
        if node in self.block.form.inputs:
            return self.lookup(self.block.form.inputs[node])
        if node in self.kept:
            return self.lookup(self.kept[node])
        if node in self.block.facts and self.block.kind(node) not in OPEN:
            raise NotProvenError(f"{node.name} depends on the routing in a way that was not proven", node)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise NotProvenError(f"{node.name} draws random numbers", node)

        def convert(argument: Any) -> Any:
            if isinstance(argument, list | tuple):
                return [convert(item) for item in argument]
            return self.outside(argument)

        args = [convert(argument) for argument in arguments(node)]
        assert callable(node.target)
        return node.target(*args, **{key: convert(v) for key, v in node.kwargs.items()})


def value_of_node(node: Node) -> Tensor:
    """The fake tensor of a node of the normal form."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value


def same_call(left: Any, right: Any) -> bool:
    """Whether two operators are the same, on the very same operands."""
    return isinstance(left, Node) and left.target == right.target and left.args == right.args
