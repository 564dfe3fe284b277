"""Decides what becomes of each operator of a proven block.

    mul = aten.mul(mm_2, index_1)     {rows, and one number per row}   ->   weights: index_1, rows: mm_2
    mm_2 = aten.mm(mul, t_2)          {t_2 differs between experts}    ->   a product with stacked weights
    silu = aten.silu(mm)              {no parameter of its own}        ->   runs once, on all rows

The routing weight is the factor that the rows are multiplied with last, if it is made of nothing but values per pair.
Wherever else it is multiplied, it stays an ordinary operator, and the sum is unweighted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node

from moe_compile.passes.alike import experts_alike
from moe_compile.passes.block import Block, arguments, aten
from moe_compile.passes.facts import Label, Size, expression, is_tensor, same_size, shape_of
from moe_compile.passes.match import NotProvenError
from moe_compile.passes.rowwise import VIEWS, shape_equal

# Casts and changes of shape: nothing is computed, and zeros stay zeros.
ONE_TO_ONE = (
    *VIEWS,
    aten._to_copy.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.clone.default,
    aten.expand.default,
    aten.permute.default,
)


# Numbers per token and expert, of which the canonical form reads those of the pairs.
GATES = ("gates", "onehot", "mask")


@dataclass(frozen=True)
class Product:
    """A grouped product.

    Attributes:
        rows: the left side.
        weights: the stacked weight, or each expert's.
        biases: the stacked bias, or each expert's; empty without one.
        stacked: there is one weight for all experts.
        transposed: of a stacked weight: (E, in, out).
        column: where the result has an axis of size one, 0 if nowhere.
    """

    rows: Node
    weights: tuple[Node, ...]
    biases: tuple[Node, ...]
    stacked: bool
    transposed: bool
    column: int


@dataclass(frozen=True)
class Plan:
    """A block, ready to be written.

    Attributes:
        block: the derivation.
        output: the operator whose value is the block's output.
        rows: what is summed, without the routing weight.
        weights: the routing weight, None if there is none at the end.
        weights_labels: the labels of the product of rows and weight.
        weights_per_slot: the weight has tokens and slots for axes, and a third of size one.
        hidden: the outside value that dispatch takes.
        picked: what the rows of dispatch stand for when it is picked from by token, or by pair.
        repeated: an outside value (T*K, D) that equals the rows in the order of pairs.
        per_pair: `hidden` has one row per pair instead of one per token.
        start: what the sum is added to, None for zeros.
        dtype: of the output.
        products: the grouped products, first to last.
        num_experts: E.
        kept: the matrix of marks that leaves pairs out, None if all remain.
        ends_in_product: nothing but casts comes after the last product, so rows of sentinels are zero.
    """

    block: Block
    output: Node
    rows: Node
    weights: Node | None
    weights_labels: tuple[Label, ...]
    weights_per_slot: bool
    hidden: Node
    picked: Node
    repeated: Node | None
    per_pair: bool
    start: Node | None
    dtype: torch.dtype
    products: dict[Node, Product]
    num_experts: int
    kept: Node | None
    ends_in_product: bool

    @property
    def mode(self) -> FakeTensorMode:
        """The fake mode that all values live in."""
        value = self.output.meta["val"]
        assert isinstance(value, FakeTensor)
        return value.fake_mode


def make_plan(block: Block, output: Node) -> Plan:
    """Plans one output of a block.

    Raises:
        NotProvenError: if the block cannot be written in canonical ops.
    """
    fact = block.facts[output]
    differing: dict[tuple[Node, int], list[Node]] = {}
    summed = _first_expert(block, fact.parts, differing)
    for node in term(block, summed):
        if node in block.fills:
            _first_expert(block, block.fills[node], differing)
    _require_zeroed_sentinels(block, summed)
    weights, labels, rows = _split_weight(block, summed)
    per_slot = output in block.weighted
    if per_slot:
        weights, rows = block.weighted[output], summed
    products = _emitted(block, rows, _products(block, rows, differing))
    if not products:
        raise NotProvenError("no product with an expert's own weight was found", output)
    hidden, picked, repeated, per_pair = _hidden(block, products)
    return Plan(
        block=block,
        output=output,
        rows=rows,
        weights=weights,
        weights_labels=labels,
        weights_per_slot=per_slot,
        hidden=hidden,
        picked=picked,
        repeated=repeated,
        per_pair=per_pair,
        start=fact.base,
        dtype=output.meta["val"].dtype,
        products=products,
        num_experts=_number_of_experts(block, products),
        kept=_kept(block, summed),
        ends_in_product=_unwrapped(block, rows) in products,
    )


def _kept(block: Block, summed: Node) -> Node | None:
    """The marks that rows were picked by; others may have been looked at, and are no business of the block's."""
    by_entries = any(fact.kind == "turn" for fact in block.facts.values())
    if by_entries and any(fact.kind == "pair" and fact.labels == ("S",) for fact in block.facts.values()):
        raise NotProvenError("rows are sorted by the ids and by the entries of a matrix", summed)
    nodes = (node for node in term(block, summed) if node in block.facts)
    labels = {label for node in nodes for label in block.facts[node].labels}
    return block.kept if by_entries or any(label and label.endswith("@") for label in labels) else None


