"""Pieces of a packed weight by rows and by columns: slices of its parts, nothing is packed again.

A piece holds the bits that packing its rows and columns alone would give. So ranks that share a
layer cut what one of them packed, or what a file holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import gcd, lcm
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import _panels
from ._base import SparseMatrix
from ._windows import windows_of
from .nm import NM, packed_k
from .pattern import NMPattern
from .quantized import Quantized
from .scheme import Scheme

_Matrix = TypeVar("_Matrix", NM, Quantized)

#: Rows that are packed together: a piece starts at a multiple of them.
WHOLE_ROWS = _panels.PANEL_ROWS


def whole_columns(pattern: NMPattern, scheme: Scheme | None = None) -> int:
    """Columns that are packed together: a piece starts at a multiple of them.

    Args:
        pattern: N:M of the weight.
        scheme: Of a quantized weight, whose groups that share a scale are not cut.

    Example:
        >>> whole_columns(NMPattern(2, 4)), whole_columns(NMPattern(4, 6))
        (64, 48)
    """
    # A unit of index words holds 16 windows; groups of M end with one where both counts do.
    units = _panels.UNIT_COLS // 4
    columns = units // gcd(units, windows_of(pattern)) * pattern.m
    return lcm(columns, scheme.group) if scheme is not None and scheme.group else columns


def bounds_of(length: int, ranks: int, whole: int) -> tuple[int, ...]:
    """Where the pieces of a side begin, and where the last one ends.

    Pieces are as equal as multiples of `whole` allow, the larger ones first.

    Args:
        length: Of the side.
        ranks: How many pieces.
        whole: What is not cut.

    Raises:
        ArgumentError: A piece would be empty, or `whole` is not above 0.

    Example:
        >>> bounds_of(200, 3, 64)
        (0, 128, 192, 200)
    """
    units = -(-length // whole) if whole > 0 else 0
    if ranks < 1 or units < ranks:
        raise ArgumentError(
            f"a side of {length} for {ranks} ranks",
            need=f"at least one piece of {whole} for each of 1 or more ranks",
            hint=f"at most {units} ranks, or the layer whole on every rank",
        )
    each, more = divmod(units, ranks)
    starts = [each * rank + min(rank, more) for rank in range(ranks + 1)]
    return tuple(min(whole * start, length) for start in starts)


def rows_of(matrix: _Matrix, start: int, stop: int) -> _Matrix:
    """Rows from `start` to `stop` of a packed weight; its parts are views.

    Args:
        matrix: [rows, cols], an NM matrix, or a quantized one with codes in that format.
        start: A multiple of `WHOLE_ROWS`.
        stop: A multiple of it, or the number of rows.

    Returns:
        [stop - start, cols], the bits that packing these rows gives; of a quantized weight, with
        the same scales.

    Raises:
        ArgumentError: Another format, or rows that are not packed apart.

    Example:
        >>> w = torch.eye(130, 8)
        >>> piece = rows_of(NM.from_dense(w), 64, 130)
        >>> torch.equal(piece.values, NM.from_dense(w[64:]).values)
        True
    """
    _facts_of(matrix)
    _check(start, stop, matrix.shape[0], WHOLE_ROWS, "rows")
    panels = slice(start // WHOLE_ROWS, -(-stop // WHOLE_ROWS))
    shape = (stop - start, matrix.shape[1])
    if isinstance(matrix, NM):
        return NM(shape, matrix.values[panels], matrix.meta[panels], matrix.pattern)
    parts = dict(matrix.tensors)
    count = matrix.tensors["meta"].shape[0]
    values = parts["values"]
    if matrix.scheme.bits == 4:
        parts["values"] = values.view(count, -1)[panels].view(-1)
    else:
        parts["values"] = values[panels]
    parts["meta"], parts["scales"] = parts["meta"][panels], matrix.scales[start:stop]
    return _around(matrix, shape, parts)


def columns_of(matrix: _Matrix, start: int, stop: int) -> _Matrix:
    """Columns from `start` to `stop` of a packed weight; its parts are copies.

    Args:
        matrix: [rows, cols], an NM matrix, or a quantized one with codes in that format.
        start: A multiple of `whole_columns`.
        stop: A multiple of it, or the number of columns.

    Returns:
        [rows, stop - start], the bits that packing these columns gives; of a quantized weight, with
        the same scales.

    Raises:
        ArgumentError: Another format, or columns that are not packed apart.

    Example:
        >>> w = torch.eye(8, 130)
        >>> piece = columns_of(NM.from_dense(w), 64, 130)
        >>> torch.equal(piece.meta, NM.from_dense(w[:, 64:]).meta)
        True
    """
    pattern, scheme = _facts_of(matrix)
    _check(start, stop, matrix.shape[1], whole_columns(pattern, scheme), "columns")
    units = slice(packed_k(start, pattern) // _panels.UNIT_COLS, None)
    if stop < matrix.shape[1]:
        units = slice(units.start, packed_k(stop, pattern) // _panels.UNIT_COLS)
    shape = (matrix.shape[0], stop - start)
    if isinstance(matrix, NM):
        values = _copy(_units(matrix.values, matrix.meta, units))
        return NM(shape, values, _copy(matrix.meta[:, units]), pattern)
    parts, meta = dict(matrix.tensors), matrix.tensors["meta"]
    panels, count, _ = meta.shape
    if matrix.scheme.bits == 4:
        # Two codes a byte, in the order of the codes: a unit of a panel is a whole number of bytes.
        values = _copy(parts["values"].view(panels, count, -1)[:, units]).view(-1)
    else:
        values = _copy(_units(parts["values"], meta, units))
    parts["values"], parts["meta"] = values, _copy(meta[:, units])
    if group := matrix.scheme.group:
        parts["scales"] = _copy(matrix.scales[:, start // group : -(-stop // group)])
    return _around(matrix, shape, parts)


def _units(values: Tensor, meta: Tensor, units: slice) -> Tensor:
    of_unit = values.shape[1] // meta.shape[1]
    last = None if units.stop is None else units.stop * of_unit
    return values[:, units.start * of_unit : last]


def _copy(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)


def _around(matrix: Quantized, shape: tuple[int, int], parts: dict[str, Tensor]) -> Quantized:
    return Quantized.from_parts(shape, parts, matrix.attributes())


def _facts_of(matrix: SparseMatrix) -> tuple[NMPattern, Scheme | None]:
    """Pattern and scheme of what can be cut.

    Raises:
        ArgumentError: It is in another format.
    """
    if isinstance(matrix, NM):
        return matrix.pattern, None
    if isinstance(matrix, Quantized) and matrix.codes_format == NM.name:
        codes = NM.from_parts(matrix.shape, matrix.tensors, matrix.codes_attributes)
        return codes.pattern, matrix.scheme
    kind = matrix.name if isinstance(matrix, SparseMatrix) else type(matrix).__name__
    if isinstance(matrix, Quantized):
        kind = f"quantized {matrix.codes_format}"
    raise ArgumentError(
        f"a {kind} matrix to cut",
        need="an nm matrix, or a quantized one with codes in that format",
        hint='NM.from_dense(matrix.to_dense()), or convert(matrix, "nm")',
    )


def whole_columns_of(matrix: SparseMatrix) -> int:
    """`whole_columns` of a weight.

    Raises:
        ArgumentError: Its format cannot be cut.
    """
    return whole_columns(*_facts_of(matrix))


def check_bounds(bounds: Sequence[int], length: int, ranks: int) -> None:
    """Refuse bounds that are not those of `ranks` pieces of a side.

    Raises:
        ArgumentError: They do not rise from 0 to `length`, one piece a rank.
    """
    rises = all(one < other for one, other in itertools.pairwise(bounds))
    if len(bounds) != ranks + 1 or not rises or (bounds[0], bounds[-1]) != (0, length):
        raise ArgumentError(
            f"bounds {list(bounds)}",
            need=f"{ranks + 1} numbers that rise from 0 to {length}",
            hint=f"bounds_of({length}, {ranks}, {WHOLE_ROWS})",
        )


def _check(start: int, stop: int, length: int, whole: int, what: str) -> None:
    inside = 0 <= start < stop <= length
    if inside and start % whole == 0 and (stop % whole == 0 or stop == length):
        return
    raise ArgumentError(
        f"{what} {start} to {stop} of {length}",
        need=f"a first one that is a multiple of {whole}, and a last that is one or the end",
        hint=f"bounds_of({length}, ranks, {whole})",
    )
