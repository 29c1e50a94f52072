"""Entries as files give them, made into a valid CSR once; what had to be changed is told."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import FormatError, UnsupportedError
from .._base import (
    VALUE_DTYPES,
    bit_view,
    check_indptr,
    check_shape,
    nonzero_mask,
    pointer_dtype,
    pointers,
)
from ..csr import CSR
from .limits import check_size

_EXACT = 1 << 24  # float32 holds every integer up to this one


def canonical(
    shape: tuple[int, int], row: Tensor, col: Tensor, values: Tensor | None, notes: list[str]
) -> CSR:
    """Sort entries by row, then column; add up repeated ones; drop zeros.

    Args:
        shape: Rows and columns.
        row: Integers [n], from 0.
        col: Integers [n], from 0.
        values: [n] real numbers of any dtype, or None where all are one; repeated ones stay one.
        notes: Gets a sentence for each thing that was changed.

    Raises:
        FormatError: A place outside the matrix, or a value beyond float32.
        UnsupportedError: Complex values, or more of something than is read.

    Example:
        >>> said = []
        >>> row, col = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 0])
        >>> canonical((2, 2), row, col, torch.tensor([3.0, 4.0, 5.0]), said).values.tolist()
        [4.0, 8.0]
        >>> said
        ['1 entry at a place that has one already, added to it']
    """
    check_shape(shape)
    check_size(shape, row.numel())
    if values is not None:
        refuse_complex(values.dtype)
    _check_places(shape, row, col)
    if _is_sorted(row, col):
        indptr = pointers(torch.bincount(row, minlength=shape[0]))
        return _without_zeros(shape, indptr, col, values, notes)
    keys = row.long() * shape[1] + col.long()
    if bool((keys[1:] < keys[:-1]).any()):
        if values is None:
            keys = keys.sort().values
        else:
            order = keys.argsort(stable=True)
            keys, values = keys[order], _indexed(values, order)
    again = keys[1:] == keys[:-1]
    if bool(again.any()):
        keys, values = _merged(keys, again, values, notes)
    return _compressed(shape, keys, values, notes)


def from_pointers(
    shape: tuple[int, int], indptr: Tensor, indices: Tensor, values: Tensor | None, notes: list[str]
) -> CSR:
    """The same from rows that are compressed already: unsorted columns are sorted, and told.

    Raises:
        FormatError: Also for pointers that do not rise from 0 to the number of entries.

    Example:
        >>> said = []
        >>> m = from_pointers((1, 3), torch.tensor([0, 2]), torch.tensor([2, 0]), None, said)
        >>> m.indices.tolist(), said
        ([0, 2], ['columns of 1 row were out of order, and are sorted'])
    """
    check_shape(shape)
    count = indices.numel()
    check_size(shape, count)
    _check_pointers(shape[0], indptr, indices, ("rows", "column"))
    check_indptr("csr", indptr, count)
    _check_places(shape, None, indices)
    # Where a row begins, its first column may be anything.
    inside = torch.ones(count, dtype=torch.bool)
    inside[indptr[:-1][indptr[:-1] < count].long()] = False
    falls = (indices[1:] < indices[:-1]) & inside[1:]
    again = (indices[1:] == indices[:-1]) & inside[1:]
    if not bool(falls.any()) and not bool(again.any()):
        return _without_zeros(shape, indptr, indices, values, notes)
    row = torch.repeat_interleave(torch.arange(shape[0]), indptr.diff().long())
    if bool(falls.any()):
        rows = int(torch.bincount(row[1:][falls], minlength=1).count_nonzero())
        notes.append(f"columns of {_many(rows, 'row', 'rows')} were out of order, and are sorted")
    return canonical(shape, row, indices, values, notes)


def from_column_pointers(
    shape: tuple[int, int], indptr: Tensor, indices: Tensor, values: Tensor | None, notes: list[str]
) -> CSR:
    """The same from columns that are compressed; rows in one may have any order.

    Raises:
        FormatError: Also for pointers that do not rise from 0 to the number of entries.

    Example:
        >>> starts, rows = torch.tensor([0, 0, 1]), torch.tensor([1])
        >>> from_column_pointers((2, 2), starts, rows, None, []).to_dense().tolist()
        [[0.0, 0.0], [0.0, 1.0]]
    """
    check_shape(shape)
    check_size(shape, indices.numel())
    _check_pointers(shape[1], indptr, indices, ("columns", "row"))
    check_indptr("csc", indptr, indices.numel())
    col = torch.repeat_interleave(torch.arange(shape[1]), indptr.diff().long())
    return canonical(shape, indices, col, values, notes)


def refuse_complex(dtype: torch.dtype) -> None:
    """Refuse numbers that no format stores.

    Raises:
        UnsupportedError: They are complex.
    """
    if dtype.is_complex:
        raise UnsupportedError(
            f"complex values ({dtype})",
            need="real numbers, integers, or a pattern",
            hint="store the real and the imaginary part as two matrices",
        )


def _check_pointers(lines: int, indptr: Tensor, indices: Tensor, words: tuple[str, str]) -> None:
    if indptr.ndim != 1 or indptr.numel() != lines + 1 or indices.ndim != 1:
        raise FormatError(
            f"pointers {list(indptr.shape)} and places {list(indices.shape)}",
            need=f"{lines + 1} pointers for {lines} {words[0]}, and a {words[1]} an entry",
            hint="is the shape right?",
        )


def _check_places(shape: tuple[int, int], row: Tensor | None, col: Tensor) -> None:
    if not col.numel():
        return
    for word, place, side in (("row", row, shape[0]), ("column", col, shape[1])):
        if place is None:
            continue
        low, high = (int(bound) for bound in torch.aminmax(place))
        if low < 0 or high >= side:
            at = int(((place < 0) | (place >= side)).nonzero()[0])
            at_row = "" if row is None else f"row {int(row[at])}, "
            raise FormatError(
                f"entry {at} (counted from 0) is {at_row}column {int(col[at])}",
                need=f"{word}s from 0 to {side - 1} in a matrix of {list(shape)}",
                hint="is the shape right, and do places count from where the format says?",
            )


def _is_sorted(row: Tensor, col: Tensor) -> bool:
    """Whether every entry lies behind the one before it."""
    rises, stays = row[1:] > row[:-1], row[1:] == row[:-1]
    return bool((rises | (stays & (col[1:] > col[:-1]))).all())


def _merged(
    keys: Tensor, again: Tensor, values: Tensor | None, notes: list[str]
) -> tuple[Tensor, Tensor | None]:
    repeated = int(again.sum())
    what = _many(repeated, "entry", "entries") + " at a place that has one already"
    first = torch.cat((again.new_zeros(1), again)).logical_not()
    if values is None:
        notes.append(f"{what}, counted once")
        return keys[first], None
    notes.append(f"{what}, added to it")
    wide = torch.int64 if not values.dtype.is_floating_point else torch.float64
    slot = first.cumsum(0) - 1
    sums = torch.zeros(int(first.sum()), dtype=wide).index_add_(0, slot, values.to(wide))
    # int8 sums may leave int8: they go on as integers, and become float32.
    return keys[first], sums if values.dtype == torch.int8 else sums.to(values.dtype)


def _compressed(
    shape: tuple[int, int], keys: Tensor, values: Tensor | None, notes: list[str]
) -> CSR:
    row = torch.div(keys, shape[1], rounding_mode="floor")
    indptr = pointers(torch.bincount(row, minlength=shape[0]))
    return _without_zeros(shape, indptr, keys - row * shape[1], values, notes)


def _without_zeros(
    shape: tuple[int, int], indptr: Tensor, indices: Tensor, values: Tensor | None, notes: list[str]
) -> CSR:
    """The matrix of sorted entries, none of them twice, without those that are zero."""
    if values is None:
        values = torch.ones(indices.numel())
    elif not bool((live := _live(values)).all()):
        zeros = live.numel() - int(live.sum())
        notes.append(f"{_many(zeros, 'zero that was stored', 'zeros that were stored')}, left out")
        before = torch.cat((live.new_zeros(1), live)).cumsum(0)
        indptr, indices, values = before[indptr.long()], indices[live], _indexed(values, live)
    values = _storable(values, notes)
    dtype = pointer_dtype(indices.numel())
    return CSR(shape, values, indices.to(torch.int32), indptr.to(dtype))


def _live(values: Tensor) -> Tensor:
    """Not zero; 64-bit numbers, which no format stores, are compared as they are."""
    return nonzero_mask(values) if values.dtype in VALUE_DTYPES else values != 0


def _indexed(values: Tensor, where: Tensor) -> Tensor:
    """8-bit floats are indexed as integers, which torch can do for all of them."""
    return (
        bit_view(values)[where].view(values.dtype)
        if values.dtype in VALUE_DTYPES
        else values[where]
    )


def _storable(values: Tensor, notes: list[str]) -> Tensor:
    """Values in a dtype that formats store: others become float32, and what that costs is told."""
    if values.dtype in VALUE_DTYPES:
        return values
    kind = str(values.dtype).removeprefix("torch.")
    single = values.to(torch.float32)
    if values.dtype == torch.bool or not values.numel():
        return single
    if not values.dtype.is_floating_point:
        if int(values.abs().max()) > _EXACT:
            notes.append(f"values of {kind} beyond 2^24 are rounded to float32")
        return single
    lost = torch.isfinite(values) & ~torch.isfinite(single)
    lost |= (values != 0) & (single == 0)
    if bool(lost.any()):
        at = float(values[lost][0])
        raise FormatError(
            f"value {at!r} of {kind}",
            need="values that float32 holds, 1.2e-38 to 3.4e38",
            hint="scale the matrix",
        )
    if not torch.equal(single.to(values.dtype), values) and not bool(values.isnan().any()):
        notes.append(f"values of {kind} are rounded to float32")
    return single


def _many(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"
