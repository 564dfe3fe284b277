"""`auto`: the backend that was measured fastest, among those that are legal, for the block and the token count.

Times come from a measured table (`tables.py`): the user's own, which `moe-compile tune` makes, else a shipped one.
Where no table knows the block, the roofline decides (`roofline.py`). Over all token counts the choices form a ladder:
with a static T one rung is taken when the graph is compiled, with a symbolic T when it runs.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moe_compile.experts_backends import legal_names
from moe_compile.roofline import estimate
from moe_compile.rules import Situation
from moe_compile.spec import ExpertsSpec
from moe_compile.tables import size_of, tables_for

MOST_TOKENS = 1 << 17
"""Token count up to which a ladder is worked out; its last rung stands for any larger one."""

# A rung of its own costs compile time: it must be this much faster somewhere than the rung before it.
_WORTH_A_RUNG = 1.05

_Time = Callable[[str, int], float | None]


@dataclass(frozen=True)
class Rung:
    """One choice of a ladder: a backend's name for every T from `first` to `last` (None: without end)."""

    name: str
    first: int
    last: int | None


@dataclass(frozen=True)
class Ladder:
    """What `auto` chooses, by token count.

    Attributes:
        rungs: from few tokens to many, without gaps.
        basis: what the choices rest on: a table's device, versions and date, or the rule.
    """

    rungs: tuple[Rung, ...]
    basis: str

    def name_for(self, tokens: int) -> str:
        """The choice at a token count."""
        return next(rung.name for rung in self.rungs if rung.last is None or tokens <= rung.last)

    def __str__(self) -> str:
        steps = [f"{rung.name} up to T={rung.last}" for rung in self.rungs[:-1]]
        beyond = f"{self.rungs[-1].name}{' beyond' if steps else ' at every T'}"
        return f"{', '.join([*steps, beyond])} ({self.basis})"


def find_ladder(spec: ExpertsSpec, situation: Situation) -> Ladder | None:
    """The fastest legal backend for every token count; None if no backend is legal.

    Args:
        spec: the block.
        situation: what surrounds it.
    """
    legal = legal_names(spec, situation)
    # The model's own code cannot be timed from here; it runs where nothing else may.
    candidates = [name for name in legal if name != "eager"]
    if len(candidates) <= 1:
        return Ladder((Rung((candidates or legal)[0], 0, None),), "the only legal one") if legal else None
    time, basis = _times(spec, situation, candidates)
    if time is None:
        return Ladder((Rung(candidates[0], 0, None),), "the block's sizes are not known")
    return Ladder(tuple(_climb(candidates, time)), basis)


def reachable(ladder: Ladder, tokens: torch.SymInt) -> tuple[Rung, ...]:
    """The rungs that a symbolic T may come to, by what is known of it; asking adds no guard."""
    known = statically_known_true
    return tuple(
        rung
        for rung in ladder.rungs
        if not (rung.last is not None and known(tokens > rung.last)) and not known(tokens < rung.first)
    )


def _times(spec: ExpertsSpec, situation: Situation, candidates: list[str]) -> tuple[_Time | None, str]:
    """How to time a candidate, and what that rests on."""
    size = size_of(spec)
    for table in tables_for(situation) if size is not None else []:
        assert size is not None
        cuda_graphs = situation.settings.cuda_graphs and situation.device_type == "cuda"
        found = table.nearest(size, training=situation.training, cuda_graphs=cuda_graphs)
        if found is not None and any(found.time(name, 1) is not None for name in candidates):
            return found.time, table.origin
    if any(estimate(name, spec, situation, 1) is not None for name in candidates):
        return lambda name, tokens: estimate(name, spec, situation, tokens), "roofline, nothing was measured"
    return None, ""


def _climb(candidates: list[str], time: _Time) -> list[Rung]:
    """The ladder's rungs: the choices at powers of two, and where between them they change."""

    def fastest(tokens: int) -> str:
        times = {name: spent for name in candidates if (spent := time(name, tokens)) is not None}
        return min(times, key=times.__getitem__) if times else candidates[0]

    counts = [1 << power for power in range(MOST_TOKENS.bit_length())]
    rungs = [Rung(fastest(1), 0, None)]
    for index, (below, above) in enumerate(itertools.pairwise(counts), start=1):
        name = fastest(above)
        if name == rungs[-1].name or not _is_worth_a_rung(rungs[-1].name, counts[index:], time, fastest):
            continue
        low, high = below, above
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fastest(middle) != name else (low, middle)
        rungs[-1] = Rung(rungs[-1].name, rungs[-1].first, high - 1)
        rungs.append(Rung(name, high, None))
    return rungs


def _is_worth_a_rung(name: str, counts: list[int], time: _Time, fastest: Callable[[int], str]) -> bool:
    """Whether staying on a rung would cost more than the noise of a measurement at some larger token count."""
    for tokens in counts:
        best, own = time(fastest(tokens), tokens), time(name, tokens)
        if own is None or (best is not None and own > _WORTH_A_RUNG * best):
            return True
        if fastest(tokens) == name:
            return False
    return False
