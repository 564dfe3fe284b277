"""From what was asked for to what runs: the rules applied to one block, and what happens when they forbid it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from moe_compile.auto import Ladder, Rung, find_ladder, reachable
from moe_compile.errors import OptionError, RuleError
from moe_compile.experts_backends import AUTO, all_reasons, legal_names
from moe_compile.modes import nearest
from moe_compile.rules import Situation, error_for
from moe_compile.spec import ExpertsSpec

OnReject = Literal["error", "fallback", "keep"]
ON_REJECT: tuple[OnReject, ...] = ("error", "fallback", "keep")


def check_on_reject(on_reject: str) -> OnReject:
    """Returns a policy that exists.

    Raises:
        OptionError: for any other one.
    """
    known = {policy: policy for policy in ON_REJECT}
    if not isinstance(on_reject, str) or on_reject not in known:
        raise OptionError(
            f"on_reject={on_reject!r}",
            f"there is no such policy{nearest(on_reject, list(known))}",
            f"Use one of {', '.join(known)}",
        )
    return known[on_reject]


@dataclass(frozen=True)
class Decision:
    """What runs a block.

    Attributes:
        name: the experts backend, None where the model's own code stays because the one asked for is not legal, "auto"
            where one of `rungs` is chosen when the graph runs.
        reasons: backend name -> why it is not legal here, without the legal ones.
        ladder: what `auto` would choose at other token counts, None where a backend was asked for by name.
        rungs: the choices that a symbolic token count leaves open, empty where one is made now.
    """

    name: str | None
    reasons: dict[str, str]
    ladder: Ladder | None = None
    rungs: tuple[Rung, ...] = ()

    @property
    def keeps_own_code(self) -> bool:
        """Whether the model's own code runs, asked for or not."""
        return self.name in (None, "eager")


def decide(
    asked: str,
    spec: ExpertsSpec,
    situation: Situation,
    *,
    tokens: int | torch.SymInt | None,
    where: str,
    on_reject: OnReject,
    warn: Callable[[str], None],
) -> Decision:
    """Applies the rules to one block.

    Args:
        asked: name of an experts backend, or "auto".
        spec: the block.
        situation: what surrounds it.
        tokens: T, as far as it is known.
        where: module path or source line, for messages.
        on_reject: "error" raises, "fallback" takes the next legal backend, "keep" leaves the model's own code.
        warn: told, in a sentence without the block's path, that something else runs than what was asked for.

    Raises:
        RuleError: if the backend is not legal and `on_reject` is "error", or nothing is legal.
    """
    situation = replace(situation, dynamic_tokens=isinstance(tokens, torch.SymInt))
    against = {name: found for name, found in all_reasons(spec, situation).items() if found}
    reasons = {name: "; ".join(found) for name, found in against.items()}
    legal = legal_names(spec, situation)
    ladder = find_ladder(spec, situation) if asked == AUTO else None
    if ladder is not None:
        return _by_token_count(ladder, reasons, situation, tokens)
    name = None if asked == AUTO else asked
    if name is not None and name not in reasons:
        return Decision(name, reasons)

    found = reasons[name] if name is not None else "; ".join(f"{key}: {why}" for key, why in reasons.items())
    # Where the graph must be whole, the model's own code is subject to the rules of `eager`.
    if on_reject == "keep" and "eager" not in reasons:
        warn(f"experts={asked!r}: {found}. The model's own code runs instead.")
        return Decision(None, reasons)
    if on_reject == "fallback" and legal:
        warn(f"experts={asked!r}: {found}. {legal[0]} runs instead.")
        return Decision(legal[0], reasons)
    error = error_for(against[name]) if name is not None else RuleError
    raise error(f"experts={asked!r} for {where or 'an experts block'}", found, _remedy(legal, situation))


def _by_token_count(
    ladder: Ladder, reasons: dict[str, str], situation: Situation, tokens: int | torch.SymInt | None
) -> Decision:
    """What `auto` comes to: one rung for a static T, several to choose from at run time for a symbolic one."""
    if isinstance(tokens, int):
        return Decision(ladder.name_for(tokens), reasons, ladder)
    rungs = ladder.rungs if tokens is None else reachable(ladder, tokens)
    if tokens is None or len(rungs) == 1 or not _can_branch(situation):
        return Decision(rungs[-1].name, reasons, ladder)
    return Decision(AUTO, reasons, ladder, rungs)


def _can_branch(situation: Situation) -> bool:
    """Whether a choice at run time can be differentiated: the opaque op cannot, and Inductor before 2.13 fails to."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return not situation.training or (not situation.settings.cuda_graphs and version >= (2, 13))


def _remedy(legal: list[str], situation: Situation) -> str:
    advice = [f"Use experts={' or '.join(map(repr, legal))}"] if legal else []
    if situation.settings.without_cuda_graphs is not None:
        advice.append(situation.settings.without_cuda_graphs)
    if situation.fullgraph and "eager" not in legal:
        advice.append("fullgraph=False for the model's own code")
    return ", or ".join(advice) or 'Pass on_reject="keep" to leave the model\'s own code'
