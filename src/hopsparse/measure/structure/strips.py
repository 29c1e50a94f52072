"""A matrix as strips of whole block rows: what every count runs over."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...formats import CSR
from ...plan import BLOCK_SIDES

Int64s = NDArray[np.int64]

# Strips start at multiples of the largest block, so that a block lies in one of them.
_TALL = max(BLOCK_SIDES)
# 32 MB an array of a strip; twice as many or half as many take as long.
_STRIP_ENTRIES = 1 << 22


class Strip(NamedTuple):
    """The entries of some whole rows, sorted by row, then column.

    Attributes:
        row: int64 [n].
        col: int64 [n].
    """

    row: Int64s
    col: Int64s


def strips(matrix: CSR) -> Iterator[Strip]:
    """The entries of a matrix on the CPU, some millions at a time."""
    indptr: Int64s = matrix.indptr.numpy().astype(np.int64, copy=False)
    indices = matrix.indices.numpy()
    rows = matrix.shape[0]
    starts = np.append(np.arange(0, rows, _TALL), rows)
    marks = np.arange(0, int(indptr[-1]), _STRIP_ENTRIES)
    cuts = np.searchsorted(indptr[starts], marks, side="right") - 1
    edges = sorted({0, *starts[cuts].tolist(), rows})
    for first, last in pairwise(edges):
        begin, end = int(indptr[first]), int(indptr[last])
        if begin < end:
            lengths = np.diff(indptr[first : last + 1])
            row = np.repeat(np.arange(first, last, dtype=np.int64), lengths)
            yield Strip(row, indices[begin:end].astype(np.int64))


def run_starts(keys: Int64s) -> Int64s:
    """Where equal keys begin, in an array that is sorted and not empty.

    Example:
        >>> run_starts(np.array([4, 4, 7])).tolist()
        [0, 2]
    """
    return np.append(0, np.flatnonzero(keys[1:] != keys[:-1]) + 1)
