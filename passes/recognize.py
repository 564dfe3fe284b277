"""Finds the experts blocks that a graph spells out, proves them, and rewrites them to canonical ops.

    find_candidates     names and shapes: where a block may be                         one scan over the nodes
    normalize           one normal form: ATen, functional, before autograd             only the candidates
    Block.derive        facts about every value, by rules; one file per form
    make_plan, write    what becomes of each operator; the canonical form, traced
    apply               the only step that changes a graph, after everything was found

A block that is not proven stays as it was, and the reason is returned.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

from moe_compile.passes import (
    gates,
    gather,
    recognize_batched_mm,
    recognize_dense,
    recognize_dispatcher,
    recognize_expert_loop,
    recognize_grouped_mm,
    recognize_split,
    rowwise,
)
from moe_compile.passes.block import OPEN, Block, merge
from moe_compile.passes.blocks import META_KEYS
from moe_compile.passes.boundary import Boundary, Contexts, find_contexts, without_foreign_writes
from moe_compile.passes.candidates import BUFFERS, GROUPED, PRODUCTS, Candidate, name_of, storage_of, value_of
from moe_compile.passes.candidates_dense import find_candidates, find_lookups, find_mixtures
from moe_compile.passes.canonicalize import write
from moe_compile.passes.describe import describe, ids_below, ids_differ, module_path, source_line
from moe_compile.passes.facts import Fact, same_size, shape_of, token_labels
from moe_compile.passes.match import Match, NotProvenError, Rejection, Replacement
from moe_compile.passes.normalize import NormalForm, normalize
from moe_compile.passes.plan import Plan, make_plan
from moe_compile.passes.proofs import Proof, Proofs

# The first rule with an answer wins: what rows begin and end with, then what makes a form, then what any form holds.
_RULES = merge(
    (
        gather.RULES,
        recognize_grouped_mm.RULES,
        recognize_batched_mm.RULES,
        recognize_split.RULES,
        gates.RULES,
        recognize_dense.RULES,
        recognize_dispatcher.RULES,
        recognize_expert_loop.RULES,
        rowwise.RULES,
    )
)
_NEAR = 24
# What is no block of this kind, whatever its ids are.
_NEVER = (
    (find_mixtures, "holds every expert's output, weighted by a softmax over all experts: none may be skipped"),
    (find_lookups, "looks up experts of one hidden unit each, whose products would have one row per weight"),
)
_COPIED_META = ("stack_trace", "nn_module_stack", "custom")


def never(path: str) -> bool:
    """Skips nothing."""
    return False


def recognize(gm: GraphModule, skip: Callable[[str], bool] = never) -> tuple[list[Match], list[Rejection]]:
    """Finds the experts blocks of a graph module and of the graph modules in it. Changes nothing.

    Args:
        gm: a graph from Dynamo, `make_fx` or `torch.export`, before autograd, with fake tensors in its meta.
        skip: whether the code of the module at a path must stay as it is.

    Returns:
        The blocks that were proven, and what looks like a block and was not, each in graph order.
    """
    matches: list[Match] = []
    rejections: list[Rejection] = []
    proofs = Proofs()
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        # Ids may be made of other ids: those nearest to the experts are tried first, and a block needs one answer.
        answers: list[tuple[Match | Rejection, set[Node]]] = []
        candidates = find_candidates(module)
        contexts = find_contexts(module.graph) if candidates else {}
        for candidate in reversed(candidates):
            if skip(module_path(candidate.seed)):
                continue
            candidate = _without_other_contexts(candidate, contexts)
            rivals = [answer for answer in answers if _overlap(candidate, answer[1])]
            if any(isinstance(rival, Match) for rival, _ in rivals):
                continue
            answer = _recognize(module, contexts, candidate, proofs)
            if isinstance(answer, Match):
                answers = [other for other in answers if other not in rivals]
            if isinstance(answer, Match) or (answer is not None and not rivals):
                answers.append((answer, set(candidate.nodes)))
        proven = {node for _, nodes in answers for node in nodes}
        for find, reason in _NEVER:
            looked = (node for node in find(module) if node not in proven and not skip(module_path(node)))
            rejections += [
                Rejection("dense", module_path(node), f"{node.name} {reason}", node.name, source_line(node))
                for node in looked
            ]
        for answer, _ in reversed(answers):
            if isinstance(answer, Match):
                matches.append(answer)
            else:
                rejections.append(answer)
    return matches, rejections


def _without_other_contexts(candidate: Candidate, contexts: Contexts) -> Candidate:
    """Leaves out what stands in front of a block or behind it in another context than it runs in.

    That may be the last view of a frozen router, or a cast after autocast. A fresh buffer is the same in every mode,
    and so are masks: a block runs where its products do.
    """
    if not contexts:
        return candidate
    seed = candidate.seed
    here = contexts[next((node for node in candidate.nodes if name_of(node) in PRODUCTS), seed)]
    last = max((node for node in candidate.nodes if contexts[node] == here), default=seed)

    def belongs(node: Node) -> bool:
        return seed <= node < last or contexts[node] == here or name_of(node) in BUFFERS

    return replace(candidate, nodes=tuple(filter(belongs, candidate.nodes)), autocast=here[1])


def _overlap(candidate: Candidate, nodes: set[Node]) -> bool:
    """Whether a candidate is about a block that was dealt with: neighbours share no more than views at their edges."""
    return 2 * len(nodes.intersection(candidate.nodes)) > min(len(nodes), len(candidate.nodes))


def apply(gm: GraphModule, matches_with_tags: list[tuple[Match, str]]) -> None:
    """Rewrites proven blocks to canonical ops, in place.

    Args:
        gm: the graph module that `recognize` was given.
        matches_with_tags: matches of it, each with the name that its dispatch shall carry.
    """
    for match, tag in matches_with_tags:
        _replace(match.replacement, tag)
    for module in {id(m.replacement.graph_module): m.replacement.graph_module for m, _ in matches_with_tags}.values():
        module.graph.lint()
        module.recompile()
    gm.recompile()


def _recognize(
    module: GraphModule, contexts: Contexts, candidate: Candidate, proofs: Proofs
) -> Match | Rejection | None:
    """Proves one candidate; None if it turns out to be no experts block at all, such as a sort of something else."""
    proof = proofs.find(candidate)
    if proof is None:
        proof = proofs.keep(candidate, _prove(candidate))
    failure = proof.failure
    if failure is None and proof.canonical is not None:
        try:
            return _match(module, contexts, candidate, proof)
        except NotProvenError as found:
            failure = found
    if failure is None:
        return None
    where = failure.node or candidate.seed
    return Rejection(candidate.form, module_path(candidate.seed), failure.reason, where.name, source_line(where))


def _prove(candidate: Candidate) -> Proof:
    block: Block | None = None
    try:
        normal = normalize(without_foreign_writes(candidate.nodes), candidate.autocast)
        block = _derive(candidate, normal)
        if block is None or not _looks_like_experts(block):
            return Proof()
        value, outputs = _output(block, normal)
        plan = make_plan(block, value)
        written = Boundary(normal.nodes).written()
        # Of several nodes that hold a value, the first: a later one may stand behind the block.
        kept = {
            final: node
            for node, final in reversed(normal.finals.items())
            if block.kind(final) in OPEN and storage_of(node) not in written
        }
        canonical, inputs = write(plan, kept)
    except NotProvenError as failure:
        # What could not be derived comes first: it is why something is missing in the end.
        cause = block.failures[0] if block is not None and block.failures else failure
        places = _counted_places(candidate)
        if places is not None:
            reason = f"{places.name} counts each expert's tokens in their order, as a capacity that drops some does"
            cause = NotProvenError(reason, places)
        return Proof(failure=NotProvenError(cause.reason, _outer(cause.node, block)))
    return Proof(
        form=_form(block, plan),
        spec=describe(plan),
        canonical=canonical,
        inputs=inputs,
        outputs=outputs,
        origin=normal.origins[value],
        reads=tuple(normal.inputs.values()),
        nodes=normal.nodes,
    )


def _counted_places(candidate: Candidate) -> Node | None:
    """Where tokens are numbered within their expert, in a candidate or in front of its ids."""
    front, seen = [candidate.root], {candidate.root}
    while front and len(seen) < _NEAR:
        for operand in front.pop(0).all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                front.append(operand)
    for node in (*candidate.nodes, *seen):
        value = value_of(node)
        if name_of(node) == "cumsum" and isinstance(value, Tensor) and value.dim() > 1:
            return node
    return None


def _match(module: GraphModule, contexts: Contexts, candidate: Candidate, proof: Proof) -> Match:
    """Places a proven block in its graph.

    Raises:
        NotProvenError: if it cannot be taken out of it.
    """
    assert proof.canonical is not None
    assert proof.spec is not None
    assert proof.origin is not None
    boundary = Boundary(proof.nodes, contexts)
    last = boundary.last(proof.origin, proof.outputs)
    boundary.require_undisturbed(proof.reads, last)
    dead = boundary.dead_after(proof.outputs, proof.inputs, last)
    region = tuple(node for node in proof.nodes if node in dead)
    replacement = Replacement(module, proof.canonical, proof.inputs, proof.outputs, last, region)
    return Match(proof.form, module_path(last), source_line(last), proof.spec, candidate.num_tokens, replacement)


def _derive(candidate: Candidate, normal: NormalForm) -> Block | None:
    root = next((placeholder for placeholder, node in normal.inputs.items() if node is candidate.root), None)
    ids = value_of(candidate.root)
    if root is None:
        return None
    if not isinstance(candidate.top_k, int):
        raise NotProvenError(f"the number of experts per token in {candidate.root.name} is a symbol", candidate.root)
    if isinstance(candidate.num_tokens, int) and candidate.num_tokens == 0:
        raise NotProvenError("the graph was traced for no tokens at all, where shapes say nothing", candidate.root)
    block = Block(
        form=normal,
        root=root,
        num_tokens=candidate.num_tokens,
        top_k=candidate.top_k,
        distinct=ids_differ(candidate.root, candidate.top_k),
        below=ids_below(candidate.root),
        dense=candidate.form == "dense",
    )
    block.facts[root] = Fact("ids", ("N",) if ids.dim() == 1 else (*token_labels(ids.shape[:-1]), "K"))
    if block.dense:
        if candidate.experts is not None:
            block.expect_experts(candidate.experts, root)
        _read_by_all(block, candidate)
    block.failures += normal.failures
    rules = recognize_grouped_mm.with_transformers(_RULES)
    block.derive(rules, rowwise.elementwise)
    return block


def _read_by_all(block: Block, candidate: Candidate) -> None:
    """The hidden states of a dense form: every expert reads all of them."""
    for placeholder, node in block.form.inputs.items():
        if node not in candidate.hidden:
            continue
        *tokens, _ = shape_of(placeholder)
        if same_size(math.prod(tokens), block.num_tokens):
            block.facts[placeholder] = Fact("rows", (*token_labels(tokens), None))
            block.tokens.add(placeholder)


def _looks_like_experts(block: Block) -> bool:
    """Whether there is more than routing: products with parameters of experts, or several experts' rows."""
    kinds = [fact.kind for fact in block.facts.values()]
    experts = {fact.expert for fact in block.facts.values() if fact.kind in ("mask", "gates")}
    names = {name_of(node) for node in block.form.graph.nodes}
    loops = len(experts) > 1 and bool(names & {"nonzero", "index"})
    gathers = "parameter" in kinds or any(_gathers_matrices(block, node) for node in block.form.graph.nodes)
    return bool(block.projections) or bool(names & GROUPED) or bool(block.counted) or gathers or loops or block.dense


