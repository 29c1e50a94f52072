"""ELL of a fixed width, and what sticks out of it as sorted coordinates (HYB)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    count_attribute,
    nonzero_mask,
    pointers,
    row_slices,
)
from ._entries import Entries, dense_counts, dense_entries, scatter

_DAMAGED = "rebuild the matrix with HYB.from_dense, or convert it from CSR"


@dataclass(frozen=True, eq=False, repr=False)
class HYB(SparseMatrix):
    """The first `width` entries of every row in a rectangle (ELL), the rest as coordinates (COO).

    The rectangle is slot-major: neighbouring threads take neighbouring rows, and read neighbouring
    addresses. Free slots hold index -1 and value 0.

    Attributes:
        ell_values: Stored numbers [width, rows].
        ell_indices: Column of each, int32 [width, rows], rising along a row, -1 where free.
        tail_values: Numbers of rows with more than `width` entries [tail], by row, then column.
        tail_rows: Row of each, int32 [tail].
        tail_cols: Column of each, int32 [tail]; past every ELL column of its row.
    """

    ell_values: Tensor
    ell_indices: Tensor
    tail_values: Tensor
    tail_rows: Tensor
    tail_cols: Tensor

    name: ClassVar[str] = "hyb"
    PARTS: ClassVar[tuple[str, ...]] = (
        "ell_values",
        "ell_indices",
        "tail_values",
        "tail_rows",
        "tail_cols",
    )
    VALUES: ClassVar[str] = "ell_values"
    VALUE_PARTS: ClassVar[tuple[str, ...]] = ("ell_values", "tail_values")

    @classmethod
    def from_dense(cls, dense: Tensor) -> Self:
        """Store the non-zeros of `dense`, with the width that needs the fewest bytes.

        Args:
            dense: [rows, cols], any strides, any shape.

        Raises:
            FormatError: The matrix is empty, not 2-D, or of an unknown dtype.

        Example:
            >>> h = HYB.from_dense(torch.tensor([[1.0, 0, 0], [0, 2, 0], [3, 4, 5]]))
            >>> h.ell_indices.tolist(), h.tail_cols.tolist()
            ([[0, 1, 0]], [1, 2])
        """
        dense = check_dense(dense)
        shape = (dense.shape[0], dense.shape[1])
        return cls.from_entries(shape, dense.dtype, dense_counts(dense), dense_entries(dense))

    @classmethod
    def from_entries(
        cls, shape: tuple[int, int], dtype: torch.dtype, counts: Tensor, entries: Iterator[Entries]
    ) -> Self:
        """Gather sorted entries, given how many each row holds."""
        width = ell_width(counts, dtype.itemsize)
        indptr = pointers(counts)
        tail = int((counts - width).clamp_(min=0).sum())
        specs = cls.part_specs(shape, dtype, {"width": width, "tail": tail})
        parts = {
            part: torch.zeros(size, dtype=kind, device=counts.device)
            for part, (size, kind) in specs.items()
        }
        parts["ell_indices"].fill_(-1)
        read, done = 0, 0
        for row, col, bits in entries:
            slot = torch.arange(read, read + row.numel(), device=row.device) - indptr[row]
            read += row.numel()
            inside = slot < width
            where = (slot[inside], row[inside])
            bit_view(parts["ell_values"])[where] = bits[inside]
            parts["ell_indices"][where] = col[inside].to(torch.int32)
            stop = done + row.numel() - where[0].numel()
            bit_view(parts["tail_values"])[done:stop] = bits[~inside]
            parts["tail_rows"][done:stop] = row[~inside]
            parts["tail_cols"][done:stop] = col[~inside]
            done = stop
        return cls(shape, **parts)

    def to_dense(self) -> Tensor:
        """Return [rows, cols] in the dtype and on the device of the values."""
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        scatter(dense, self._pieces())
        return dense

    def entries(self) -> Iterator[Entries]:
        """The stored entries, sorted by row, then column."""
        for row, col, bits in self._pieces():
            # The tail of a row lies past its ELL columns: a stable sort by row merges the two.
            order = torch.argsort(row, stable=True)
            yield Entries(row[order], col[order], bits[order])

    def row_counts(self) -> Tensor:
        """Stored entries of each row, int64 [rows]."""
        tail = torch.bincount(self.tail_rows, minlength=self.shape[0])
        return (self.ell_indices >= 0).sum(0) + tail

    @property
    def nnz(self) -> int:
        """Non-zero entries, counted on the values."""
        return sum(int(nonzero_mask(part).sum()) for part in (self.ell_values, self.tail_values))

    def validate(self) -> None:
        """Check shapes, dtypes, bounds, order, and that free slots and the tail are in place.

        Raises:
            FormatError: The first fact that does not hold.
        """
        self._check_parts()
        for rows in row_slices(self.shape[0], self.ell_indices.shape[0], device=self.device):
            self._validate_ell(rows)
        self._validate_tail()

    @classmethod
    def part_specs(
        cls, shape: tuple[int, int], dtype: torch.dtype, attributes: Mapping[str, Attribute]
    ) -> dict[str, PartSpec]:
        """See `SparseMatrix.part_specs`; needs the attributes `width` and `tail`."""
        ell = (count_attribute(attributes, "width"), shape[0])
        tail = (count_attribute(attributes, "tail"),)
        return {
            "ell_values": (ell, dtype),
            "ell_indices": (ell, torch.int32),
            "tail_values": (tail, dtype),
            "tail_rows": (tail, torch.int32),
            "tail_cols": (tail, torch.int32),
        }

    @classmethod
    def from_parts(
        cls,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        attributes: Mapping[str, Attribute],
    ) -> Self:
        """See `SparseMatrix.from_parts`."""
        return cls(shape, **{part: parts[part] for part in cls.PARTS})

    def attributes(self) -> dict[str, Attribute]:
        """Width of the rectangle and length of the tail."""
        return {"width": self.ell_values.shape[0], "tail": self.tail_values.numel()}

    def _pieces(self) -> Iterator[Entries]:
        """Entries of whole rows, ELL before tail."""
        ell, tail = bit_view(self.ell_values), bit_view(self.tail_values)
        for rows in row_slices(self.shape[0], self.ell_indices.shape[0], device=self.device):
            slots = self.ell_indices[:, rows].T.contiguous()
            used = slots >= 0
            bounds = torch.tensor([rows.start, rows.stop], device=self.device, dtype=torch.int32)
            part = slice(*torch.searchsorted(self.tail_rows, bounds).tolist())
            yield Entries(
                torch.cat((used.nonzero()[:, 0] + rows.start, self.tail_rows[part].long())),
                torch.cat((slots[used].long(), self.tail_cols[part].long())),
                torch.cat((ell[:, rows].T[used], tail[part])),
            )

    def _validate_ell(self, rows: slice) -> None:
        slots = self.ell_indices[:, rows]
        outside = ((slots < -1) | (slots >= self.shape[1])).nonzero()
        if outside.numel():
            slot, row = outside[0].tolist()
            raise FormatError(
                f"row {rows.start + row} has column {int(slots[slot, row])} in ELL slot {slot}",
                need=f"columns from 0 to {self.shape[1] - 1}, or -1 in a free slot",
                hint=_DAMAGED,
            )
        before, after = slots[:-1], slots[1:]
        bad = ((after >= 0) & (after <= before) | (before < 0) & (after >= 0)).nonzero()
        if bad.numel():
            slot, row = bad[0].tolist()
            raise FormatError(
                f"row {rows.start + row} has column {int(after[slot, row])} after "
                f"{int(before[slot, row])} in ELL slot {slot + 1}",
                need="rising columns, then free slots (-1)",
                hint=_DAMAGED,
            )
        full = ((slots < 0) & (bit_view(self.ell_values)[:, rows] != 0)).nonzero()
        if full.numel():
            slot, row = full[0].tolist()
            raise FormatError(
                f"row {rows.start + row} has a value in the free ELL slot {slot}",
                need="zero (all bits) where the index is -1",
                hint=_DAMAGED,
            )

    def _validate_tail(self) -> None:
        row, col = self.tail_rows.long(), self.tail_cols.long()
        outside = (row < 0) | (row >= self.shape[0]) | (col < 0) | (col >= self.shape[1])
        if outside.any():
            at = int(outside.nonzero()[0])
            raise FormatError(
                f"tail entry {at} is row {int(row[at])}, column {int(col[at])}",
                need=f"a place inside {list(self.shape)}",
                hint=_DAMAGED,
            )
        key = row * self.shape[1] + col
        still = (key[1:] <= key[:-1]).nonzero()
        if still.numel():
            at = int(still[0]) + 1
            raise FormatError(
                f"tail entry {at} is row {int(row[at])}, column {int(col[at])}, after row "
                f"{int(row[at - 1])}, column {int(col[at - 1])}",
                need="tail entries sorted by row, then column, none repeated",
                hint=_DAMAGED,
            )
        if not self.ell_indices.shape[0]:
            return
        last = self.ell_indices[-1].long()[row]
        early = ((last < 0) | (col <= last)).nonzero()
        if early.numel():
            at = int(early[0])
            raise FormatError(
                f"tail entry {at} (row {int(row[at])}, column {int(col[at])}) belongs before the "
                f"last ELL slot of its row, which holds column {int(last[at])}",
                need="a full ELL row before its tail, and tail columns past it",
                hint=_DAMAGED,
            )


def ell_width(counts: Tensor, itemsize: int) -> int:
    """The ELL width that stores rows of `counts` entries in the fewest bytes.

    One slot more costs every row a value and an index, and saves each row that fills it a tail
    entry with two indices: it pays while more than (v + 4) / (v + 8) of the rows fill it. Of equal
    widths the smallest is taken.

    Example:
        >>> ell_width(torch.tensor([1, 1, 3]), itemsize=4)
        1
    """
    # fill[w]: rows that hold more than w entries, so use slot w.
    fill = torch.bincount(counts).flip(0).cumsum(0).flip(0)[1:]
    pays = fill * (itemsize + 8) > counts.numel() * (itemsize + 4)
    return int(pays.sum())
