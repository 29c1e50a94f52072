"""A weight as bits and values, in the order in which lanes of tensor cores hold them.

A unit is 64 rows by 64 columns, 16 tiles of 16 x 16: those of the first 16 columns from the top
down, then those of the next. Four lanes share a row of a tile and have four neighbouring columns of
it each, of this row and of the one eight below: first two columns of both rows, then the other two.
A word of 32 bits has the entries of four lanes. Values of a unit are in the order tile, lane,
entry, and start on 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .tiles import PIECE, ROOMS, TILE, UNIT, UNIT_TILES, UNIT_WORDS


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight [out, k], on its device.

    Attributes:
        shape: Rows and columns.
        words: int32 [units, 4 columns of tiles, 8 times four lanes, 4 tiles]: bits.
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
        [32, 0, 0, 0]
    """
    rows, device = indptr.numel() - 1, indices.device
    units = -(-cols // UNIT)
    count = -(-rows // UNIT) * units
    row, col = torch.repeat_interleave(indptr.diff()), indices.long()
    unit = row // UNIT * units + col // UNIT
    tile = col % UNIT // TILE * (UNIT // TILE) + row % UNIT // TILE
    lane = row % 8 * 4 + col % TILE // 4
    entry = col % 4 // 2 * 4 + row % TILE // 8 * 2 + col % 2
    key = ((unit * UNIT_TILES + tile) * 32 + lane) * 8 + entry
    key, order = key.sort()
    if bool((key[1:] == key[:-1]).any()):
        return None
    word = key // 32  # units, tiles, four lanes
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
        _by_columns(words).to(torch.int32),
        _by_columns(prefixes).to(torch.int16),
        filled,
        starts.to(torch.int32),
        next(room for room in ROOMS if most <= room),
    )


def fullest_unit(indptr: Tensor, indices: Tensor, cols: int) -> int:
    """Most entries of a unit of a CSR matrix whose indices are right. It waits for the device.

    Example:
        >>> fullest_unit(torch.tensor([0, 3]), torch.tensor([3, 4, 70]), 100)
        2
    """
    row, col = torch.repeat_interleave(indptr.diff()), indices.long()
    if not col.numel():
        return 0
    return int(torch.bincount(row // UNIT * -(-cols // UNIT) + col // UNIT).max())


def rows_for_lanes(x: Tensor) -> Tensor:
    """Tokens of which a lane can read four columns at once; copied only where they are not that.

    Args:
        x: [tokens, k], 16-bit floats.

    Returns:
        [tokens, k up to the next multiple of 4], zeros behind the last column; rows start on 8
        bytes.
    """
    k = x.shape[1]
    aligned = k % 4 == 0 and x.data_ptr() % 8 == 0
    if aligned and x.stride(1) == 1 and x.stride(0) >= 0 and x.stride(0) % 4 == 0:
        return x
    return F.pad(x, (0, -k % 4)) if k % 4 else x.clone(memory_format=torch.contiguous_format)


def _by_columns(words: Tensor) -> Tensor:
    """From tile before lane to lane before tile, so that a lane reads four words at once."""
    return words.view(-1, 4, 4, 8).transpose(2, 3).contiguous()
