"""Which block multiplies what, and how long that takes, predicted: kernel.cuh's order in Python.

Items are a strip by the tokens of a tile. A block advances a step at a time, as fast as the slowest
of four: the tensor cores, the bytes that arrive from L2, the rows of boxes that the copy engine
takes apart, and the wait for the columns of the next step. The constants are fitted to the 45 times
of our tiles in benchmarks/results/h200/spmm_bsr.jsonl, and are within 7 % of each; they were taken
at 2,048 tokens only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import torch
from torch import Tensor

from ...errors import ArgumentError
from .kernel import STEP, Config

RASTER_TOKENS = 4096  # tokens whose x stays in L2 while all strips pass over it: 32 MiB of k = 4096
_ATOM = 8  # rows of a swizzle
CLOCKS_US = 1850.0
# Of one SM in a clock. Strips have columns of their own, so tokens arrive at what L2 delivers to
# all SMs together; the weights of a strip are asked for by the blocks of all its tokens at once.
X_BYTES, W_BYTES = 36.7, 85.0
_ROW_CLOCKS = 1.86  # of a row of a box, however narrow
_LEAST_CLOCKS = 397.0  # of a step: its columns are asked for one step ahead
_STEP_NORM = 6.45
_ITEM_CLOCKS = 543.0  # of finding the next item
_TILE_CLOCKS, _PIECE_CLOCKS = 3000.0, 185.0  # of storing a tile, and each 64 x 16 of it
MEMORY_BYTES_US = 3.91e6
_FIXED_US = 2.05
_TOTAL_NORM = 4.6


@dataclass(frozen=True)
class Problem:
    """One product y[tokens, out] = x[tokens, k] @ w[out, k]^T.

    Raises:
        ArgumentError: A size is no whole number above zero.
    """

    tokens: int
    out: int
    k: int

    def __post_init__(self) -> None:
        sides = (self.tokens, self.out, self.k)
        if any(type(side) is not int or side < 1 for side in sides):
            raise ArgumentError(
                f"a product of {self.tokens!r} tokens with [{self.out!r}, {self.k!r}]",
                need="whole numbers above 0",
                hint="Problem(tokens=16, out=4096, k=4096)",
            )


class Tile(Protocol):
    """What the order of items depends on."""

    @property
    def tokens(self) -> int:
        """Of an item."""


def token_tiles(config: Tile, tokens: int) -> int:
    """Tiles along the tokens."""
    return ceil(tokens / config.tokens)


def raster_group(config: Tile, tokens: int) -> int:
    """Token tiles that all strips pass over together."""
    return min(max(1, RASTER_TOKENS // config.tokens), token_tiles(config, tokens))


def rows_of_x(config: Config, tokens: int) -> int:
    """Tokens that a step loads, in atoms of 8.

    Example:
        >>> from .plan import CANDIDATES
        >>> rows_of_x(CANDIDATES[0], 17)
        24
    """
    return min(config.tokens, -(-tokens // _ATOM) * _ATOM)


def items(strips: int, tiles: int, group: int) -> tuple[Tensor, Tensor]:
    """The order of all items: rank of the strip, token tile; `raster` of tile/raster.cuh.

    Example:
        >>> ranks, tiles = items(2, 3, 2)
        >>> list(zip(ranks.tolist(), tiles.tolist()))
        [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    """
    index = torch.arange(strips * tiles)
    first = index // (group * strips) * group
    width = (tiles - first).clamp_max(group)
    rest = index % (group * strips)
    return rest // width, first + rest % width


def blocks(count: int, grid: int) -> Tensor:
    """The block that has each item: dealt out forth and back, `dealt` of kernel.cuh.

    Example:
        >>> blocks(7, 3).tolist()
        [0, 1, 2, 2, 1, 0, 0]
    """
    index = torch.arange(count)
    place, turn = index % grid, index // grid % 2
    return torch.where(turn == 0, place, grid - 1 - place)


def loads(lengths: Tensor, config: Config, tokens: int, grid: int) -> tuple[Tensor, Tensor]:
    """Steps and items of every block.

    Args:
        lengths: Steps of each strip, falling, on the CPU.
        config: The tile.
        tokens: Rows of x.
        grid: Blocks.

    Returns:
        int64 [grid] both.
    """
    tiles = token_tiles(config, tokens)
    ranks, _ = items(lengths.numel(), tiles, raster_group(config, tokens))
    owner = blocks(ranks.numel(), grid)
    steps = torch.zeros(grid, dtype=torch.int64).index_add_(0, owner, lengths[ranks])
    return steps, torch.bincount(owner, minlength=grid)


def step_clocks(config: Config, tokens: int) -> float:
    """Clocks of one step: 64 columns of a strip by the tokens of a tile."""
    rows = rows_of_x(config, tokens)
    tensor = 2 * config.panels * config.tokens
    arriving = 2 * STEP * (rows / X_BYTES + config.rows / W_BYTES)
    return _norm(_STEP_NORM, tensor, arriving, rows * config.groups * _ROW_CLOCKS, _LEAST_CLOCKS)


def predicted_us(config: Config, lengths: Tensor, problem: Problem, sm_count: int) -> float:
    """Device time of one product.

    Args:
        config: The tile.
        lengths: Steps of each strip, falling, on the CPU.
        problem: Sizes.
        sm_count: SMs of the GPU.
    """
    count = lengths.numel() * token_tiles(config, problem.tokens)
    steps, each = loads(lengths, config, problem.tokens, min(count, sm_count))
    multiplied = steps.double() * step_clocks(config, problem.tokens)
    pieces = config.panels * config.tokens / 16
    stored = _TILE_CLOCKS + _PIECE_CLOCKS * pieces
    # One warpgroup stores while the other multiplies, as long as that takes longer; the last one
    # stores alone.
    turns = multiplied + each * _ITEM_CLOCKS
    both = (multiplied + each * (stored + _ITEM_CLOCKS)) / 2
    clocks = float(torch.maximum(turns, both).max()) + stored
    weight = int(lengths.sum()) * config.rows * STEP * 2
    moved = weight + 2 * problem.tokens * (problem.out + problem.k)
    return finished_us(clocks / CLOCKS_US, moved / MEMORY_BYTES_US)


def finished_us(busy_us: float, moving_us: float) -> float:
    """Device time of a launch whose busiest block works that long, while memory moves all bytes."""
    return _FIXED_US + _norm(_TOTAL_NORM, busy_us, moving_us)


def _norm(p: float, *terms: float) -> float:
    most = max(terms)
    return most * math.pow(sum(math.pow(term / most, p) for term in terms), 1 / p)
