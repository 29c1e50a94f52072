"""Predicted time of wide.cuh, and the tile that is chosen by it. Not measured yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

from ...plan import target
from .tiles import UNIT
from .wide import CANDIDATES, PANELS, Config

#: Instructions of a warp for its 16 rows of a unit, counted in SASS: the main loop has 441 for two
#: units. A scheduler has one warp of each warpgroup, and issues one instruction a clock.
UNIT_SLOTS = 221
# Clocks a token that the tensor cores take for a unit of 64 x 64: 4096 products a clock and SM are
# what the dtype's peak says.
_TOKEN_CLOCKS = 2
_GHZ = 1.755
# Estimated: the launch that lays tokens; what a block does before its first product and, with its
# sums, after the last; what parts of k add to that.
_ARRANGE_US, _BLOCK_US, _PARTS_US = 1.5, 3.0, 1.5
# SMs that clusters of so many blocks, each of which fills an SM, leave idle: those that are left
# over in each of 8 groups of 16 or 18.
_IDLE = {1: 0, 2: 0, 4: 12}


@dataclass(frozen=True)
class Predicted:
    """What a tile is predicted to take, in microseconds.

    Attributes:
        config: The tile.
        products_us: Of the tensor cores alone, as blocks are spread over the SMs.
        unpacking_us: Of the issue slots of unpacking, likewise.
        bytes_us: Of the bytes of the packed weight.
        us: All of it, with what does not overlap.
    """

    config: Config
    products_us: float
    unpacking_us: float
    bytes_us: float
    us: float


def predict(
    config: Config, shape: tuple[int, int], tokens: int, nbytes: int, sm_count: int
) -> Predicted:
    """The time of one tile.

    Args:
        config: The tile.
        shape: Rows and columns of the weight.
        tokens: Of x.
        nbytes: Of the packed weight.
        sm_count: SMs of the GPU.

    Example:
        >>> round(predict(Config(256, 1, 1), (16384, 4096), 256, 39_600_000, 132).products_us)
        37
    """
    rows, cols = shape
    able = max(config.parts, sm_count - _IDLE[config.parts])
    rounds = ceil(config.blocks(rows, tokens) / able)
    units = config.steps(ceil(cols / UNIT)) * PANELS * config.ways * rounds  # of an SM
    to_us = 1e-3 / _GHZ
    products = units * config.tokens * _TOKEN_CLOCKS * to_us
    unpacking = units * UNIT_SLOTS * to_us
    of_bytes = nbytes / target("h200").read_bandwidth * 1e6
    fixed = _ARRANGE_US + rounds * (_BLOCK_US + _PARTS_US * (config.parts > 1))
    us = max(products, unpacking, of_bytes) + fixed
    return Predicted(config, products, unpacking, of_bytes, us)


@cache
def choose(shape: tuple[int, int], tokens: int, nbytes: int, sm_count: int) -> Predicted:
    """The tile with the least predicted time; of equal ones the first of `CANDIDATES`.

    Args:
        shape: As for `predict`, like the rest.
        tokens: 1 or more.
        nbytes: Of the packed weight.
        sm_count: SMs of the GPU.

    Example:
        >>> choose((16384, 4096), 256, 39_600_000, 132).config.name
        '128x256_w1_p1'
        >>> choose((4096, 4096), 256, 9_900_000, 132).config.parts
        4
    """
    each = (predict(config, shape, tokens, nbytes, sm_count) for config in CANDIDATES)
    return min(each, key=lambda found: found.us)
