"""Kernels that other projects ship: what they need, where they are loaded from, and the ops that call them.

Nothing here imports such a project before a compiled model needs it.
"""