def term(block: Block, node: Node) -> list[Node]:
    """The operators of the block that a value is made of, operands first; of a loop, those of its first expert."""
    found: dict[Node, None] = {}
    stack = [(node, False)]
    while stack:
        at, ready = stack.pop()
        if at in found:
            continue
        if ready:
            found[at] = None
            continue
        stack.append((at, True))
        stack += [(operand, False) for operand in _operands(block, at)]
    return list(found)


def _operands(block: Block, node: Node) -> Iterator[Node]:
    if node in block.leaves or node in block.tokens:
        return
    if node in block.fills:
        yield of_first_expert(block.fills[node])
        return
    sources = [block.passed[node]] if node in block.passed else node.all_input_nodes
    for source in sources:
        if block.kind(source) == "rows" or source in block.outputs:
            yield source


def of_first_expert(parts: tuple[tuple[int, Node], ...]) -> Node:
    """What the expert of the lowest number computed."""
    return min(parts, key=lambda part: part[0])[1]


def _first_expert(
    block: Block, parts: tuple[tuple[int, Node], ...], differing: dict[tuple[Node, int], list[Node]]
) -> Node:
    if parts[0][0] >= 0:
        for place, values in experts_alike(block, parts).items():
            differing.setdefault(place, values)
    return of_first_expert(parts)


def _products(block: Block, rows: Node, differing: dict[tuple[Node, int], list[Node]]) -> dict[Node, Product]:
    products: dict[Node, Product] = {}
    explained: set[tuple[Node, int]] = set()
    nodes = term(block, rows)
    for node in nodes:
        places = {index for at, index in differing if at is node}
        projection = block.projections.get(node)
        if projection is not None:
            biases = () if projection.bias is None else (projection.bias,)
            weight = (projection.weight,)
            products[node] = Product(projection.rows, weight, biases, True, projection.transposed, projection.column)
        elif node.target is aten.mm.default and 1 in places:
            weights = tuple(differing[node, 1])
            products[node] = Product(arguments(node)[0], weights, (), False, True, 0)
            explained.add((node, 1))
        elif node.target is aten.addmm.default and places:
            products[node] = _affine(node, differing)
            explained |= {(node, index) for index in places & {0, 2}}
        elif node.target is aten.add.Tensor and len(places) == 1:
            product = _with_bias(block, node, min(places), products, differing)
            if product is not None:
                products[node] = product
                explained |= {(node, index) for index in places}
    inside = set(nodes)
    for place in differing:
        if place not in explained and place[0] in inside:
            raise NotProvenError(
                f"{place[0].name} uses a parameter that differs between experts, other than a linear layer's", place[0]
            )
    return products


def _emitted(block: Block, rows: Node, products: dict[Node, Product]) -> dict[Node, Product]:
    """The products that remain once each bias has gone into its own."""
    found: set[Node] = set()
    stack = [rows]
    while stack:
        node = stack.pop()
        if node in found or (node not in block.facts and node not in block.outputs):
            continue
        found.add(node)
        stack += [products[node].rows] if node in products else _operands(block, node)
    return {node: product for node, product in products.items() if node in found}


