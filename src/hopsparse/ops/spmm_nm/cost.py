"""How long spmm_nm takes, predicted: what orders the candidates before anything is measured.

A block advances through k in units of 64 columns. A unit takes as long as the slowest of three: the
tensor cores with the shared memory that they read, the bytes that arrive from L2, and the time that
passing a stage takes at all. Beside that, weight and result cross the memory bus once. Where two
are close the sum is longer than either: a p-norm. The constants were fitted to
benchmarks/results/h200/spmm_nm_candidates.jsonl; docs/ops/spmm_nm.md says how far off they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import ceil

from .kernel import Config

_CLOCKS_US = 1650.0  # SM clocks of a microsecond
_TENSOR_SHARE = 0.749  # of the rate at which an instruction is bound by its operands alone
_L2_BYTES = 74.0  # that one SM gets in a clock
_LEAST_CLOCKS = 145.0  # of a unit
_UNIT_NORM = 4.8
_TILE_CLOCKS, _PIECE_CLOCKS = 537.0, 37.6  # of storing a tile, and 64 x 16 of it
_PARTS_CLOCKS, _PART_PIECE_CLOCKS = (
    703.0,
    294.0,
)  # of adding parts, and 64 x 16 of one
_LEAST_STAGES = 4
_MEMORY_BYTES_US = 3.91e6
_FIXED_US, _CLUSTER_US = 2.05, 0.29  # of a launch, and more of one in clusters
_TOTAL_NORM = 4.6
_ATOM = 8  # rows of the 128-byte swizzle


@dataclass(frozen=True)
class Problem:
    """One product y[tokens, out] = x[tokens, k] @ w[out, k]^T."""

    tokens: int
    out: int
    k: int


def stages_of_k(config: Config, problem: Problem) -> int:
    """Stages that a block walks: its part of k, rounded up to an even number."""
    stages = ceil(problem.k / (config.columns * config.cluster_k))
    return stages + stages % 2


def suits(config: Config, problem: Problem, sm_count: int) -> bool:
    """Whether all blocks of a cluster have work, and only SMs that were idle share a tile."""
    if config.cluster_k > 1 and (
        stages_of_k(config, problem) < _LEAST_STAGES
        or tiles(config, problem) * config.cluster_k > blocks_at_once(config, sm_count)
    ):
        return False
    return (
        ceil(problem.tokens / config.tokens) >= config.cluster_tokens
        and ceil(problem.out / config.out) >= config.cluster_out
    )


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


def unit_clocks(config: Config, tokens: int) -> float:
    """Clocks of one unit of k in one tile; of a problem of so many tokens."""
    panels = config.warpgroups * config.panels
    # Two instructions a panel: tokens / 2 clocks each, and 16 in which its A is read.
    tensor = 2 * panels * (config.tokens / 2 + 16) / _TENSOR_SHARE
    values = panels * config.value_bytes / config.cluster_tokens + panels * 512 * config.words
    rows = rows_of_x(config, tokens) * 128
    return _norm(_UNIT_NORM, tensor, (values + rows) / _L2_BYTES, _LEAST_CLOCKS)


def predicted_us(config: Config, problem: Problem, sm_count: int) -> float:
    """Device time of one product."""
    waves = ceil(tiles(config, problem) * config.cluster_k / blocks_at_once(config, sm_count))
    units = stages_of_k(config, problem) * config.units
    pieces = config.out // 64 * config.tokens / 16
    tile = _TILE_CLOCKS + _PIECE_CLOCKS * pieces
    if config.cluster_k > 1:
        tile += _PARTS_CLOCKS + _PART_PIECE_CLOCKS * pieces * (config.cluster_k - 1)
    clocks = waves * (units * unit_clocks(config, problem.tokens) + tile)
    stored = (4 if config.four_bit_w else config.bits) / 16 + 1 / 8  # bytes of w an entry
    moved = problem.out * (problem.k * stored + problem.tokens * 2)
    fixed = _FIXED_US + (_CLUSTER_US if config.cluster > 1 else 0)
    return fixed + _norm(_TOTAL_NORM, clocks / _CLOCKS_US, moved / _MEMORY_BYTES_US)


def _norm(p: float, *terms: float) -> float:
    most = max(terms)
    return most * math.pow(sum(math.pow(term / most, p) for term in terms), 1 / p)
