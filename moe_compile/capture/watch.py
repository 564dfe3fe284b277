"""Warns of experts that never reach the compiler: Dynamo tells after each frame how far it came."""

from moe_compile.capture import tracing
from moe_compile.capture.plan import owner_of
from moe_compile.errors import MoeCompileError


def watch() -> None:
    """Watches what Dynamo gives up on; called for each backend, Dynamo tries once more what it has given up on."""
    tracing.listen(_after)
    tracing.look_again()


def _after(attempt: tracing.Attempt) -> None:
    try:
        owner, _ = owner_of(attempt.compiler)
    except MoeCompileError:  # options that do not exist: the trace itself says so
        return
    if owner is not None:
        owner.note_attempt(attempt)