def _affine(node: Node, differing: dict[tuple[Node, int], list[Node]]) -> Product:
    bias, rows, weight = arguments(node)
    number = max(len(values) for (at, _), values in differing.items() if at is node)
    weights = differing.get((node, 2), [weight] * number)
    biases = differing.get((node, 0), [bias] * number)
    return Product(rows, tuple(weights), tuple(biases), False, True, 0)


def _with_bias(
    block: Block,
    node: Node,
    index: int,
    products: dict[Node, Product],
    differing: dict[tuple[Node, int], list[Node]],
) -> Product | None:
    """`mm(rows, w_e) + b_e`, of one dtype."""
    product = products.get(arguments(node)[1 - index])
    biases = differing[node, index]
    plain = product is not None and not product.stacked and not product.biases and node.kwargs.get("alpha", 1) == 1
    if not plain or product is None or node.meta["val"].dtype != product.weights[0].meta["val"].dtype:
        return None
    features = shape_of(node)[-1]
    if not same_size(shape_of(biases[0])[-1], features) or not same_size(biases[0].meta["val"].numel(), features):
        return None
    return Product(product.rows, product.weights, tuple(biases), False, product.transposed, product.column)


def _split_weight(block: Block, summed: Node) -> tuple[Node | None, tuple[Label, ...], Node]:
    """(routing weight, labels of the multiplication, rows without it)."""
    node = summed
    while _passes_on(block, node):
        if node in block.fills:
            node = of_first_expert(block.fills[node])
            continue
        source = block.passed.get(node, arguments(node)[0])
        if block.kind(source) != "rows":
            break
        node = source
    if node.target is aten.mul.Tensor and is_tensor(arguments(node)[1]):
        labels = block.facts[node].labels
        for rows, weight in (arguments(node), arguments(node)[::-1]):
            per_pair = [_is_per_pair(block, factor, labels) for factor in (rows, weight)]
            if block.kind(rows) == "rows" and per_pair == [False, True]:
                return weight, labels, rows
    return None, (), summed


def _passes_on(block: Block, node: Node) -> bool:
    """Whether an operator casts or moves rows, and computes nothing."""
    if node.target is aten._to_copy.default or node in block.passed or node in block.fills or node.target in VIEWS:
        return True
    return node.target in ONE_TO_ONE and shape_equal(node, arguments(node)[0])


def _is_per_pair(block: Block, node: Any, labels: tuple[Label, ...]) -> bool:
    """Whether a factor is one number per pair, computed from nothing but numbers per pair."""
    if block.kind(node) in GATES:
        return True
    shape = shape_of(node)
    own = block.facts[node].labels if node in block.facts else labels[len(labels) - len(shape) :]
    if any(label is None and not same_size(size, 1) for label, size in zip(own, shape, strict=True)):
        return False
    if node not in block.facts:
        return any(label and not same_size(size, 1) for label, size in zip(own, shape, strict=True))
    nodes = term(block, node)
    return all(block.kind(at) != "rows" or (at not in block.projections and _is_narrow(block, at)) for at in nodes)


def _is_narrow(block: Block, node: Node) -> bool:
    labels = block.facts[node].labels
    return all(label is not None or same_size(size, 1) for label, size in zip(labels, shape_of(node), strict=True))


def _unwrapped(block: Block, node: Node) -> Node:
    """The operator behind casts and reorderings."""
    while True:
        if node in block.fills:
            node = of_first_expert(block.fills[node])
        elif node in block.passed and block.kind(block.passed[node]) == "rows":
            node = block.passed[node]
        elif node.target in ONE_TO_ONE and block.kind(arguments(node)[0]) == "rows":
            node = arguments(node)[0]
        else:
            return node


def _require_zeroed_sentinels(block: Block, summed: Node) -> None:
    if block.needs_masking and not _zero_at_sentinels(block, summed):
        node, what = block.needs_masking[0]
        if block.below is None or not block.num_experts or not same_size(block.below, block.num_experts[0][0]):
            raise NotProvenError(f"{node.name} {what}, and nothing zeroes those rows", node)


