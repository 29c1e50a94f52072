"""A weight as bits and values, in the order in which lanes of tensor cores hold them.

A unit is 64 rows by 64 columns, 16 tiles of 16 x 16: those of the first 16 columns from the top
down, then those of the next. A tile is four blocks of 8 x 8: left top, left bottom, right top, then
right bottom. A block is two words of 32 bits, its upper and its lower four rows, entry by entry.
Values of a unit are in the order tile, block, word, bit, and start on 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .tiles import BLOCK, PIECE, ROOMS, TILE, UNIT, UNIT_TILES, UNIT_WORDS


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight [out, k], on its device.

    Attributes:
        shape: Rows and columns.
        words: int32 [units, 16 tiles, 2, 4 blocks]: bits of the upper words, then of the lower.
        prefixes: int16, likewise: values of the unit before those of a word.
        values: 16-bit floats, units one after the other, filled up to 16 bytes with zeros.
        starts: int32 [units + 1]: where those of a unit start, in 16 bytes.
        room: The one of `ROOMS` that holds the values of every unit.
    """

    shape: tuple[int, int]
    words: Tensor
    prefixes: Tensor
    values: Tensor
    starts: Tensor
    room: int

    @property
    def units(self) -> int:
        """Units of a panel of 64 rows."""
        return -(-self.shape[1] // UNIT)

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(part.nbytes for part in (self.words, self.prefixes, self.values, self.starts))


def pack(indptr: Tensor, indices: Tensor, values: Tensor, cols: int) -> Packed | None:
    """Pack a CSR matrix of 16-bit values; None where an entry repeats. It waits for the device.

    Args:
        indptr: [rows + 1].
        indices: [nnz], in any order.
        values: [nnz].
        cols: Columns.

    Example:
        >>> ends = torch.tensor([0, 1]), torch.tensor([3]), torch.ones(1).half()
        >>> pack(*ends, 64).words[0, 0, 0].tolist()
        [8, 0, 0, 0]
    """
    rows, device = indptr.numel() - 1, indices.device
    units = -(-cols // UNIT)
    count = -(-rows // UNIT) * units
    row, col = torch.repeat_interleave(indptr.diff()), indices.long()
    unit = row // UNIT * units + col // UNIT
    tile = col % UNIT // TILE * (UNIT // TILE) + row % UNIT // TILE
    block = col % TILE // BLOCK * 2 + row % TILE // BLOCK
    key = ((unit * UNIT_TILES + tile) * 4 + block) * 64 + row % BLOCK * BLOCK + col % BLOCK
    key, order = key.sort()
    if bool((key[1:] == key[:-1]).any()):
        return None
    word = key // 32  # units, tiles, blocks, halves
    words = torch.zeros(count * UNIT_WORDS, dtype=torch.int64, device=device)
    words.index_add_(0, word, torch.ones_like(word) << key % 32)
    held = torch.bincount(word, minlength=count * UNIT_WORDS).view(count, UNIT_WORDS)
    prefixes, of_unit = held.cumsum(1) - held, held.sum(1)
    starts = torch.zeros(count + 1, dtype=torch.int64, device=device)
    torch.cumsum(-(-of_unit // PIECE), 0, out=starts[1:])
    place = starts[key // (32 * UNIT_WORDS)] * PIECE
    first = (of_unit.cumsum(0) - of_unit)[key // (32 * UNIT_WORDS)]
    filled = values.new_zeros(int(starts[-1]) * PIECE)
    filled[place + torch.arange(key.numel(), device=device) - first] = values[order]
    most = int(of_unit.max())
    return Packed(
        (rows, cols),
        _by_halves(words).to(torch.int32),
        _by_halves(prefixes).to(torch.int16),
        filled,
        starts.to(torch.int32),
        next(room for room in ROOMS if most <= room),
    )


def fragments(x: Tensor, tiles: int) -> Tensor:
    """Tokens as lanes of tensor cores hold them.

    Args:
        x: [tokens, k], 16-bit floats.
        tiles: Blocks of eight tokens that a block of the kernel has.

    Returns:
        [token blocks, k in 16s, tiles, 32 lanes, 4], zeros behind the last token and column.
    """
    tokens, k = x.shape
    blocks, columns = -(-tokens // (8 * tiles)), -(-k // UNIT) * UNIT
    x = F.pad(x, (0, columns - k, 0, blocks * 8 * tiles - tokens))
    lanes = x.reshape(blocks, tiles, 8, columns // TILE, 2, 4, 2)
    return lanes.permute(0, 3, 1, 2, 5, 4, 6).reshape(blocks, columns // TILE, tiles, 32, 4)


def _by_halves(words: Tensor) -> Tensor:
    """From block before half to half before block."""
    return words.view(-1, UNIT_TILES, 4, 2).transpose(2, 3).contiguous()