def _gathers_matrices(block: Block, node: Node) -> bool:
    reads_ids = any(block.kind(operand) == "ids" or operand in block.unproven for operand in node.all_input_nodes)
    return name_of(node) == "index" and reads_ids and value_of(node).dim() >= 3


def _form(block: Block, plan: Plan) -> str:
    if block.dense:
        return "dense"
    if any(fact.kind == "turn" for fact in block.facts.values()):
        return "dispatcher"
    if not all(product.stacked for product in plan.products.values()):
        return "expert_split" if block.cuts else "expert_loop"
    grouped = any(fact.kind == "offsets" for fact in block.facts.values())
    return "grouped_mm" if grouped else "batched_mm"


def _output(block: Block, normal: NormalForm) -> tuple[Node, tuple[Node, ...]]:
    """The block's output in the normal form, and the nodes of the graph that hold it."""
    sums = {node: len(fact.parts) for node, fact in block.facts.items() if fact.kind == "output"}
    if not sums:
        raise NotProvenError("the rows were not followed to a sum over each token's experts", None)
    most = max(sums.values())
    for value in sums:
        holders = tuple(node for node, final in normal.finals.items() if final is value)
        readers = {user for holder in holders for user in holder.users}
        if sums[value] == most and any(normal.finals.get(reader) not in sums for reader in readers):
            return value, holders
    raise NotProvenError("nothing reads the sum over the experts", next(iter(sums)))


