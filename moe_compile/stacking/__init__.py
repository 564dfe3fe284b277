"""Weights that live in separate parameters, laid next to each other once, so that no call copies them."""

from moe_compile.stacking.stacks import stack, stacked, stacked_weights, unstack
from moe_compile.stacking.weight import StackedWeight

__all__ = ["StackedWeight", "stack", "stacked", "stacked_weights", "unstack"]
