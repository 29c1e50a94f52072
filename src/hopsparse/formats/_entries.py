"""Kept entries as (row, column, bits), a piece at a time: what the index formats are built from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ._base import bit_view, chunk_elements, nonzero_mask, row_slices


class Entries(NamedTuple):
    """The entries of some whole rows, sorted by row, then column.

    Attributes:
        row: int64 [n].
        col: int64 [n].
        bits: The values as integers [n].
    """

    row: Tensor
    col: Tensor
    bits: Tensor


def dense_entries(dense: Tensor) -> Iterator[Entries]:
    """The non-zeros of a dense matrix [rows, cols] of any strides."""
    for rows in row_slices(dense.shape[0], dense.shape[1], device=dense.device):
        piece = dense[rows].contiguous()
        live = nonzero_mask(piece)
        row, col = live.nonzero().unbind(1)
        yield Entries(row + rows.start, col, bit_view(piece)[live])


def dense_counts(dense: Tensor) -> Tensor:
    """Non-zeros of each row, int64 [rows]."""
    counts = torch.empty(dense.shape[0], dtype=torch.int64, device=dense.device)
    for rows in row_slices(dense.shape[0], dense.shape[1], device=dense.device):
        counts[rows] = nonzero_mask(dense[rows].contiguous()).sum(1)
    return counts


def pointed_rows(indptr: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows, their entries, and the row of each entry, about `chunk_elements` entries a piece.

    Pieces are cut by entries, not by rows: a graph of a million columns has few entries a row.
    """
    rows, count = indptr.numel() - 1, int(indptr[-1])
    step, device = chunk_elements(indptr.device), indptr.device
    marks = torch.arange(0, max(1, count), step, device=device).to(indptr.dtype)
    cuts = torch.searchsorted(indptr, marks, right=True).sub_(1).clamp_(0, rows)
    starts = sorted({0, *cuts.tolist(), rows})
    for first, last in pairwise(starts):
        lengths = indptr[first : last + 1].diff()
        row = torch.repeat_interleave(torch.arange(first, last, device=device), lengths)
        yield slice(first, last), slice(int(indptr[first]), int(indptr[last])), row


def scatter(dense: Tensor, entries: Iterator[Entries]) -> None:
    """Write entries into a contiguous matrix of zeros."""
    flat, cols = bit_view(dense).view(-1), dense.shape[1]
    for row, col, bits in entries:
        flat[row * cols + col] = bits
