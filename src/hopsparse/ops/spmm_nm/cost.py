"""How long spmm_nm takes, predicted: what orders the candidates before anything is measured.

A block advances through k in units of 64 columns. A unit takes as long as the slowest of three:
the tensor cores and the shared memory they read, the bytes that arrive from L2, and, over all
blocks, the weight as it is read from device memory. Constants were fitted to the rows of
benchmarks/results/h200/spmm_nm_candidates.jsonl; docs/ops/spmm_nm.md says how far off they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .kernel import UNIT, Config

# SM clocks of the H200 under this load, and what one SM gets from L2 in one of them.
_CLOCK_GHZ = 1.6
_L2_BYTES = 50.0
_READ_BYTES_US = 4.0e6
_FIXED_US = 3.0
_TILE_CLOCKS = 1500.0
_TENSOR_SHARE = 0.9


@dataclass(frozen=True)
class Problem:
    """One product y[tokens, out] = x[tokens, k] @ w[out, k]^T of 16-bit values."""

    tokens: int
    out: int
    k: int


def blocks_at_once(config: Config, sm_count: int) -> int:
    """Blocks that run at one time, one an SM.

    Clusters of 4 do not fill the chip: its SMs come in groups of 16 and 18 (30 on an H200).
    """
    cluster = config.cluster_out * config.cluster_tokens
    usable = sm_count if cluster <= 2 else sm_count * 120 // 132
    return usable // cluster * cluster


def tiles(config: Config, problem: Problem) -> int:
    """Tiles of y, counted in whole clusters."""
    out = ceil(ceil(problem.out / config.out) / config.cluster_out) * config.cluster_out
    tokens = ceil(ceil(problem.tokens / config.tokens) / config.cluster_tokens)
    return out * tokens * config.cluster_tokens


def unit_clocks(config: Config) -> float:
    """Clocks of one unit of k in one tile."""
    panels = config.warpgroups * config.panels
    # Two instructions a panel: tokens / 2 clocks each, and 16 in which its A is read.
    tensor = 2 * panels * (config.tokens / 2 + 16) / _TENSOR_SHARE
    values = panels * 2 * 2048 / config.cluster_tokens + panels * 512
    tokens = config.tokens * 128 / config.cluster_out
    return max(tensor, (values + tokens) / _L2_BYTES)


def predicted_us(config: Config, problem: Problem, sm_count: int) -> float:
    """Device time of one product."""
    waves = ceil(tiles(config, problem) / blocks_at_once(config, sm_count))
    stages = ceil(problem.k / (UNIT * config.units))
    units = (stages + stages % 2) * config.units
    clocks = waves * (units * unit_clocks(config) + _TILE_CLOCKS)
    read = problem.out * problem.k * 1.125 / _READ_BYTES_US
    return _FIXED_US + max(clocks / (_CLOCK_GHZ * 1e3), read)
