"""A block-sparse weight as the kernel of small blocks reads it: fragments, slot by slot.

A slot is 16 or 32 rows, the part of a strip that one warp has; a strip is 16 slots, a pair is two
strips. A piece is 16 columns of a slot, in the order in which mma.sync has its operand A in
registers. Slots have their pieces in the order of k, by slabs of 128 columns; a pair walks those
slabs that any slot of it has pieces in.

Made once, on the device of the weight, and the same on every device: tests read it on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import Tensor

from ...formats.bsr import BSR

TILE = 16  # rows and columns of one fragment
SLOTS = 16  # of a strip: warps that multiply
STRIPS = 2  # of a pair: blocks of a cluster
SLAB = 128  # columns of k that arrive together
COLUMNS = SLAB // TILE  # a word is 8 x the slab, as the pair counts them, + its column there
_QUARTERS = 4  # of an SM: warps of one share tensor cores


def height_of(block: tuple[int, int]) -> int | None:
    """Fragments of a slot, one below the other, for blocks of these sides; None if none fits.

    Example:
        >>> height_of((16, 16)), height_of((32, 64)), height_of((8, 16)), height_of((16, 24))
        (1, 2, None, None)
    """
    if block[0] % TILE or block[1] % TILE:
        return None
    return 2 if block[0] % (2 * TILE) == 0 else 1


@dataclass(frozen=True, eq=False)
class Fragments:
    """Where the pieces of a weight come from; nothing in it changes when values do.

    Attributes:
        height: Fragments of a piece: a slot has 16 x as many rows.
        words: 8 x slab + column of each piece, int32 [pieces].
        source: Which 16 x 16 tile of the stored values each fragment is, int32 [pieces,
            height]; tiles are counted by stored block, then rows, then columns; one past the last
            where nothing is stored, which a piece of two lower blocks may have.
        slots: First row, first piece, end of its pieces, 0, int32 [pairs, STRIPS, SLOTS, 4].
        slabs: Which slab of k each slab of a pair is, int32 [slabs of all pairs].
        pairs: Pair, its first slab, its number of slabs, 0: int32 [pairs, 4], the one with the most
            pieces first; equal ones in order.
        counts: Pieces of each strip, as `pairs` is ordered, int64 [pairs, STRIPS], on the CPU.
        walked: Slabs of each pair, in that order, int64 [pairs], on the CPU.
    """

    height: int
    words: Tensor
    source: Tensor
    slots: Tensor
    slabs: Tensor
    pairs: Tensor
    counts: Tensor
    walked: Tensor

    @property
    def rows(self) -> int:
        """Rows of a strip."""
        return SLOTS * TILE * self.height

    @cached_property
    def pieces(self) -> int:
        """Of all slots."""
        return self.words.numel()

    def pack(self, values: Tensor) -> Tensor:
        """The weights of all pieces, as lanes have them in registers.

        Args:
            values: As `BSR.values`, of 16 bits: blocks that `height_of` has a height for.

        Returns:
            [pieces, height, 32 lanes, 8]: lane i has rows i / 4 and i / 4 + 8; of each, first
            the columns 2 (i % 4), + 1, then those 8 further.
        """
        bits = values.detach().contiguous().view(torch.int16)
        count, height, width = bits.shape
        shape = (count, height // TILE, 2, 8, width // TILE, 2, 4, 2)
        # Block, its rows of tiles, rows 8 apart, rows; columns of tiles, columns 8 apart, pairs.
        lanes = bits.view(shape).permute(0, 1, 4, 3, 6, 5, 2, 7).reshape(-1, 32, 8)
        lanes = torch.cat([lanes, lanes.new_zeros(1, 32, 8)])
        return lanes[self.source.long()].view(values.dtype)


def fragments_of(w: BSR, height: int | None = None) -> Fragments:
    """Lay out a weight whose blocks have multiples of 16 rows and columns.

    Reads counts back from the device of w.

    Args:
        w: [out, k], in any dtype.
        height: Fragments of a piece, 1 or 2; None is `height_of` its blocks.

    Example:
        >>> w = BSR.from_dense(torch.eye(64, dtype=torch.bfloat16), (16, 16))
        >>> fragments_of(w).words[:4].tolist(), fragments_of(w).slots[0, 0, :4, 0].tolist()
        ([0, 1, 2, 3], [0, 16, 32, 48])
        >>> fragments_of(w, height=2).slots[0, 0, :4, 1:3].tolist()
        [[0, 2], [2, 4], [4, 4], [4, 4]]
    """
    height = height or height_of(w.block)
    assert height is not None  # Whoever chose this layout asked.
    (out, k), device = w.shape, w.device
    rows, slots_of_pair = TILE * height, STRIPS * SLOTS
    pair_count = ceil(out / (rows * slots_of_pair))
    slab_count = ceil(k / SLAB)
    tile_row, tile_column, tile = _tiles(w)
    pieces, of_tile = torch.unique(
        tile_row // height * (slab_count * COLUMNS) + tile_column, return_inverse=True
    )
    row, column = pieces // (slab_count * COLUMNS), pieces % (slab_count * COLUMNS)
    nothing = w.values.numel() // (TILE * TILE)
    source = torch.full((len(pieces), height), nothing, dtype=torch.int32, device=device)
    source[of_tile, tile_row % height] = tile.to(torch.int32)
    keys, ordinal = torch.unique(
        row // slots_of_pair * slab_count + column // COLUMNS, return_inverse=True
    )
    walked = torch.bincount(keys // slab_count, minlength=pair_count)
    first_slab = walked.cumsum(0) - walked
    word = (ordinal - first_slab[row // slots_of_pair]) * COLUMNS + column % COLUMNS
    counts = torch.bincount(row, minlength=pair_count * slots_of_pair)
    ends = counts.cumsum(0)
    slots = torch.stack(
        [torch.arange(counts.numel(), device=device) * rows, ends - counts, ends, 0 * ends], 1
    ).view(pair_count * STRIPS, SLOTS, 4)
    slots = slots.gather(1, _dealt(counts.view(-1, SLOTS))[:, :, None].expand(-1, -1, 4))
    of_strip = counts.view(pair_count, STRIPS, SLOTS).sum(2)
    by_work = of_strip.amax(1).argsort(descending=True, stable=True)
    pairs = torch.stack([by_work, first_slab[by_work], walked[by_work], 0 * by_work], 1)
    return Fragments(
        height,
        word.to(torch.int32),
        source,
        slots.view(pair_count, STRIPS, SLOTS, 4).to(torch.int32).contiguous(),
        (keys % slab_count).to(torch.int32),
        pairs.to(torch.int32).contiguous(),
        of_strip[by_work].cpu(),
        walked[by_work].cpu(),
    )


def _tiles(w: BSR) -> tuple[Tensor, Tensor, Tensor]:
    """Every stored 16 x 16 tile inside the matrix: its row and its column in tiles, its number."""
    (block_height, block_width), (out, k), device = w.block, w.shape, w.device
    down, across = block_height // TILE, block_width // TILE
    kept = (w.indices >= 0).nonzero()[:, 0]
    block_row = torch.repeat_interleave(w.indptr.diff())[kept]
    below = torch.arange(down, device=device)[:, None]
    beside = torch.arange(across, device=device)[None, :]
    row = block_row[:, None, None] * down + below + 0 * beside
    column = w.indices[kept].long()[:, None, None] * across + 0 * below + beside
    tile = (kept[:, None, None] * down + below) * across + beside
    inside = (row * TILE < out) & (column * TILE < k)
    return row[inside], column[inside], tile[inside]


def _dealt(counts: Tensor) -> Tensor:
    """Which slot each warp has: dealt to the quarters of an SM forth and back, the longest first.

    Args:
        counts: Pieces of each slot, [strips, SLOTS].
    """
    longest = counts.argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(SLOTS, device=counts.device)
    turn, place = rank // _QUARTERS, rank % _QUARTERS
    warp = turn * _QUARTERS + torch.where(turn % 2 == 0, place, _QUARTERS - 1 - place)
    slots = torch.empty_like(longest)
    slots[:, warp] = longest
    return slots
