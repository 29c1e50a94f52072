"""Any pattern as kept values and one bit an entry: the interchange format of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

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
    count_attribute,
    nonzero_mask,
    row_slices,
)
from ._entries import Entries, dense_counts


@dataclass(frozen=True, eq=False, repr=False)
class Bitmask(SparseMatrix):
    """Kept values in row-major order, and a mask that says where they belong.

    A set bit may stand for a stored zero. The `sparse-24-bitmask` layout of compressed-tensors is
    read as this format: two bits are set in every group of four, and its `compressed`
    [rows, cols / 2] is `values` in two dimensions. Which zeros it stores is a rule of its own
    (`hopsparse.models.sparse24`).

    Attributes:
        values: Stored numbers [nnz].
        mask: uint8 [rows, ceil(cols / 8)]; bit i of byte j is column 8j + i.
    """

    values: Tensor
    mask: Tensor

    name: ClassVar[str] = "bitmask"
    PARTS: ClassVar[tuple[str, ...]] = ("values", "mask")

    @classmethod
    def from_dense(cls, dense: Tensor) -> Self:
        """Store the non-zeros of `dense`.

        Args:
            dense: [rows, cols], any strides, any shape.

        Raises:
            FormatError: The matrix is empty, or of a dtype that no format stores.

        Example:
            >>> m = Bitmask.from_dense(torch.tensor([[0.0, 9.0, 0.0, 7.0]]))
            >>> m.values.tolist(), m.mask.tolist()
            ([9.0, 7.0], [[10]])
        """
        dense = check_dense(dense)
        rows, cols = dense.shape
        count = int(dense_counts(dense).sum())
        values = torch.empty(count, dtype=dense.dtype, device=dense.device)
        mask = torch.empty(rows, -(-cols // 8), dtype=torch.uint8, device=dense.device)
        done, bits = 0, bit_view(values)
        for part in row_slices(rows, cols):
            piece = dense[part].contiguous()
            live = nonzero_mask(piece)
            mask[part] = pack_bits(live)
            piece_bits = bit_view(piece)[live]
            bits[done : done + piece_bits.numel()] = piece_bits
            done += piece_bits.numel()
        return cls((rows, cols), values, mask)

    def to_dense(self) -> Tensor:
        """Return [rows, cols] in the dtype and on the device of the values."""
        dense = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        bits, source, done = bit_view(dense), bit_view(self.values), 0
        for rows in row_slices(*self.shape):
            stored = unpack_bits(self.mask[rows], self.shape[1])
            count = int(stored.sum())
            piece = torch.zeros(stored.shape, dtype=bits.dtype, device=bits.device)
            bits[rows] = piece.masked_scatter_(stored, source[done : done + count])
            done += count
        return dense

    def entries(self) -> Iterator[Entries]:
        """The stored entries, a few rows at a time."""
        source, done = bit_view(self.values), 0
        for rows in row_slices(*self.shape):
            row, col = unpack_bits(self.mask[rows], self.shape[1]).nonzero().unbind(1)
            yield Entries(row + rows.start, col, source[done : done + row.numel()])
            done += row.numel()

    def row_counts(self) -> Tensor:
        """Stored values of each row, int64 [rows]; their running sum says where rows start."""
        counts = torch.empty(self.shape[0], dtype=torch.int64, device=self.device)
        for rows in row_slices(*self.shape):
            counts[rows] = _popcount(self.mask[rows]).sum(1, dtype=torch.int64)
        return counts

    def validate(self) -> None:
        """Check shapes, dtypes, the number of set bits, and that none is set past the last column.

        Raises:
            FormatError: The first fact that does not hold.
        """
        self._check_parts()
        if self.shape[1] % 8:
            stray = (self.mask[:, -1] >> (self.shape[1] % 8)).nonzero()
            if stray.numel():
                row = int(stray[0])
                raise FormatError(
                    f"row {row} of the mask ends in byte {int(self.mask[row, -1])}",
                    need=f"no bit set past the last column, {self.shape[1] - 1}",
                    hint="mask bits are little-endian: bit i of byte j is column 8j + i",
                )
        found = int(self.row_counts().sum())
        if found != self.values.numel():
            raise FormatError(
                f"the mask has {found} bits set, for {self.values.numel()} values",
                need="one value for every bit set",
                hint="the file is damaged: restore it, or rebuild it with from_dense",
            )

    @classmethod
    def part_specs(
        cls, shape: tuple[int, int], dtype: torch.dtype, attributes: Mapping[str, Attribute]
    ) -> dict[str, PartSpec]:
        """See `SparseMatrix.part_specs`; needs the attribute `nnz`, the number of stored values."""
        return {
            "values": ((count_attribute(attributes, "nnz"),), dtype),
            "mask": ((shape[0], -(-shape[1] // 8)), torch.uint8),
        }

    @classmethod
    def from_parts(
        cls,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        attributes: Mapping[str, Attribute],
    ) -> Self:
        """See `SparseMatrix.from_parts`."""
        count_attribute(attributes, "nnz")
        return cls(shape, parts["values"], parts["mask"])

    def attributes(self) -> dict[str, Attribute]:
        """The number of stored values; stored zeros count."""
        return {"nnz": self.values.numel()}


def pack_bits(live: Tensor) -> Tensor:
    """Bool [rows, cols] -> uint8 [rows, ceil(cols / 8)], lowest column in the lowest bit."""
    fields = F.pad(live, (0, -live.shape[1] % 8)).view(torch.uint8).view(live.shape[0], -1, 8)
    packed = fields[..., 0].clone()
    for bit in range(1, 8):
        packed |= fields[..., bit] << bit
    return packed


def unpack_bits(mask: Tensor, cols: int) -> Tensor:
    """The inverse of `pack_bits`."""
    bits = 1 << torch.arange(8, device=mask.device).to(torch.uint8)
    return (mask[..., None] & bits).ne_(0).flatten(1)[:, :cols].bool()


def _popcount(mask: Tensor) -> Tensor:
    pairs = mask - ((mask >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F