def _zero_at_sentinels(block: Block, node: Any) -> bool:
    if not isinstance(node, Node) or node not in block.facts:
        return False
    if node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return block.kind(arguments(node)[1]) == "sentinel" and node in block.passed
    if node.target is aten.mul.Tensor:
        return any(_zero_at_sentinels(block, operand) for operand in arguments(node))
    if node in block.passed:
        return _zero_at_sentinels(block, block.passed[node])
    return node.target in ONE_TO_ONE and _zero_at_sentinels(block, arguments(node)[0])


def _hidden(block: Block, products: dict[Node, Product]) -> tuple[Node, Node, Node | None, bool]:
    """What dispatch takes: (hidden, picked, repeated, per pair); see `Plan`."""
    rows = next(iter(products.values())).rows
    for node in [rows] if rows not in block.facts else term(block, rows):
        if node in block.tokens:
            return node, node, None, False
        if node in block.leaves and block.kind(arguments(node)[0]) is None:
            base: Any = arguments(node)[0]
            if base.target is aten.unsqueeze.default and arguments(base)[1] in (0, -3):
                base = arguments(base)[0]
            if block.runs_along_tokens(base):
                return base, base, None, False
            if len(shape_of(base)) == 2 and block.is_leading(base, block.pairs):
                source = unrepeated(block, base)
                return (base, base, base, True) if source is None else (source, base, base, False)
    for node in (operand for at in [rows, *term(block, rows)] for operand in (at, *at.all_input_nodes)):
        flat = without_unit_axes(block, node)
        if block.is_outside(flat) and len(shape_of(flat)) == 2 and block.is_leading(flat, block.pairs):
            source = unrepeated(block, flat)
            return (flat, flat, flat, True) if source is None else (source, flat, flat, False)
    raise NotProvenError("the rows that enter the first product were not traced to hidden states", rows)


def without_unit_axes(block: Block, node: Node) -> Node:
    """The matrix from outside that a value from outside is, but for axes of size one."""
    while block.is_outside(node) and node.target in ONE_TO_ONE and len(shape_of(node)) != 2:
        source = arguments(node)[0]
        features = [size for size in shape_of(node)[1:] if not same_size(size, 1)]
        kept = [size for size in shape_of(source)[1:] if not same_size(size, 1)]
        if not same_size(shape_of(source)[0], shape_of(node)[0]) or len(features) > 1 or len(kept) != len(features):
            break
        node = source
    return node


def unrepeated(block: Block, flat: Node) -> Node | None:
    """The value (T, D) that an outside value (T*K, D) repeats K times in a row, None if it does not."""
    node: Any = flat
    while node.target in (*VIEWS, aten.clone.default):
        node = arguments(node)[0]
    if node.target is not aten.expand.default or len(shape_of(node)) != 3:
        return None
    inner = arguments(node)[0]
    sizes: tuple[Size, ...] = (block.num_tokens, block.top_k)
    repeats = all(map(same_size, shape_of(node), (*sizes, shape_of(flat)[1])))
    if not repeats or inner.target is not aten.unsqueeze.default or arguments(inner)[1] not in (1, -2):
        return None
    source = arguments(inner)[0]
    return source if len(shape_of(source)) == 2 else None


def _number_of_experts(block: Block, products: dict[Node, Product]) -> int:
    numbers = {expression(shape_of(p.weights[0])[0]) if p.stacked else len(p.weights) for p in products.values()}
    # A one-hot may have a class for sentinels; where each expert finds its rows by a mask of its own, it has no rows.
    masked = all(str(block.facts[node].labels[0]).startswith("R") for node in products)
    if block.num_experts and not (masked and block.num_experts[0][0] > max(numbers)):
        numbers.add(block.num_experts[0][0])
    if len(numbers) != 1:
        where = next(iter(products))
        raise NotProvenError(f"the products have different numbers of experts: {sorted(map(int, numbers))}", where)
    return int(numbers.pop())
