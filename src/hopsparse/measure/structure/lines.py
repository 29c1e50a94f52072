"""Non-zeros a row or a column, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Iterator

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


def column_counts(pieces: Iterator[Strip], cols: int) -> Int64s:
    """Non-zeros of each column, int64 [cols]."""
    counts = np.zeros(cols, dtype=np.int64)
    waiting: list[Int64s] = []
    for piece in pieces:
        waiting.append(piece.col)
        if sum(map(len, waiting)) >= max(_LEAST_CALL, cols):
            counts += np.bincount(np.concatenate(waiting), minlength=cols)
            waiting = []
    if waiting:
        counts += np.bincount(np.concatenate(waiting), minlength=cols)
    return counts
