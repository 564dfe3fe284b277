"""`moe_compile.register_backend(...)`: an experts backend of one's own, with the same record as the built-in ones."""

from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from moe_compile.errors import MoeCompileError, RegistrationError
from moe_compile.experts_backends import EXPERTS_BACKENDS, ExpertsBackend, known_names
from moe_compile.passes import Lowering
from moe_compile.passes.blocks import CanonicalBlock, Lowered, is_canonical
from moe_compile.passes.lower_with_kernel import require_like
from moe_compile.rules import Predicate, Situation
from moe_compile.spec import ExpertsSpec

_BUILT_IN = frozenset(EXPERTS_BACKENDS)


def register_backend(
    name: str,
    reasons: Predicate,
    lower: Lowering,
    *,
    has_backward: bool = False,
    cuda_graph_safe: bool = False,
    summary: str = "",
) -> ExpertsBackend:
    """Adds an experts backend, which `moe_compile.backend(name)` then runs. `docs/writing-a-backend.md` has an example.

    Args:
        name: what users call it.
        reasons: predicate over a block and its situation; why the backend is not legal there, an empty tuple where it
            is. It looks at nothing else.
        lower: replaces the canonical ops of one block in a graph. `lower_linears` and `lower_block` of
            `moe_compile.passes.lower_with_kernel` make one of a single function.
        has_backward: whether gradients flow through it; if not, training is refused.
        cuda_graph_safe: whether it may run inside CUDA graphs; if not, the modes that use them are refused.
        summary: one line for tables.

    Returns:
        The record. `unregister_backend(name)` takes it back.

    Raises:
        RegistrationError: if the name is taken or no name, or predicate or lowering cannot be called; and when the
            backend is used, if its predicate returns no reasons or its lowering leaves another result than the block
            needs.
    """
    asked = f"register_backend({name!r})"
    if not isinstance(name, str) or not name.isidentifier():
        raise RegistrationError(asked, "this is no name", "Use letters, digits and underscores")
    if name in known_names():
        raise RegistrationError(
            asked,
            f"{name!r} is {'built in' if name not in EXPERTS_BACKENDS or name in _BUILT_IN else 'registered already'}",
            "Choose another name, or call unregister_backend first",
        )
    for what, function in (("reasons", reasons), ("lower", lower)):
        if not callable(function):
            raise RegistrationError(asked, f"{what} is {function!r}, which cannot be called", "Pass a function")
    record = ExpertsBackend(
        name,
        _checked_predicate(name, reasons, has_backward, cuda_graph_safe),
        _checked_lowering(name, lower),
        has_backward,
        cuda_graph_safe,
        summary,
    )
    EXPERTS_BACKENDS[name] = record
    return record


def unregister_backend(name: str) -> None:
    """Takes a registered experts backend back.

    Raises:
        RegistrationError: if nothing was registered under that name.
    """
    if name in _BUILT_IN or EXPERTS_BACKENDS.pop(name, None) is None:
        registered = [key for key in EXPERTS_BACKENDS if key not in _BUILT_IN]
        raise RegistrationError(
            f"unregister_backend({name!r})",
            "nothing was registered under this name",
            f"Registered are {', '.join(registered) or 'none'}",
        )


def _checked_predicate(name: str, reasons: Predicate, has_backward: bool, cuda_graph_safe: bool) -> Predicate:
    def checked(spec: ExpertsSpec, situation: Situation) -> tuple[str, ...]:
        try:
            found: Any = reasons(spec, situation)
        except MoeCompileError:
            raise
        except Exception as error:
            raise _broken(name, f"its predicate raised {type(error).__name__}: {error}", "Repair it") from error
        if isinstance(found, str) or not isinstance(found, Iterable) or not all(isinstance(why, str) for why in found):
            raise _broken(
                name, f"its predicate returned {found!r}", "Return a tuple of reasons, empty where it is legal"
            )
        found = tuple(found)
        if situation.training and not has_backward:
            found += (f"{name} was registered without a backward",)
        if situation.settings.cuda_graphs and not cuda_graph_safe:
            found += (f"{name} was registered as not safe in CUDA graphs, which {situation.settings.label} uses",)
        return found

    return checked


def _checked_lowering(name: str, lower: Lowering) -> Lowering:
    def checked(gm: GraphModule, block: CanonicalBlock) -> Lowered:
        own = (block.dispatch, *block.linears, *block.combines)
        others = {node for node in block.graph_module.graph.nodes if node not in own}
        readers = [(combine, user, _positions(user, combine)) for combine in block.combines for user in combine.users]
        try:
            outcome: Any = lower(gm, block)
        except MoeCompileError:
            raise
        except Exception as error:
            raise _broken(name, f"its lowering raised {type(error).__name__}: {error}", "Repair it") from error
        if not isinstance(outcome, Lowered):
            raise _broken(name, f"its lowering returned {outcome!r}", "Return Lowered(name)")
        if any(is_canonical(node) for node in block.graph_module.graph.nodes if node not in others):
            raise _broken(name, "its lowering left canonical ops in the graph", "Replace and erase all of the block's")
        for combine, user, positions in readers:
            arguments = pytree.tree_leaves((user.args, user.kwargs))
            for result in {arguments[position] for position in positions}:
                if not isinstance(result, Node):
                    raise _broken(name, f"its lowering gives {user.name} {result!r}", "Give it the block's result")
                require_like(name, result, combine)
        return outcome

    return checked


def _positions(user: Node, node: Node) -> list[int]:
    return [i for i, leaf in enumerate(pytree.tree_leaves((user.args, user.kwargs))) if leaf is node]


def _broken(name: str, found: str, remedy: str) -> RegistrationError:
    return RegistrationError(f"the experts backend {name!r}", found, remedy)
