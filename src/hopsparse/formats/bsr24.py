"""Block rows (BSR) whose blocks are 2:4 inside: half the values of a block, and where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..errors import FormatError
from ._base import (
    Attribute,
    PartSpec,
    SparseMatrix,
    bit_view,
    check_dense,
    nonzero_mask,
    pointers,
    row_slices,
)
from ._windows import group_masks, window_table
from .bsr import BSR, block_pieces, check_block, check_padding, held_blocks, kept_blocks, laid_out
from .nm import full_group_error
from .pattern import NMPattern

_TWO_FOUR = NMPattern(2, 4)
# Kept values of a block then take whole lines of 128 bytes in any dtype, so none is ever free.
_ENTRIES, _COLUMNS = 256, 8


@dataclass(frozen=True, eq=False, repr=False)
class BSR24(SparseMatrix):
    """Blocks in block-row order, of each group of 4 columns in a row at most 2 entries.

    What a `BSR` stores, in 9/16 of its bytes (16-bit values). Every block starts on 128 bytes.

    Attributes:
        values: Kept entries, row-major in a block [blocks, block rows, block cols / 2].
        nibbles: Their columns in groups of 4, two groups a byte, the left one in its low half:
            `c0 | c1 << 2` with c0 < c1; uint8 [blocks, block rows, block cols / 8].
        indices: Block column of each block, int32 [blocks], rising along a block row.
        indptr: Where block rows start, int32 [block rows + 1].
        block: Rows and columns of a block.
    """

    values: Tensor
    nibbles: Tensor
    indices: Tensor
    indptr: Tensor
    block: tuple[int, int]

    name: ClassVar[str] = "bsr24"
    PARTS: ClassVar[tuple[str, ...]] = ("values", "nibbles", "indices", "indptr")

    @classmethod
    def from_dense(cls, dense: Tensor, block: tuple[int, int] = (32, 32)) -> Self:
        """Store each block that holds a non-zero; nothing is pruned.

        Args:
            dense: [rows, cols], any strides; the sides need not be multiples of the block's.
            block: Rows and columns of a block: columns a multiple of 8, rows times columns one of
                256, sides up to 1024 or the side of the matrix.

        Raises:
            FormatError: The matrix is empty, the block has no such sides, or a group of 4 columns
                holds more than 2 non-zeros (first bad row and group named).

        Example:
            >>> w = BSR24.from_dense(torch.eye(64), block=(32, 32))
            >>> w.indices.tolist(), w.values.shape, int(w.nibbles[0, 0, 0])
            ([0, 1], torch.Size([2, 32, 16]), 68)
        """
        dense = check_dense(dense)
        shape = (dense.shape[0], dense.shape[1])
        _check_sides(block)
        check_block(block, shape)
        indptr = pointers(held_blocks(dense, block))
        made = cls._allocated(shape, dense.dtype, indptr, (block[0], block[1]))
        for slot, col, bits in kept_blocks(dense, block, indptr):
            if slot.numel():
                where = slice(int(slot[0]), int(slot[-1]) + 1)
                made.indices[where] = col
                made._compress(bits, bits != 0, where)
        return made

    @classmethod
    def from_blocks(cls, blocks: BSR) -> Self:
        """Compress the blocks of a `BSR`, whose places are shared.

        Args:
            blocks: Sides of blocks as for `from_dense`.

        Raises:
            FormatError: The block has other sides, or a group holds more than 2 non-zeros.

        Example:
            >>> BSR24.from_blocks(BSR.from_dense(torch.eye(64), (16, 16))).nbytes
            2212
        """
        _check_sides(blocks.block)
        made = replace(
            cls._allocated(blocks.shape, blocks.dtype, blocks.indptr, blocks.block),
            indices=blocks.indices,
        )
        for where in made._pieces():
            kept = blocks.values[where].contiguous()
            made._compress(bit_view(kept), nonzero_mask(kept), where)
        return made

    def to_blocks(self) -> BSR:
        """The same matrix with its blocks written out; places are shared.

        Example:
            >>> BSR24.from_dense(torch.eye(64)).to_blocks().values.shape
            torch.Size([2, 32, 32])
        """
        size = (self.values.shape[0], *self.block)
        values = torch.empty(size, dtype=self.dtype, device=self.device)
        for where in self._pieces():
            bit_view(values)[where] = self._written_out(where)
        return BSR(self.shape, values, self.indices, self.indptr, self.block)

    def to_dense(self) -> Tensor:
        """Return [rows, cols] in the dtype and on the device of the values."""
        return laid_out(self, self.dtype, self._written_out)

    def validate(self) -> None:
        """Check shapes, dtypes, pointers, bounds, order, nibbles and padding.

        Raises:
            FormatError: The first fact that does not hold.
        """
        _check_sides(self.block)
        self._check_parts()
        # Reads no values, so their halves do for whole blocks.
        BSR(self.shape, self.values, self.indices, self.indptr, self.block).check_indices()
        for rows, where, line in block_pieces(self):
            self._validate_nibbles(where)
            check_padding(self, rows, where, line, self._written_out(where))

    @classmethod
    def part_specs(
        cls, shape: tuple[int, int], dtype: torch.dtype, attributes: Mapping[str, Attribute]
    ) -> dict[str, PartSpec]:
        """See `SparseMatrix.part_specs`; needs the attributes `block` ("32x32") and `blocks`."""
        specs = BSR.part_specs(shape, dtype, attributes)
        count, height, width = specs["values"][0]
        _check_sides((height, width))
        return {
            "values": ((count, height, width // 2), dtype),
            "nibbles": ((count, height, width // 8), torch.uint8),
            "indices": specs["indices"],
            "indptr": specs["indptr"],
        }

    @classmethod
    def from_parts(
        cls,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        attributes: Mapping[str, Attribute],
    ) -> Self:
        """See `SparseMatrix.from_parts`."""
        _, height, width = BSR.part_specs(shape, torch.float32, attributes)["values"][0]
        _check_sides((height, width))
        found = (parts["values"], parts["nibbles"], parts["indices"], parts["indptr"])
        return cls(shape, *found, (height, width))

    def attributes(self) -> dict[str, Attribute]:
        """Sides of a block, and the number of stored blocks."""
        return {"block": f"{self.block[0]}x{self.block[1]}", "blocks": self.values.shape[0]}

    @classmethod
    def _allocated(
        cls, shape: tuple[int, int], dtype: torch.dtype, indptr: Tensor, block: tuple[int, int]
    ) -> Self:
        """A matrix whose values, nibbles and block columns are still to be written."""
        facts: dict[str, Attribute] = {
            "block": f"{block[0]}x{block[1]}",
            "blocks": int(indptr[-1]),
        }
        parts = {
            part: torch.empty(size, dtype=kind, device=indptr.device)
            for part, (size, kind) in cls.part_specs(shape, dtype, facts).items()
        }
        return cls.from_parts(shape, {**parts, "indptr": indptr}, facts)

    def _pieces(self) -> Iterator[slice]:
        """Consecutive blocks, about as many entries as conversions work on at a time."""
        height, width = self.block
        return row_slices(self.values.shape[0], height * width, 1, self.device)

    def _compress(self, bits: Tensor, live: Tensor, where: slice) -> None:
        """Store blocks [count, rows, cols], and which of their entries are not zero."""
        count, height, width = bits.shape
        table, groups = window_table(4, bits.device), width // 4
        mask = group_masks(live.view(-1, width), 4)
        held = table.count[mask].view(count, height, groups)
        if int(held.max()) > 2:
            self._refuse_full_group(held, where.start)
        kept = bits.reshape(-1, 4).gather(1, table.column.index_select(0, mask))
        kept.mul_(table.live.index_select(0, mask))
        bit_view(self.values)[where] = kept.view(count, height, width // 2)
        nibbles = table.nibble.index_select(0, mask).view(count, height, groups // 2, 2)
        self.nibbles[where] = (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8)

    def _refuse_full_group(self, held: Tensor, first: int) -> None:
        (height, width), (block, row, group) = self.block, (held > 2).nonzero()[0].tolist()
        block_row = int(torch.searchsorted(self.indptr, first + block, right=True)) - 1
        raise full_group_error(
            _TWO_FOUR,
            block_row * height + row,
            int(self.indices[first + block]) * (width // 4) + group,
            int(held[block, row, group]),
        )

    def _columns(self, where: slice) -> Tensor:
        """Where kept entries are in their groups [blocks, rows, groups, 2]."""
        both = self.nibbles[where].long()
        nibbles = torch.stack((both & 15, both >> 4), dim=-1).flatten(2)
        return torch.stack((nibbles & 3, nibbles >> 2), dim=-1)

    def _written_out(self, where: slice) -> Tensor:
        """Bits of some blocks [blocks, rows, cols]."""
        columns, kept = self._columns(where), bit_view(self.values[where])
        out = kept.new_zeros(*columns.shape[:-1], 4)
        return out.scatter_(3, columns, kept.reshape(columns.shape)).flatten(2)

    def _validate_nibbles(self, where: slice) -> None:
        columns = self._columns(where)
        bad = (columns[..., 0] >= columns[..., 1]).nonzero()
        if bad.numel():
            block, row, group = bad[0].tolist()
            raise FormatError(
                f"block {where.start + block}, row {row}, group {group} has index pair "
                f"{columns[block, row, group].tolist()}",
                need="two rising columns in every nibble",
                hint="the file is damaged: restore it, or rebuild the matrix with from_dense",
            )


def _check_sides(block: tuple[int, int]) -> None:
    sound = isinstance(block, tuple | list) and [type(side) for side in block] == [int, int]
    if not sound or block[1] % _COLUMNS or block[0] * block[1] % _ENTRIES or min(block) < 1:
        raise FormatError(
            f"block of {list(block) if isinstance(block, tuple) else block!r} with 2:4 inside",
            need=f"columns a multiple of {_COLUMNS}, rows times columns one of {_ENTRIES}",
            hint="(16, 16), (32, 32), (64, 64) or (128, 128)",
        )
