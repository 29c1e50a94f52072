"""Count everything that a format is chosen from, in one pass over the entries."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...errors import ArgumentError
from ...formats import CSR, SparseMatrix, convert
from ...formats.exchange import check_size
from ...formats.quantized import Quantized
from ...plan import Structure
from .blocks import BlockCounts
from .column_order import column_order
from .diagonals import DiagonalCounts
from .lines import ColumnCounts, summarise
from .strips import Strip, strips
from .two_four import TwoFourCounts


def analyse(matrix: SparseMatrix, *, validate: bool = True) -> Structure:
    """Count what the pattern of a matrix looks like.

    Only the places of the non-zeros are read, never their values; zeros that are stored count as
    zeros. 20 million entries take some seconds; docs/inspect.md has the times and the limits.

    Args:
        matrix: [rows, cols], any format and dtype. One in another format than CSR is converted.
        validate: Check the matrix first. What `foreign_matrices` and `from_dense` give is valid.

    Raises:
        ArgumentError: No stored matrix.
        FormatError: Its parts do not form a valid matrix.
        UnsupportedError: More entries, or longer sides, than are counted (`MOST_ENTRIES`,
            `MOST_SIDE` of `hopsparse.formats.exchange`).

    Example:
        >>> import torch
        >>> found = analyse(CSR.from_dense(torch.eye(64)))
        >>> found.looks(), found.two_four.fits, found.block(16).kept
        ('diagonal', True, 4)
    """
    if not isinstance(matrix, SparseMatrix):
        got = f"a {type(matrix).__name__} to analyse"
        raise ArgumentError(got, need="a stored matrix", hint="CSR.from_dense(dense)")
    check_size(matrix.shape, 0)
    if validate:
        matrix.validate()
    rows = compressed(matrix)
    check_size(rows.shape, rows.values.numel())
    blocks, diagonals = BlockCounts(rows.shape), DiagonalCounts(rows.shape)
    two_four, columns = TwoFourCounts(rows.shape[1]), ColumnCounts(rows.shape[1])
    # numpy lets other threads run while it sorts and adds: blocks take about as long as the rest.
    with ThreadPoolExecutor(2) as pool:
        for piece in strips(rows):
            every = (blocks, two_four, diagonals, columns)
            list(pool.map(_add_to, every, [piece] * len(every)))
    by_row, by_col = rows.row_counts().numpy(), columns.counts()
    fit = two_four.fit()
    _, reordered = column_order(rows, fit, by_row, by_col)
    return Structure(
        shape=rows.shape,
        nnz=int(np.sum(by_row)),
        rows=summarise(by_row),
        cols=summarise(by_col),
        blocks=blocks.fills(),
        two_four=fit,
        reordered=reordered,
        diagonals=diagonals.diagonals(),
    )


def _add_to(
    counts: BlockCounts | DiagonalCounts | TwoFourCounts | ColumnCounts, piece: Strip
) -> None:
    counts.add(piece)


def compressed(matrix: SparseMatrix) -> CSR:
    """The non-zeros of a matrix as CSR on the CPU, without zeros that are stored."""
    plain = matrix.codes() if isinstance(matrix, Quantized) else matrix
    rows = convert(plain.to("cpu"), CSR.name)
    assert isinstance(rows, CSR)
    return rows.without_zeros()
