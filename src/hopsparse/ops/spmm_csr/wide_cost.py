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
# Bytes a clock that arrive at an SM, and what one from a neighbour costs beside one from L2: what
# was measured of spmm_nm (docs/design/0005-spmm-nm-main-loop.md, 0006-eight-bits.md).
_ARRIVING, _OF_NEIGHBOUR = 50, 0.4
# Bytes of shared memory a clock, and loads of a unit that take one each: for each of its
# tiles eight values, a word and a prefix.
_SHARED, _UNIT_LOADS = 128, 16 * (8 + 2)
# Estimated: the launch that lays tokens; what a block does before its first product and, with its
# sums, after the last; what parts of k add to that.
_ARRANGE_US, _BLOCK_US, _PARTS_US = 1.5, 3.0, 1.5


@dataclass(frozen=True)
class Predicted:
    """What a tile is predicted to take, in microseconds. Each is as blocks are spread over the SMs.

    Attributes:
        config: The tile.
        products_us: Of the tensor cores alone.
        unpacking_us: Of the issue slots of unpacking.
        shared_us: Of shared memory: tokens that come and that each panel reads, and unpacking.
        arriving_us: Of the bytes that arrive at an SM.
        bytes_us: Of the bytes of the packed weight.
        us: All of it, with what does not overlap.
    """

    config: Config
    products_us: float
    unpacking_us: float
    shared_us: float
    arriving_us: float
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
    rounds = ceil(config.blocks(rows, tokens) / _blocks_at_once(config, sm_count))
    steps = config.steps(ceil(cols / UNIT)) * rounds  # of an SM
    units, to_us = steps * PANELS * config.ways, 1e-3 / _GHZ
    products = units * config.tokens * _TOKEN_CLOCKS * to_us
    unpacking = units * UNIT_SLOTS * to_us
    of_unit = nbytes / (ceil(rows / UNIT) * ceil(cols / UNIT))
    laid, own = config.tokens * UNIT * 2, 1 / config.share  # tokens of a unit
    came = laid * (own + (1 - own) * _OF_NEIGHBOUR)
    arriving = (units * of_unit + steps * config.ways * came) / _ARRIVING * to_us
    read = units * (laid + of_unit) + steps * config.ways * laid
    shared = (read / _SHARED + units * _UNIT_LOADS) * to_us
    of_bytes = nbytes / target("h200").read_bandwidth * 1e6
    fixed = _ARRANGE_US + rounds * (_BLOCK_US + _PARTS_US * (config.parts > 1))
    us = max(products, unpacking, shared, arriving, of_bytes) + fixed
    return Predicted(config, products, unpacking, shared, arriving, of_bytes, us)


def _blocks_at_once(config: Config, sm_count: int) -> int:
    """One an SM. Clusters of 4 do not fill the chip: its SMs come in groups of 16 and 18."""
    cluster = config.parts * config.share
    usable = sm_count if cluster <= 2 else sm_count * 120 // 132
    return max(1, usable // cluster) * cluster


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
        '128x256_w1_p1_c2'
        >>> choose((4096, 4096), 256, 9_900_000, 132).config.parts
        2
    """
    each = (predict(config, shape, tokens, nbytes, sm_count) for config in CANDIDATES)
    return min(each, key=lambda found: found.us)
