"""How far a pattern is from 2:4, in the order of its columns or in another one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...plan import TwoFourFit
from .strips import Int64s, Strip, run_starts

GROUP, KEPT = 4, 2


class TwoFourCounts:
    """Non-zeros that 2:4 has no place for, strip by strip.

    Args:
        cols: Columns of the matrix.
        place: Where each column goes, int64 [cols]; None leaves them where they are.
    """

    def __init__(self, cols: int, place: Int64s | None = None) -> None:
        self._groups = -(-cols // GROUP)
        self._place = place
        self._entries = self._excess = self._over = 0
        self._first: tuple[int, int] | None = None

    def add(self, piece: Strip) -> None:
        """Count the groups of a strip."""
        col = piece.col if self._place is None else self._place[piece.col]
        keys = piece.row * self._groups + col // GROUP
        if self._place is not None:
            keys.sort()
        starts = run_starts(keys)
        lengths = np.diff(starts, append=len(keys))
        over = np.flatnonzero(lengths > KEPT)
        self._entries += len(keys)
        self._excess += int(lengths[over].sum()) - KEPT * len(over)
        self._over += len(over)
        if self._first is None and len(over):
            row, group = divmod(int(keys[starts[over[0]]]), self._groups)
            self._first = (row, group)

    def fit(self) -> TwoFourFit:
        """What was counted."""
        share = (self._entries - self._excess) / self._entries if self._entries else 1.0
        return TwoFourFit(self._excess, share, self._over, self._first)


def two_four_fit(pieces: Iterable[Strip], cols: int, place: Int64s | None = None) -> TwoFourFit:
    """The fit of a whole matrix; see `TwoFourCounts`."""
    counts = TwoFourCounts(cols, place)
    for piece in pieces:
        counts.add(piece)
    return counts.fit()
