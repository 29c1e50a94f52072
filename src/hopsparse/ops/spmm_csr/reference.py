"""What the operators of a CSR matrix mean.

`spmm_csr` is the product that all formats share. The others go by entries, as a graph of a million
nodes has no dense form; sums are float32, or float64 where x is, in the order of the entries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...formats._entries import pointed_rows
from .._product import reference_product as spmm_csr

__all__ = ["csr_matmul", "sddmm_csr", "spmm_csr"]

#: Numbers of a piece that is worked on at a time.
_PIECE = 1 << 20


def csr_matmul(
    indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The product y = A @ x + bias.

    Args:
        indptr: [rows + 1].
        indices: [nnz].
        values: [nnz], in the dtype of x.
        x: [k, features].
        bias: [rows] or None.

    Returns:
        [rows, features] in the dtype of x.

    Example:
        >>> indptr, indices = torch.tensor([0, 2, 2]), torch.tensor([0, 1])
        >>> csr_matmul(indptr, indices, torch.ones(2), torch.tensor([[1.0], [5.0]])).tolist()
        [[6.0], [0.0]]
    """
    wide = _wide(x.dtype)
    y = x.new_zeros((indptr.numel() - 1, x.shape[1]), dtype=wide)
    for row, where in _pieces(indptr, x.shape[1]):
        gathered = x[indices[where]].to(wide)
        y.index_add_(0, row, gathered * values[where].to(wide).unsqueeze(1))
    if bias is not None:
        y += bias.to(wide).unsqueeze(1)
    return y.to(x.dtype)


def sddmm_csr(indptr: Tensor, indices: Tensor, u: Tensor, x: Tensor) -> Tensor:
    """Dot products u[row] . x[column] at the entries of a matrix.

    Args:
        indptr: [rows + 1].
        indices: [nnz].
        u: [rows, features].
        x: [k, features], dtype of u.

    Returns:
        [nnz] in the dtype of u.

    Example:
        >>> indptr, indices = torch.tensor([0, 2]), torch.tensor([0, 1])
        >>> sddmm_csr(indptr, indices, torch.ones(1, 2), torch.tensor([[1.0, 2], [3, 4]])).tolist()
        [3.0, 7.0]
    """
    wide = _wide(u.dtype)
    y = u.new_empty(indices.numel())
    for row, where in _pieces(indptr, u.shape[1]):
        y[where] = (u[row].to(wide) * x[indices[where]].to(wide)).sum(1).to(u.dtype)
    return y


def _pieces(indptr: Tensor, features: int) -> Iterator[tuple[Tensor, slice]]:
    """The row of each entry, and which entries, a piece at a time."""
    step = max(1, _PIECE // max(1, features))
    for _, where, row in pointed_rows(indptr):
        for first in range(where.start, where.stop, step):
            last = min(first + step, where.stop)
            yield row[first - where.start : last - where.start], slice(first, last)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
