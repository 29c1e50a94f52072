"""A picture of a pattern: how full each cell of a coarse grid is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...formats import CSR
from .strips import Int64s, strips


def cell_counts(matrix: CSR, cells: int = 256) -> tuple[Int64s, NDArray[np.float64]]:
    """Non-zeros of each cell of a grid over the matrix, and how full that makes the cell.

    Args:
        matrix: [rows, cols], on the CPU.
        cells: Along a side at most; a shorter side has a cell an entry.

    Returns:
        int64 and float64, both [min(cells, rows), min(cells, cols)].

    Example:
        >>> import torch
        >>> cell_counts(CSR.from_dense(torch.eye(4)), cells=2)[1].tolist()
        [[0.5, 0.0], [0.0, 0.5]]
    """
    (rows, cols), (high, wide) = matrix.shape, (min(cells, side) for side in matrix.shape)
    counts = np.zeros(high * wide, dtype=np.int64)
    for piece in strips(matrix):
        cell = piece.row * high // rows * wide + piece.col * wide // cols
        counts += np.bincount(cell, minlength=high * wide)
    # Entry r lies in cell r * high // rows: cells differ by one entry where they do not divide.
    tall = np.diff(-(-np.arange(high + 1) * rows // high))
    broad = np.diff(-(-np.arange(wide + 1) * cols // wide))
    return counts.reshape(high, wide), counts.reshape(high, wide) / np.outer(tall, broad)


def window(matrix: CSR, rows: slice, cols: slice) -> NDArray[np.bool_]:
    """Which entries of a part of the matrix are there.

    Args:
        matrix: On the CPU.
        rows: Start and stop, inside the matrix.
        cols: Start and stop, inside the matrix.

    Returns:
        bool [rows, cols] of the part.

    Example:
        >>> import torch
        >>> window(CSR.from_dense(torch.eye(4)), slice(1, 3), slice(0, 2)).tolist()
        [[False, True], [False, False]]
    """
    indptr, indices = matrix.indptr.numpy(), matrix.indices.numpy()
    found = np.zeros((rows.stop - rows.start, cols.stop - cols.start), dtype=np.bool_)
    for line, row in enumerate(range(rows.start, rows.stop)):
        col = indices[indptr[row] : indptr[row + 1]]
        found[line, col[(col >= cols.start) & (col < cols.stop)] - cols.start] = True
    return found
