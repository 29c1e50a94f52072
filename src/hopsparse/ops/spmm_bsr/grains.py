"""What a weight costs in each grain: the cells that a kernel takes as a whole, stored or not.

A tile of either kernel multiplies cells of one size: strips of 64 or 128 rows by places of 16, 32
or 64 columns, slots of 16 or 32 rows by pieces of 16. A cell of which any block keeps something is
multiplied whole. The grain of a weight's own blocks multiplies no more zeros than their kernel
must; a coarser one multiplies more and moves less, which pays where neighbouring blocks are kept
together, and a finer one never fills up at all.

Everything is counted from the pattern, at the size of the blocks, and stays on the CPU.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd

import torch
from torch import Tensor

from ...formats.bsr import BSR
from .fragments import SLAB, SLOTS, STRIPS, TILE, height_of
from .fragments_kernel import FragmentConfig
from .kernel import PANEL, STEP, WIDTHS, Config
from .strips import panels_of, steps_of, width_of

Grain = tuple[int, int]

#: Rows and columns of the cells of all tiles: those of wgmma, then those of mma.sync.
OF_STRIPS: tuple[Grain, ...] = ((2 * PANEL, STEP), *((PANEL, width) for width in WIDTHS))
OF_FRAGMENTS: tuple[Grain, ...] = ((TILE, TILE), (2 * TILE, TILE))


def grain_of(config: Config | FragmentConfig) -> Grain:
    """Rows and columns of what a tile takes as a whole.

    Example:
        >>> grain_of(FragmentConfig(2, tokens=64, cluster=2)), grain_of(Config(2, 128, 64, 4))
        ((32, 16), (128, 64))
    """
    if isinstance(config, Config):
        return config.rows, config.width
    return TILE * config.height, TILE


def own_grains(block: tuple[int, int]) -> tuple[Grain, ...]:
    """The grain of each kernel that is nearest to blocks of these sides.

    Where wgmma multiplies no zeros, mma.sync has none.

    Example:
        >>> own_grains((16, 16)), own_grains((64, 64)), own_grains((8, 16)), own_grains((8, 8))
        (((64, 16), (16, 16)), ((64, 64),), ((64, 16),), ())
    """
    width, height = width_of(block), height_of(block)
    if width is None:
        return ()
    strips = (PANEL * panels_of(block), width)
    if height is None or not (block[0] % PANEL or block[1] % STEP):
        return (strips,)
    return strips, (TILE * height, TILE)


def grains_for(block: tuple[int, int]) -> tuple[Grain, ...]:
    """Every grain that a weight in blocks of these sides may run in, its own first.

    Example:
        >>> grains_for((64, 64))[:3], grains_for((8, 16))[1:]
        (((64, 64), (128, 64), (64, 32)), ((128, 64), (64, 64), (64, 32)))
    """
    own = own_grains(block)
    if not own:
        return ()
    every = OF_STRIPS if height_of(block) is None else (*OF_STRIPS, *OF_FRAGMENTS)
    return tuple(dict.fromkeys((*own, *every)))


@dataclass(frozen=True, eq=False)
class StripCounts:
    """What strips of a grain multiply.

    Attributes:
        lengths: Steps of each strip, falling, on the CPU: `Strips.lengths`.
        cells: Cells that hold anything.
    """

    lengths: Tensor
    cells: int


@dataclass(frozen=True, eq=False)
class PieceCounts:
    """What pieces of a grain multiply: the part of `Fragments` that a cost is counted from.

    Attributes:
        height: Fragments of a piece.
        counts: Pieces of each strip, int64 [pairs, STRIPS]: `Fragments.counts`.
        walked: Slabs of each pair, int64 [pairs]: `Fragments.walked`.
    """

    height: int
    counts: Tensor
    walked: Tensor

    @cached_property
    def pieces(self) -> int:
        """Of all slots."""
        return int(self.counts.sum())

    @property
    def cells(self) -> int:
        """Cells that hold anything."""
        return self.pieces


Counts = StripCounts | PieceCounts


def counts_of(w: BSR, grain: Grain) -> Counts:
    """What a weight multiplies in a grain; its values are not read.

    Args:
        w: [out, k], blocks that the grain is one of `grains_for`.
        grain: Rows and columns of a cell.

    Example:
        >>> w = BSR.from_dense(torch.eye(128, dtype=torch.bfloat16), (16, 16))
        >>> counts_of(w, (64, 64)).lengths.tolist(), counts_of(w, (16, 16)).pieces
        ([1, 1], 8)
    """
    if grain in OF_FRAGMENTS:
        return _pieces(w, grain)
    rows, width = grain
    row, _ = cells(w, grain)
    used = torch.bincount(row, minlength=ceil(w.shape[0] / rows))
    lengths = steps_of(used, STEP // width).sort(descending=True).values
    return StripCounts(lengths.cpu(), row.numel())


def cells(w: BSR, grain: Grain) -> tuple[Tensor, Tensor]:
    """Row and column, in cells, of each that holds a stored block or a part of one, row by row.

    Args:
        w: [out, k].
        grain: Rows and columns of a cell, of any size.
    """
    (height, width), (rows, columns), (out, k) = w.block, grain, w.shape
    # What is as large as this lies in one block and in one cell.
    small = gcd(height, rows), gcd(width, columns)
    kept = (w.indices >= 0).nonzero()[:, 0]
    block_row = torch.repeat_interleave(w.indptr.diff())[kept]
    below = torch.arange(0, height, small[0], device=w.device)[:, None]
    beside = torch.arange(0, width, small[1], device=w.device)[None, :]
    row = block_row[:, None, None] * height + below + 0 * beside
    column = w.indices[kept].long()[:, None, None] * width + 0 * below + beside
    inside = (row < out) & (column < k)
    across = ceil(k / columns)
    keys = torch.unique(row[inside] // rows * across + column[inside] // columns)
    return keys // across, keys % across


def _pieces(w: BSR, grain: Grain) -> PieceCounts:
    row, column = cells(w, grain)
    pair_count = ceil(w.shape[0] / (grain[0] * STRIPS * SLOTS))
    slabs = ceil(w.shape[1] / SLAB)
    pair = row // (STRIPS * SLOTS)
    passed = torch.unique(pair * slabs + column // (SLAB // TILE)) // slabs
    walked = torch.bincount(passed, minlength=pair_count)
    strips = torch.bincount(row // SLOTS, minlength=pair_count * STRIPS).view(pair_count, STRIPS)
    order = strips.amax(1).argsort(descending=True, stable=True)
    return PieceCounts(grain[0] // TILE, strips[order].cpu(), walked[order].cpu())


def multiplied(w: BSR, grain: Grain, counts: Counts) -> float:
    """Entries that are multiplied in a grain over those of all its strips or slots and of k.

    Steps that are filled up count as they are.

    Example:
        >>> w = BSR.from_dense(torch.eye(128, dtype=torch.bfloat16), (16, 16))
        >>> [multiplied(w, each, counts_of(w, each)) for each in ((64, 64), (128, 64))]
        [0.5, 1.0]
    """
    (rows, columns), k = grain, w.shape[1]
    if isinstance(counts, StripCounts):
        return int(counts.lengths.sum()) * STEP / (counts.lengths.numel() * k)
    return counts.pieces * columns / (ceil(w.shape[0] / (rows * SLOTS)) * SLOTS * k)


def stored(w: BSR) -> int:
    """Entries inside the matrix that stored blocks hold.

    Example:
        >>> stored(BSR.from_dense(torch.ones(40, 40), (32, 32)))
        1600
    """
    (height, width), (out, k) = w.block, w.shape
    row, column = cells(w, w.block)
    rows = (out - row * height).clamp_max(height)
    return int((rows * (k - column * width).clamp_max(width)).sum())


def digest(w: BSR) -> str:
    """What a pattern is known by in tuning results: SHA-256 of its sides and places.

    Values do not count. Reads the places back from the device of w.

    Example:
        >>> w = BSR.from_dense(torch.eye(64), (16, 16))
        >>> digest(w) == digest(BSR.from_dense(2 * torch.eye(64), (16, 16)))
        True
        >>> digest(w) == digest(BSR.from_dense(torch.ones(64, 64), (16, 16)))
        False
    """
    found = hashlib.sha256(repr((w.shape, w.block)).encode())
    for part in (w.indptr, w.indices):
        found.update(part.to("cpu", torch.int64).numpy().tobytes())
    return found.hexdigest()[:16]
