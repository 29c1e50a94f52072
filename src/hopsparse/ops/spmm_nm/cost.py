"""How long spmm_nm takes, predicted: what orders the candidates before anything is measured.

A block advances through k in units of 128 bytes of a token: 64 columns of 16 bits, 128 of 8. A unit
takes as long as the slowest of three: the tensor cores with the shared memory that they read, the
bytes that arrive from L2, and the time that passing a stage takes at all. Where sums leave the
tensor cores at every stage there is a fourth: what one warpgroup multiplies and then adds, while
the others multiply. Beside that, weight and result cross the memory bus once. Where two are close
the sum is longer than either: a p-norm. `FITTED` has the constants, by bits of an entry;
docs/ops/spmm_nm.md says how far off those of 16 bits are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from operator import index
from typing import SupportsIndex

from ...errors import ArgumentError, UnsupportedError
from .kernel import Config

_LEAST_STAGES = 4
_ATOM = 8  # rows of the 128-byte swizzle


@dataclass(frozen=True)
class Constants:
    """What is fitted to measured times; the defaults are of 16 bits.

    Attributes:
        clocks_us: SM clocks of a microsecond.
        tensor_share: Of the rate at which an instruction is bound by its operands alone.
        l2_bytes: That one SM gets in a clock.
        least_clocks: Of a unit.
        widen_clocks: More, of a unit of a panel whose kept values are widened.
        unit_norm: Exponent of a unit's norm.
        tile_clocks: Of storing a tile, whatever its size.
        piece_clocks: Of 64 x 16 of it.
        ways_clocks: Of adding the sums of one more warpgroup of a team.
        way_piece_clocks: Of 64 x 16 of them.
        parts_clocks: Of adding parts of k.
        part_piece_clocks: Of 64 x 16 of one part.
        promote_clocks: Of waiting for the products of one stage, where sums are promoted.
        widen_x_clocks: Of a unit of x that a block widens from 4 bits.
        widen_token_clocks: More, of each token of it.
        pass_us: Of one more launch, that widens x once for all blocks.
        pass_bytes_us: Bytes that it reads and writes in a microsecond.
        memory_bytes_us: Bytes of memory that all SMs get in a microsecond.
        fixed_us: Of a launch.
        cluster_us: More, of one in clusters.
        total_norm: Exponent of the norm of the whole.
        least_tokens: Of the rows that they were fitted to.
    """

    clocks_us: float = 1650.0
    tensor_share: float = 0.749
    l2_bytes: float = 74.0
    least_clocks: float = 145.0
    widen_clocks: float = 124.0
    unit_norm: float = 4.8
    tile_clocks: float = 537.0
    piece_clocks: float = 37.6
    ways_clocks: float = 3262.0
    way_piece_clocks: float = 716.0
    parts_clocks: float = 703.0
    part_piece_clocks: float = 294.0
    promote_clocks: float = 0.0
    widen_x_clocks: float = 390.0
    widen_token_clocks: float = 6.25
    pass_us: float = 1.9
    pass_bytes_us: float = 2.5e6
    memory_bytes_us: float = 3.91e6
    fixed_us: float = 2.05
    cluster_us: float = 0.29
    total_norm: float = 4.6
    least_tokens: int = 1


#: What widening x costs in a block follows from e4m3 2:4 x int4 in four_bits.jsonl: 420 to 520
#: clocks a unit of 16 tokens, 790 of 64, 1,180 of 128 and 2,020 of 256. A pass of its own costs
#: what its bytes do. Widening w, and teams, are fitted to spmm_nm_int4_candidates.jsonl.
#: By bits of an entry, fitted to spmm_nm_candidates.jsonl and spmm_nm_scaled_candidates.jsonl of
#: benchmarks/results/h200. What decides below 256 tokens is in 8 bits that of 16.
FITTED = {
    16: Constants(),
    8: Constants(
        tensor_share=0.671,
        l2_bytes=69.1,
        unit_norm=9.0,
        tile_clocks=2184.0,
        piece_clocks=7.7,
        promote_clocks=157.0,
        cluster_us=0.187,
        total_norm=3.52,
        least_tokens=256,
    ),
}


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


def counted(max_tokens: SupportsIndex) -> int:
    """Most tokens that are prepared for, as a whole number.

    Raises:
        ArgumentError: It is none above zero.
    """
    try:
        count = index(max_tokens)
    except TypeError:
        count = 0
    if count < 1:
        raise ArgumentError(
            f"max_tokens={max_tokens!r}", need="a whole number above 0", hint="max_tokens=4096"
        )
    return count


def stages_of_k(config: Config, problem: Problem) -> int:
    """Stages that a block walks: its part of k, rounded up to an even number for each of a team."""
    stages = ceil(problem.k / (config.columns * config.cluster_k))
    return -(-stages // (2 * config.ways)) * 2 * config.ways


def suits(config: Config, problem: Problem, sm_count: int) -> bool:
    """Whether all blocks of a cluster have work, and only SMs that were idle share a tile."""
    if blocks_at_once(config, sm_count) < 1:
        return False
    if config.cluster_k > 1 and (
        stages_of_k(config, problem) < _LEAST_STAGES
        or tiles(config, problem) * config.cluster_k > blocks_at_once(config, sm_count)
    ):
        return False
    return (
        ceil(problem.tokens / config.tokens) >= config.cluster_tokens
        and ceil(problem.out / config.out) >= config.cluster_out
    )


def fastest(ordered: Sequence[Config], problem: Problem, sm_count: int) -> Config:
    """The first of the tiles that suit a problem.

    Raises:
        UnsupportedError: There is none: the GPU has no SM.
    """
    if not ordered:
        raise UnsupportedError(
            f"{problem} on {sm_count} SMs", need="a GPU with an SM or more", hint="132, of an H200"
        )
    return ordered[0]


def rows_of_x(config: Config, tokens: int) -> int:
    """Rows of x that a block loads at a time: its slice of a tile, in atoms of 8 rows.

    Example:
        >>> rows_of_x(Config(2, 1, tokens=128, units=1, stages=2), 17)
        24
    """
    each = ceil(tokens / config.cluster_out)
    return min(config.tokens // config.cluster_out, -(-each // _ATOM) * _ATOM)


def blocks_at_once(config: Config, sm_count: int) -> int:
    """Blocks that run at one time, one an SM.

    Clusters of 4 do not fill the chip: its SMs come in groups of 16 and 18 (30 on an H200).
    """
    usable = sm_count if config.cluster <= 2 else sm_count * 120 // 132
    return usable // config.cluster * config.cluster


def tiles(config: Config, problem: Problem) -> int:
    """Tiles of y, counted in whole clusters."""
    out = ceil(ceil(problem.out / config.out) / config.cluster_out) * config.cluster_out
    tokens = ceil(ceil(problem.tokens / config.tokens) / config.cluster_tokens)
    return out * tokens * config.cluster_tokens


def widen_once_us(problem: Problem) -> float:
    """Device time of a pass that widens x from 4 bits to 8, ahead of the product.

    Example:
        >>> round(widen_once_us(Problem(1024, 4096, 4096)), 1)
        4.4
    """
    fitted = FITTED[8]
    return fitted.pass_us + 1.5 * problem.tokens * problem.k / fitted.pass_bytes_us


def unit_clocks(
    config: Config, tokens: int, *, promoted: bool = False, widened_x: bool = False
) -> float:
    """Clocks of one unit of k in one tile; of a problem of so many tokens."""
    fitted = FITTED[config.bits]
    panels = config.all_panels
    # Two instructions a panel: tokens / 2 clocks each, and 16 in which its A is read.
    tensor = 2 * panels * (config.tokens / 2 + 16) / fitted.tensor_share
    values = panels * config.value_bytes / config.cluster_tokens + panels * 512 * config.words
    rows = rows_of_x(config, tokens) * 128
    least = fitted.least_clocks + config.panels * fitted.widen_clocks * config.four_bit_w
    terms = [tensor, (values + rows) / fitted.l2_bytes, least / config.ways]
    if widened_x:
        terms.append(fitted.widen_x_clocks + fitted.widen_token_clocks * config.tokens)
    if promoted:  # An addition for each sum of a thread, once a stage.
        left = config.panels * config.tokens / 2 + fitted.promote_clocks
        terms.append(tensor / config.warpgroups + left / (config.units * config.ways))
    return _norm(fitted.unit_norm, *terms)


def predicted_us(
    config: Config,
    problem: Problem,
    sm_count: int,
    *,
    promoted: bool = False,
    widened_x: bool = False,
    result_bytes: float = 2.0,
) -> float:
    """Device time of one product.

    Args:
        config: The tile.
        problem: Sizes.
        sm_count: SMs of the GPU.
        promoted: Whether sums leave the tensor cores at every stage.
        widened_x: Whether every block widens its tokens from 4 bits.
        result_bytes: Of a token's result, for each row of w.
    """
    fitted = FITTED[config.bits]
    waves = ceil(tiles(config, problem) * config.cluster_k / blocks_at_once(config, sm_count))
    units = stages_of_k(config, problem) * config.units
    pieces = config.out // 64 * config.tokens / 16
    tile = fitted.tile_clocks + fitted.piece_clocks * pieces
    if config.ways > 1:
        tile += (config.ways - 1) * (fitted.ways_clocks + fitted.way_piece_clocks * pieces)
    if config.cluster_k > 1:
        tile += fitted.parts_clocks + fitted.part_piece_clocks * pieces * (config.cluster_k - 1)
    unit = unit_clocks(config, problem.tokens, promoted=promoted, widened_x=widened_x)
    clocks = waves * (units * unit + tile)
    # Bytes of w an entry: half the values, 2 bits for each.
    stored = (4 if config.four_bit_w else config.bits) / 16 + 1 / 8
    moved = problem.out * (problem.k * stored + problem.tokens * result_bytes)
    fixed = fitted.fixed_us + (fitted.cluster_us if config.cluster > 1 else 0)
    return fixed + _norm(
        fitted.total_norm, clocks / fitted.clocks_us, moved / fitted.memory_bytes_us
    )


def _norm(p: float, *terms: float) -> float:
    most = max(terms)
    return most * math.pow(sum(math.pow(term / most, p) for term in terms), 1 / p)
