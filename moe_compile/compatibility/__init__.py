"""The compatibility matrix: what the rules say, what really happens, and where the two disagree."""
