"""Block rows (BSR): dense blocks of any sides, every block row starting on 128 bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import FormatError
from ._base import (
    Attribute,
    PartSpec,
    SparseMatrix,
    bit_view,
    check_dense,
    check_indptr,
    check_shape,
    count_attribute,
    nonzero_mask,
    pointer_dtype,
    pointers,
    row_slices,
)

_ALIGN_BYTES = 128
_MAX_SIDE = 1024
_DAMAGED = "rebuild the matrix with from_dense"


class _Blocks(Protocol):
    """What formats in blocks have in common."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def block(self) -> tuple[int, int]: ...
    @property
    def indices(self) -> Tensor: ...
    @property
    def indptr(self) -> Tensor: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, eq=False, repr=False)
class BSR(SparseMatrix):
    """Dense blocks in block-row order; blocks of the last row and column are padded with zeros.

    A block row takes a whole number of 128-byte lines: where a block is no multiple of 128 bytes,
    the row is filled up with free blocks (index -1, zeros). Blocks of 16 x 16 and more never are.

    Attributes:
        values: Blocks, row-major each [blocks, block rows, block cols].
        indices: Block column of each, int32 [blocks], rising along a block row, -1 where free.
        indptr: Where block rows start, int32 [block rows + 1].
        block: Rows and columns of a block.
    """

    values: Tensor
    indices: Tensor
    indptr: Tensor
    block: tuple[int, int]

    name: ClassVar[str] = "bsr"
    PARTS: ClassVar[tuple[str, ...]] = ("values", "indices", "indptr")

    @classmethod
    def from_dense(cls, dense: Tensor, block: tuple[int, int] = (32, 32)) -> Self:
        """Store each block that holds a non-zero; nothing is pruned.

        Args:
            dense: [rows, cols], any strides; the sides need not be multiples of the block's.
            block: Rows and columns of a block: positive, and up to 1024 or the side of the matrix.

        Raises:
            FormatError: The matrix is empty, or the block has no such sides.

        Example:
            >>> b = BSR.from_dense(torch.eye(64), block=(32, 32))
            >>> b.indices.tolist(), b.indptr.tolist()
            ([0, 1], [0, 1, 2])
        """
        dense = check_dense(dense)
        shape = (dense.shape[0], dense.shape[1])
        check_block(block, shape)
        unit = blocks_per_line(block, dense.element_size())
        indptr = pointers((held_blocks(dense, block) + unit - 1) // unit * unit)
        count = int(indptr[-1])
        values = torch.zeros((count, *block), dtype=dense.dtype, device=dense.device)
        indices = torch.full((count,), -1, dtype=torch.int32, device=dense.device)
        bits = bit_view(values)
        for slot, col, kept in kept_blocks(dense, block, indptr):
            bits[slot] = kept
            indices[slot] = col
        return cls(shape, values, indices, indptr, (block[0], block[1]))

    def to_dense(self) -> Tensor:
        """Return [rows, cols] in the dtype and on the device of the values."""
        bits = bit_view(self.values)
        return laid_out(self, self.dtype, lambda where: bits[where])

    def validate(self) -> None:
        """Check shapes, dtypes, pointers, bounds, order, alignment and padding.

        Raises:
            FormatError: The first fact that does not hold.
        """
        check_shape(self.shape)
        check_block(self.block, self.shape)
        self._check_parts()
        self.check_indices()
        bits = bit_view(self.values)
        for rows, where, line in block_pieces(self):
            check_padding(self, rows, where, line, bits[where])

    def check_indices(self) -> None:
        """The part of `validate` that reads no values: pointers, bounds, order, alignment.

        Raises:
            FormatError: The first fact that does not hold.
        """
        check_indptr(self.name, self.indptr, self.values.shape[0])
        unit = blocks_per_line(self.block, self.values.element_size())
        crooked = (self.indptr % unit != 0).nonzero()
        if crooked.numel():
            first = int(crooked[0])
            raise FormatError(
                f"block row {first} starts at block {int(self.indptr[first])}",
                need=f"a multiple of {unit} blocks, so that it starts on {_ALIGN_BYTES} bytes",
                hint=_DAMAGED,
            )
        for rows, where, line in block_pieces(self):
            self._validate_indices(rows.start // self.block[0] + line, where, unit)

    @classmethod
    def part_specs(
        cls, shape: tuple[int, int], dtype: torch.dtype, attributes: Mapping[str, Attribute]
    ) -> dict[str, PartSpec]:
        """See `SparseMatrix.part_specs`; needs the attributes `block` ("32x32") and `blocks`."""
        block, count = _parse_block(attributes), count_attribute(attributes, "blocks")
        return {
            "values": ((count, *block), dtype),
            "indices": ((count,), torch.int32),
            "indptr": ((-(-shape[0] // block[0]) + 1,), pointer_dtype(count)),
        }

    @classmethod
    def from_parts(
        cls,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        attributes: Mapping[str, Attribute],
    ) -> Self:
        """See `SparseMatrix.from_parts`."""
        block = _parse_block(attributes)
        return cls(shape, parts["values"], parts["indices"], parts["indptr"], block)

    def attributes(self) -> dict[str, Attribute]:
        """Sides of a block, and the number of stored blocks, free ones included."""
        return {"block": f"{self.block[0]}x{self.block[1]}", "blocks": self.values.shape[0]}

    def _validate_indices(self, row: Tensor, where: slice, unit: int) -> None:
        place, columns = self.indices[where], -(-self.shape[1] // self.block[1])
        outside = ((place < -1) | (place >= columns)).nonzero()
        if outside.numel():
            at = int(outside[0])
            raise FormatError(
                f"block row {int(row[at])} has block column {int(place[at])} at block "
                f"{where.start + at}",
                need=f"block columns from 0 to {columns - 1}, or -1 in a free block",
                hint=_DAMAGED,
            )
        before, after = place[:-1], place[1:]
        bad = ((row[1:] == row[:-1]) & (after >= 0) & (after <= before)).nonzero()
        opened = ((row[1:] == row[:-1]) & (before < 0) & (after >= 0)).nonzero()
        if bad.numel() or opened.numel():
            at = int(torch.cat((bad, opened)).min())
            raise FormatError(
                f"block row {int(row[at])} has block column {int(after[at])} after "
                f"{int(before[at])} at block {where.start + at + 1}",
                need="rising block columns, then free blocks (-1)",
                hint=_DAMAGED,
            )
        # A line of `unit` blocks that starts with a free one holds nothing at all.
        idle = (place[::unit] < 0).nonzero()
        if idle.numel():
            at = int(idle[0]) * unit
            raise FormatError(
                f"block row {int(row[at])} has {unit} free blocks from block {where.start + at}",
                need=f"free blocks only up to the next {_ALIGN_BYTES} bytes",
                hint=_DAMAGED,
            )


def block_pieces(matrix: _Blocks) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows, their blocks, and the block row of each block, counted from the first of them."""
    height = matrix.block[0]
    for rows in row_slices(*matrix.shape, height, matrix.device):
        bounds = matrix.indptr[rows.start // height : -(-rows.stop // height) + 1]
        where = slice(int(bounds[0]), int(bounds[-1]))
        yield rows, where, torch.repeat_interleave(bounds.diff())


def laid_out(matrix: _Blocks, dtype: torch.dtype, bits_of: Callable[[slice], Tensor]) -> Tensor:
    """The dense matrix [rows, cols]; `bits_of` gives blocks [blocks, height, width]."""
    (height, width), (_, cols) = matrix.block, matrix.shape
    dense = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
    bits = bit_view(dense)
    for rows, where, row in block_pieces(matrix):
        count, place = -(-(rows.stop - rows.start) // height), matrix.indices[where]
        tiles = bits.new_zeros(count, height, -(-cols // width), width)
        used = (place >= 0).nonzero()[:, 0]
        tiles[row[used], :, place[used].long()] = bits_of(where)[used]
        bits[rows] = tiles.flatten(2).flatten(0, 1)[: rows.stop - rows.start, :cols]
    return dense


def check_padding(matrix: _Blocks, rows: slice, where: slice, line: Tensor, bits: Tensor) -> None:
    """Refuse bits outside the matrix, and in free blocks.

    Args:
        matrix: The blocks are some of its.
        rows: Of a piece of `block_pieces`; so are `where` and `line`.
        where: The blocks.
        line: Block row of each, counted from the first.
        bits: What they hold [blocks, block rows, block cols].

    Raises:
        FormatError: The first block that has some.
    """
    (height, width), place = matrix.block, matrix.indices[where]
    stray = (place < 0) & (bits != 0).flatten(1).any(1)
    if matrix.shape[1] % width:
        last = place == matrix.shape[1] // width
        stray |= last & (bits[:, :, matrix.shape[1] % width :] != 0).flatten(1).any(1)
    if rows.stop % height:
        last = line == (rows.stop - rows.start) // height
        stray |= last & (bits[:, rows.stop % height :] != 0).flatten(1).any(1)
    if stray.any():
        at = int(stray.nonzero()[0])
        raise FormatError(
            f"block {where.start + at} (block row {rows.start // height + int(line[at])}, block "
            f"column {int(place[at])}) holds values outside {list(matrix.shape)}",
            need="zeros (all bits) in padding and in free blocks",
            hint=_DAMAGED,
        )


def held_blocks(dense: Tensor, block: tuple[int, int]) -> Tensor:
    """How many blocks of each block row hold a non-zero, int64 [block rows]."""
    pieces = row_slices(dense.shape[0], dense.shape[1], block[0], dense.device)
    return torch.cat([_tiles(dense[rows], block)[1].sum(1) for rows in pieces])


def kept_blocks(
    dense: Tensor, block: tuple[int, int], indptr: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Slot, block column (int32) and bits [blocks, height, width] of blocks with a non-zero.

    Slots follow one another from where `indptr` says that the block row starts.
    """
    for rows in row_slices(dense.shape[0], dense.shape[1], block[0], dense.device):
        tiles, live = _tiles(dense[rows], block)
        row, col = live.nonzero().unbind(1)
        rank = torch.arange(row.numel(), device=row.device) - _starts(live)[row]
        slot = indptr[rows.start // block[0] + row] + rank
        yield slot, col.to(torch.int32), tiles[row, :, col]


def blocks_per_line(block: tuple[int, int], itemsize: int) -> int:
    """Blocks after which a 128-byte boundary comes again: block rows hold a multiple of it.

    Example:
        >>> blocks_per_line((16, 16), 2), blocks_per_line((4, 4), 2)
        (1, 4)
    """
    return _ALIGN_BYTES // gcd(_ALIGN_BYTES, block[0] * block[1] * itemsize)


def _tiles(dense: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Some whole block rows as bits [rows, height, cols, width], -0.0 made +0, and what is live."""
    height, width = block
    dense = dense.contiguous()
    bits = torch.where(nonzero_mask(dense), bit_view(dense), 0)
    bits = F.pad(bits, (0, -bits.shape[1] % width, 0, -bits.shape[0] % height))
    tiles = bits.view(bits.shape[0] // height, height, bits.shape[1] // width, width)
    return tiles, (tiles != 0).any(3).any(1)


def _starts(live: Tensor) -> Tensor:
    """How many live blocks come before each block row of `live`."""
    counts = live.sum(1)
    return counts.cumsum(0) - counts


def check_block(block: tuple[int, int], shape: tuple[int, int]) -> None:
    """Refuse sides that no block of such a matrix has."""
    sound = isinstance(block, tuple | list) and [type(side) for side in block] == [int, int]
    if not sound or min(block) < 1:
        shown = list(block) if isinstance(block, tuple) else block
        raise FormatError(f"block of {shown!r}", need="two positive sides", hint="(32, 32)")
    # The padded blocks are allocated whole.
    if any(side > max(_MAX_SIDE, limit) for side, limit in zip(block, shape, strict=True)):
        raise FormatError(
            f"block of {list(block)} for a matrix of {list(shape)}",
            need=f"sides up to {_MAX_SIDE}, or the side of the matrix",
            hint="(32, 32)",
        )


def _parse_block(attributes: Mapping[str, Attribute]) -> tuple[int, int]:
    text = attributes.get("block")
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", str(text))
    if not found:
        raise FormatError(f"attribute 'block' is {text!r}", need="ROWSxCOLS", hint="32x32")
    return int(found[1]), int(found[2])
