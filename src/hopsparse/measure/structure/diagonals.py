"""Where entries lie about the main diagonal."""

from __future__ import annotations

import numpy as np

from ...plan import Diagonals
from .strips import Strip, run_starts

_WITHIN = 0.9


class DiagonalCounts:
    """Non-zeros of every diagonal, strip by strip: 8 bytes a row and a column."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._main = shape[0] - 1
        self._counts = np.zeros(shape[0] + shape[1] - 1, dtype=np.int64)

    def add(self, piece: Strip) -> None:
        """Count the diagonals of a strip."""
        offsets = piece.col - piece.row
        offsets += self._main
        offsets.sort()
        starts = run_starts(offsets)
        self._counts[offsets[starts]] += np.diff(starts, append=len(offsets))

    def diagonals(self) -> Diagonals:
        """What was counted."""
        occupied = np.flatnonzero(self._counts)
        if not len(occupied):
            return Diagonals(below=0, above=0, occupied=0, on_main=0, within=0)
        distance = np.abs(occupied - self._main)
        nearest = np.argsort(distance, kind="stable")
        held = np.cumsum(self._counts[occupied[nearest]])
        enough = int(np.searchsorted(held, _WITHIN * held[-1]))
        return Diagonals(
            below=max(0, self._main - int(occupied[0])),
            above=max(0, int(occupied[-1]) - self._main),
            occupied=len(occupied),
            on_main=int(self._counts[self._main]),
            within=int(distance[nearest[enough]]),
        )