def _outer(node: Node | None, block: Block | None) -> Node | None:
    """The node of the graph behind one of the normal form; nodes of the graph stand for themselves."""
    if node is None or block is None:
        return node
    return block.form.origins.get(node, block.form.inputs.get(node, node))


def _replace(replacement: Replacement, tag: str) -> None:
    graph, last = replacement.graph_module.graph, replacement.last
    keys = [key for key in META_KEYS if key in last.meta] or [META_KEYS[0]]
    context = {key: last.meta[key] for key in _COPIED_META if key in last.meta}
    trains = any(isinstance(v := value_of(n), Tensor) and v.requires_grad for n in (last, *replacement.region))
    sources = iter(replacement.inputs)
    copies: dict[Node, Node] = {}
    after = set(_following(last))
    with graph.inserting_before(last.next):
        for node in replacement.canonical.nodes:
            if node.op == "placeholder":
                copies[node] = next(sources)
            elif node.op == "output":
                result = copies[node.args[0]]  # type: ignore[index]
            else:
                copies[node] = copy = graph.node_copy(node, copies.__getitem__)
                copy.meta = context | dict.fromkeys(keys, _like_traced(node.meta["val"], trains))
                if node.target is torch.ops.moe.dispatch.default:
                    copy.args = (*copy.args[:3], tag)
    for output in replacement.outputs:
        output.replace_all_uses_with(result, delete_user_cb=after.__contains__)
    erased = [output.name for output in replacement.outputs if output in replacement.region]
    for node in reversed(replacement.region):
        graph.erase_node(node)
    if erased:
        # Exported programs list their outputs by name.
        result.name = erased[-1]


def _like_traced(value: Any, trains: bool) -> Any:
    """A fake value that says whether a backward may follow, as Dynamo's own do; the passes trace without autograd."""
    if not trains:
        return value
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), value)


def _following(node: Node) -> Iterator[Node]:
    while node.next.op != "root":
        node = node.next
        yield node
