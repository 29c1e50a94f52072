"""From one format to another, and which format a checkpoint stores a pattern in."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..ranges import in_phase
from ._base import SparseMatrix
from ._kinds import FORMATS as FORMATS
from ._kinds import format_named as format_named
from ._windows import windows_of
from .bitmask import Bitmask
from .bsr import BSR
from .bsr24 import BSR24
from .csr import CSC, CSR, transposed
from .hyb import HYB
from .nm import NM
from .pattern import BlockPattern, NMPattern, Pattern, as_nm_pattern
from .quantized import Quantized

_BSR_SIDES = (16, 32, 64, 128)
# Working memory of `transposed`: a sort order, line numbers and their gathered copies.
_TRANSPOSE_BYTES_PER_ENTRY = 24


def storage_for(pattern: Pattern, shape: tuple[int, int]) -> str:
    """The format in which a checkpoint stores a matrix of `shape` pruned to `pattern`.

    `nm` where a kernel layout exists without waste (N:4 with N <= 2, and (M - 2):M), `bsr` for
    square blocks of 16, 32, 64 or 128 that divide the matrix, `bitmask` for the rest.

    Example:
        >>> storage_for(NMPattern(6, 8), (64, 64)), storage_for(NMPattern(4, 8), (64, 64))
        ('nm', 'bitmask')
    """
    if isinstance(pattern, NMPattern):
        try:
            windows_of(pattern)
        except ValueError:
            return "bitmask"
        return "nm" if pattern.m == 4 or pattern.n == pattern.m - 2 else "bitmask"
    if isinstance(pattern, BlockPattern):
        side = pattern.rows
        square = side == pattern.cols and side in _BSR_SIDES
        if square and shape[0] % side == 0 and shape[1] % side == 0:
            return "bsr"
    return "bitmask"


@in_phase("format", "convert")
def convert(
    matrix: SparseMatrix,
    fmt: str,
    *,
    pattern: NMPattern | str | None = None,
    block: tuple[int, int] | None = None,
) -> SparseMatrix:
    """Store the same matrix in another format; exact, nothing is pruned.

    A `Quantized` matrix stays one: its codes are stored as wanted, under the same scales.

    Values may be shared with `matrix`. At most one dense copy is alive on the way, and none
    between csr, hyb and bitmask (docs/formats.md has the table).

    Args:
        matrix: A valid matrix [rows, cols] of any format and dtype.
        fmt: Token of the format wanted.
        pattern: For `nm`, the N:M to pack (default: that of `matrix`, else 2:4).
        block: For `bsr` and `bsr24`, the sides of a block (default: those of `matrix`, else
            32 x 32).

    Raises:
        ArgumentError: No such format, or an option that it has not.
        FormatError: The matrix does not obey `pattern`, or 2:4 for `bsr24`.

    Example:
        >>> convert(CSR.from_dense(torch.eye(4)), "bitmask").mask.tolist()
        [[1], [2], [4], [8]]
    """
    if not isinstance(matrix, SparseMatrix):
        got = f"a {type(matrix).__name__} to convert"
        raise ArgumentError(got, need="a stored matrix", hint="NM.from_dense(dense)")
    if isinstance(matrix, Quantized):
        codes = convert(matrix.codes(), fmt, pattern=pattern, block=block)
        return Quantized.of(codes, matrix.scales, matrix.scheme, matrix.dtype, matrix.input_scale)
    target = format_named(fmt)
    wanted = _check_options(fmt, pattern, block)
    if type(matrix) is target and _unchanged(matrix, wanted, block):
        return matrix
    if target in (CSR, CSC, HYB, Bitmask):
        direct = _by_entries(matrix, target)
        if direct is not None:
            return direct
    sides = block or (matrix.block if isinstance(matrix, BSR | BSR24) else (32, 32))
    if target is BSR24 and isinstance(matrix, BSR) and sides == matrix.block:
        return BSR24.from_blocks(matrix)
    if target is BSR and isinstance(matrix, BSR24) and sides == matrix.block:
        return matrix.to_blocks()
    dense = matrix.to_dense()
    if target is NM:
        kept = matrix.pattern if isinstance(matrix, NM) else NMPattern(2, 4)
        return NM.from_dense(dense, wanted or kept)
    if target is BSR or target is BSR24:
        return target.from_dense(dense, sides)
    return target.from_dense(dense)


def _check_options(
    fmt: str, pattern: NMPattern | str | None, block: tuple[int, int] | None
) -> NMPattern | None:
    """The pattern as a value, after refusing options of other formats."""
    if pattern is not None and fmt != NM.name:
        raise ArgumentError(f"pattern {pattern} for format {fmt!r}", need="nm", hint='fmt="nm"')
    if block is not None and fmt not in (BSR.name, BSR24.name):
        need = f"{BSR.name} or {BSR24.name}"
        raise ArgumentError(f"block {block} for format {fmt!r}", need=need, hint='fmt="bsr"')
    return None if pattern is None else as_nm_pattern(pattern)


def _unchanged(
    matrix: SparseMatrix, pattern: NMPattern | None, block: tuple[int, int] | None
) -> bool:
    if isinstance(matrix, NM):
        return pattern in (None, matrix.pattern)
    if isinstance(matrix, BSR | BSR24):
        return block in (None, matrix.block)
    return True


def _by_entries(matrix: SparseMatrix, target: type[SparseMatrix]) -> SparseMatrix | None:
    """Convert without a dense copy, or return None where a dense copy is the smaller cost."""
    if not isinstance(matrix, CSR | CSC | HYB | Bitmask):
        return None
    if isinstance(matrix, CSC) or target is CSC:
        entries = matrix.nbytes // (matrix.dtype.itemsize + 4)
        dense_bytes = matrix.shape[0] * matrix.shape[1] * matrix.dtype.itemsize
        if dense_bytes <= entries * _TRANSPOSE_BYTES_PER_ENTRY:
            return None
    rows = transposed(matrix) if isinstance(matrix, CSC) else matrix
    if target is HYB:
        return HYB.from_entries(rows.shape, rows.dtype, rows.row_counts(), rows.entries())
    if not isinstance(rows, CSR):
        rows = CSR.from_entries(rows.shape, rows.dtype, rows.row_counts(), rows.entries())
    if target is Bitmask:
        return Bitmask(rows.shape, rows.values, _mask_of(rows))
    return transposed(rows) if target is CSC else rows


def _mask_of(matrix: CSR) -> Tensor:
    """The mask of the stored entries, explicit zeros included: the values are in its order."""
    width = -(-matrix.shape[1] // 8)
    mask = torch.zeros(matrix.shape[0] * width, dtype=torch.uint8, device=matrix.device)
    for row, col, _ in matrix.entries():
        bit = (1 << (col & 7)).to(torch.uint8)
        mask.index_add_(0, row * width + (col >> 3), bit)
    return mask.view(-1, width)
