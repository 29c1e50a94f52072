"""How full square blocks of five sides are, from one sort.

An entry's key is the 128 x 128 block that it lies in, then eight bits: row and column of the next
smaller blocks inside, in turn (Morton order). Two entries share a block of side 128 / 2^l exactly
if their keys agree but for the last 8 - 2 l bits.
"""

from __future__ import annotations

import numpy as np

from ...plan import BLOCK_SIDES, BlockFill
from .strips import Int64s, Strip, run_starts

_LARGEST = BLOCK_SIDES[-1].bit_length() - 1  # bits of a place inside the largest block
_SMALLEST = BLOCK_SIDES[0].bit_length() - 1
_LEVELS = _LARGEST - _SMALLEST
# The bits of a number below 16, each followed by a 0: abcd -> a0b0c0d0 >> 1 for columns.
_SPREAD = np.array(
    [sum((n >> b & 1) << 2 * b for b in range(_LEVELS)) for n in range(1 << _LEVELS)]
)
# What undoes it for rows: every second bit of eight.
_ROW_OF = np.array(
    [sum((n >> 2 * b + 1 & 1) << b for b in range(_LEVELS)) for n in range(1 << 2 * _LEVELS)]
)


class BlockCounts:
    """Kept blocks of every side, strip by strip."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._across = -(-shape[1] // BLOCK_SIDES[-1])
        self._kept = dict.fromkeys(BLOCK_SIDES, 0)
        self._most = dict.fromkeys(BLOCK_SIDES, 0)
        self._entries = 0

    def add(self, piece: Strip) -> None:
        """Count the blocks of a strip."""
        self._entries += len(piece.row)
        keys = self._keys(piece)
        keys.sort()
        for level, side in enumerate(BLOCK_SIDES):
            if level:
                keys >>= 2
            keys = keys[run_starts(keys)]
            rows = self._block_rows(keys, _LEVELS - level)
            self._kept[side] += len(keys)
            self._most[side] = max(self._most[side], int(np.bincount(rows - rows.min()).max()))

    def fills(self) -> tuple[BlockFill, ...]:
        """What was counted."""
        rows, cols = self._shape
        return tuple(
            BlockFill(
                side=side,
                kept=kept,
                total=-(-rows // side) * -(-cols // side),
                fill=self._entries / (kept * side * side) if kept else 0.0,
                most=self._most[side],
            )
            for side, kept in self._kept.items()
        )

    def _keys(self, piece: Strip) -> Int64s:
        low = (1 << _LEVELS) - 1
        keys: Int64s = (piece.row >> _LARGEST) * self._across + (piece.col >> _LARGEST)
        keys <<= 2 * _LEVELS
        keys |= _SPREAD[(piece.row >> _SMALLEST) & low] << 1
        keys |= _SPREAD[(piece.col >> _SMALLEST) & low]
        return keys

    def _block_rows(self, keys: Int64s, bits: int) -> Int64s:
        """The block row of each block, `bits` levels below the largest."""
        inside = _ROW_OF[keys & ((1 << 2 * bits) - 1)]
        rows: Int64s = ((keys >> 2 * bits) // self._across << bits) + inside
        return rows
