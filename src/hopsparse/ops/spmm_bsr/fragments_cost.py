"""How long the kernel of small blocks takes, predicted: fragments.cuh's work and order in Python.

An item takes a norm of five times: the tensor cores, shared memory, the bytes from L2, passing
slabs on at all, and one warp waiting for its pieces. What one SM gets from L2 was fitted to the
other kernel (schedule.py), and storing takes half of what it takes there. The share of shared
memory, the clocks of a slab, the wait for a piece and the norm are fitted to the 18 times of these
tiles in benchmarks/results/h200/spmm_bsr.jsonl, and predictions are within 6 % of each; they were
taken at 2,048 tokens only.
"""

from __future__ import annotations

from math import ceil
from typing import Protocol

import torch
from torch import Tensor

from .fragments import SLAB, SLOTS, TILE
from .fragments_kernel import BEHIND, HELD, FragmentConfig
from .schedule import (
    CLOCKS_US,
    MEMORY_BYTES_US,
    W_BYTES,
    X_BYTES,
    Problem,
    blocks,
    finished_us,
    items,
    raster_group,
    token_tiles,
)

_ATOM = 8  # rows of a swizzle
_PRODUCTS = 1024.0  # of the tensor cores in a clock, by mma.sync: half of what wgmma has
_SHARED_BYTES, _SHARED_SHARE = 128.0, 0.73  # of an SM in a clock
_SLAB_CLOCKS = 580.0  # of a slab that has nothing
# Clocks from asking for a piece to having multiplied it, which is far more than L2 takes to answer:
# half of the tokens save a warp a fifth. And the longest slot of a strip over the mean.
_LATENCY, _LONGEST = 2010.0, 1.3
_NORM = 2.82  # low: the five hide each other badly
# Half of what the other kernel takes: a warp that stores leaves fifteen that multiply.
_TILE_CLOCKS, _PIECE_CLOCKS = 1500.0, 92.0


class Counted(Protocol):
    """The part of `Fragments` that a cost is counted from."""

    @property
    def height(self) -> int:
        """Fragments of a piece."""

    @property
    def pieces(self) -> int:
        """Of all slots."""

    @property
    def counts(self) -> Tensor:
        """Pieces of each strip, int64 [pairs, STRIPS], on the CPU."""

    @property
    def walked(self) -> Tensor:
        """Slabs of each pair, int64 [pairs], on the CPU."""


def rows_of_x(config: FragmentConfig, tokens: int) -> int:
    """Tokens that a block loads: its share of a tile, in atoms of 8.

    Example:
        >>> rows_of_x(FragmentConfig(1, tokens=128, cluster=2), 17)
        16
    """
    each = ceil(tokens / config.cluster)
    return min(config.tokens // config.cluster, -(-each // _ATOM) * _ATOM)


def item_clocks(config: FragmentConfig, w: Counted, tokens: int) -> Tensor:
    """Of each strip by the tokens of a tile, float64 [pairs, STRIPS]."""
    pieces = w.counts.double()
    slabs = w.walked.double()[:, None].expand_as(pieces)
    loaded = rows_of_x(config, tokens) * SLAB * 2
    products = pieces * TILE * TILE * config.height * config.tokens
    shared = pieces * config.tokens * TILE * 2 + slabs * config.cluster * loaded
    weights = pieces * TILE * TILE * 2 * config.height
    in_flight = HELD[config.height] + BEHIND[config.height]
    terms = torch.stack(
        [
            products / _PRODUCTS,
            shared / (_SHARED_BYTES * _SHARED_SHARE),
            slabs * loaded / X_BYTES + weights / W_BYTES,
            slabs * _SLAB_CLOCKS,
            pieces / SLOTS * _LONGEST * _LATENCY / in_flight,
        ]
    )
    stored = _TILE_CLOCKS + _PIECE_CLOCKS * config.rows / 64 * config.tokens / TILE
    longest: Tensor = torch.linalg.vector_norm(terms, _NORM, dim=0)
    return longest + stored


def busy_clocks(config: FragmentConfig, w: Counted, tokens: int, sm_count: int) -> Tensor:
    """Clocks of every cluster of a grid, float64 [clusters]."""
    # A cluster goes on to its next item when both of its blocks have done this one.
    each = item_clocks(config, w, tokens).view(-1, config.cluster).amax(1)
    tiles = token_tiles(config, tokens)
    ranks, _ = items(each.numel(), tiles, raster_group(config, tokens))
    clusters = max(1, min(ranks.numel(), sm_count // config.cluster))
    owner = blocks(ranks.numel(), clusters)
    return torch.zeros(clusters, dtype=torch.float64).index_add_(0, owner, each[ranks])


def predicted_us(config: FragmentConfig, w: Counted, problem: Problem, sm_count: int) -> float:
    """Device time of one product.

    Args:
        config: The tile.
        w: The weight's layout.
        problem: Sizes.
        sm_count: SMs of the GPU.
    """
    clocks = float(busy_clocks(config, w, problem.tokens, sm_count).max())
    moved = w.pieces * TILE * TILE * 2 * w.height + 2 * problem.tokens * (problem.out + problem.k)
    return finished_us(clocks / CLOCKS_US, moved / MEMORY_BYTES_US)
