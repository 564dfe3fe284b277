"""Launch parameters of the grouped product, chosen on the host from sizes alone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Launch parameters of the grouped product.

    Attributes:
        m: rows of one expert per program.
        n: output features per program.
        k: input features per step.
        group: row blocks that share a block of weights.
        warps: warps per program.
        stages: steps that are loaded ahead.
    """

    m: int
    n: int
    k: int
    group: int
    warps: int
    stages: int


def choose_tiles(num_rows: int, num_experts: int, itemsize: int) -> Tiles:
    """Launch parameters by how many rows an expert gets on average.

    Swept on an H200 in bf16; wider types get smaller blocks, so that they fit the shared memory of older GPUs.
    """
    per_expert = num_rows / num_experts
    if per_expert <= 1:
        tiles = Tiles(16, 32, 256, 1, 4, 3)
    elif per_expert <= 8:
        tiles = Tiles(16, 64, 128, 1, 4, 4)
    elif per_expert < 32:
        tiles = Tiles(32, 64, 128, 4, 4, 3)
    elif per_expert < 128:
        tiles = Tiles(64, 128, 64, 8, 4, 4)
    else:
        tiles = Tiles(128, 256, 64, 8, 8, 3)
    if itemsize > 2:
        tiles = Tiles(tiles.m, min(tiles.n, 64), min(tiles.k // 2, 64), tiles.group, tiles.warps, 2)
    return tiles
