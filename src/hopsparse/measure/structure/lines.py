"""Non-zeros a row or a column, and what follows from them alone."""

from __future__ import annotations

import numpy as np

from ...plan import LineCounts
from ...plan.structure import bins
from .strips import Int64s, Strip

# bincount makes an array of all columns for each call.
_LEAST_CALL = 1 << 22


def summarise(counts: Int64s) -> LineCounts:
    """The summary of non-zeros by line, for at least one line.

    Example:
        >>> summarise(np.array([0, 2, 4])).histogram
        ((0, 0, 1), (1, 1, 0), (2, 2, 1), (3, 4, 1))
    """
    mean = float(counts.mean())
    # Bin 0 is 0, bin 1 is 1, and bin b + 1 ends at 2^b: the bits of count - 1, and one more.
    bin_of = np.where(counts > 1, np.frexp(np.maximum(counts - 1, 0))[1] + 1, counts)
    return LineCounts(
        least=int(counts.min()),
        most=int(counts.max()),
        mean=mean,
        variation=float(counts.std()) / mean if mean else 0.0,
        empty=int((counts == 0).sum()),
        histogram=bins(np.bincount(bin_of).tolist()),
    )


class ColumnCounts:
    """Non-zeros of each column, strip by strip: 8 bytes a column, and some for those that wait."""

    def __init__(self, cols: int) -> None:
        self._counts: Int64s = np.zeros(cols, dtype=np.int64)
        self._waiting: list[Int64s] = []

    def add(self, piece: Strip) -> None:
        """Count the columns of a strip."""
        self._waiting.append(piece.col)
        if sum(map(len, self._waiting)) >= max(_LEAST_CALL, len(self._counts)):
            self._flush()

    def counts(self) -> Int64s:
        """What was counted, int64 [cols]."""
        self._flush()
        return self._counts

    def _flush(self) -> None:
        if self._waiting:
            columns = np.concatenate(self._waiting)
            self._counts += np.bincount(columns, minlength=len(self._counts))
            self._waiting = []
