"""What a pass changed: operations before and after, and the text."""

import difflib
from collections.abc import Mapping

from tabulate import tabulate

from moe_compile.inspection.source import MARK


def changed_operations(before: Mapping[str, int], after: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """(operation, count before, count after) where the two differ, the vanished ones first."""
    names = sorted({*before, *after}, key=lambda name: (name in after, name))
    counts = [(name, before.get(name, 0), after.get(name, 0)) for name in names]
    return [entry for entry in counts if entry[1] != entry[2]]


def operations_diff(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """A table of the operations whose number changed, and the sums."""
    rows = [*changed_operations(before, after), ("all", sum(before.values()), sum(after.values()))]
    return tabulate(rows, ["operation", "before", "after"]) + "\n"


def text_diff(before: str, after: str, name_before: str, name_after: str) -> str:
    """A unified diff of two programs, without the marks of experts blocks."""
    old, new = ([line.partition(MARK)[0] for line in text.splitlines()] for text in (before, after))
    return "\n".join(difflib.unified_diff(old, new, name_before, name_after, lineterm="", n=2)) + "\n"
