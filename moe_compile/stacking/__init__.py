"""Weights that live in separate parameters, laid next to each other once, so that no call copies them."""

from moe_compile.stacking.stacks import StackedWeight, stack, stacked, stacked_weights, unstack

__all__ = ["StackedWeight", "stack", "stacked", "stacked_weights", "unstack"]
