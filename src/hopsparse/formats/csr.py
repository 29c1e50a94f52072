"""Compressed rows (CSR) and compressed columns (CSC): one layout along either axis."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self, overload

import torch
from torch import Tensor

from ..errors import ArgumentError, FormatError
from ._base import (
    Attribute,
    PartSpec,
    SparseMatrix,
    bit_view,
    check_dense,
    check_indptr,
    count_attribute,
    nonzero_mask,
    pointer_dtype,
    pointers,
)
from ._entries import Entries, dense_counts, dense_entries, pointed_rows, scatter


@dataclass(frozen=True, eq=False, repr=False)
class _Compressed(SparseMatrix):
    """Entries sorted along the major axis, with pointers to where each line of it starts."""

    values: Tensor
    indices: Tensor
    indptr: Tensor

    PARTS: ClassVar[tuple[str, ...]] = ("values", "indices", "indptr")
    #: 0 where lines are rows, 1 where they are columns.
    MAJOR: ClassVar[int]

    @classmethod
    def from_dense(cls, dense: Tensor) -> Self:
        """Store the non-zeros of `dense`.

        Args:
            dense: [rows, cols], any strides, any shape.

        Raises:
            FormatError: The matrix is empty, not 2-D, or of an unknown dtype.

        Example:
            >>> CSR.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0]])).indptr
            tensor([0, 1, 1], dtype=torch.int32)
        """
        dense = check_dense(dense)
        lines = dense if cls.MAJOR == 0 else dense.T
        shape = (dense.shape[0], dense.shape[1])
        return cls.from_entries(shape, dense.dtype, dense_counts(lines), dense_entries(lines))

    @classmethod
    def from_entries(
        cls, shape: tuple[int, int], dtype: torch.dtype, counts: Tensor, entries: Iterator[Entries]
    ) -> Self:
        """Gather sorted entries, whose `row` is the line, given how many each line holds."""
        indptr = pointers(counts)
        nnz = int(indptr[-1])
        values = torch.empty(nnz, dtype=dtype, device=counts.device)
        indices = torch.empty(nnz, dtype=torch.int32, device=counts.device)
        done, bits = 0, bit_view(values)
        for _, minor, piece in entries:
            stop = done + piece.numel()
            bits[done:stop] = piece
            indices[done:stop] = minor
            done = stop
        return cls(shape, values, indices, indptr)

    def to_dense(self) -> Tensor:
        """Return [rows, cols] in the dtype and on the device of the values."""
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if self.MAJOR == 0:
            scatter(dense, self.entries())
        else:
            scatter(dense, (Entries(col, row, bits) for row, col, bits in self.entries()))
        return dense

    def entries(self) -> Iterator[Entries]:
        """The stored entries, whose `row` is the line and whose `col` the place in it."""
        bits = bit_view(self.values)
        for _, where, line in pointed_rows(self.indptr):
            yield Entries(line, self.indices[where].long(), bits[where])

    def validate(self) -> None:
        """Check shapes, dtypes, pointers, and that indices rise within bounds.

        Raises:
            FormatError: The first fact that does not hold.
        """
        self._check_parts()
        check_indptr(self.name, self.indptr, self.values.numel())
        line_word, place_word = ("row", "column")[:: 1 if self.MAJOR == 0 else -1]
        size = self.shape[1 - self.MAJOR]
        for _, where, line in pointed_rows(self.indptr):
            place = self.indices[where]
            outside = ((place < 0) | (place >= size)).nonzero()
            if outside.numel():
                at = int(outside[0])
                raise FormatError(
                    f"{line_word} {int(line[at])} has {place_word} {int(place[at])} at entry "
                    f"{where.start + at}",
                    need=f"{place_word}s from 0 to {size - 1}",
                    hint="indices count from 0; is the shape right?",
                )
            still = ((place[1:] <= place[:-1]) & (line[1:] == line[:-1])).nonzero()
            if still.numel():
                at = int(still[0])
                fault = "repeated" if place[at] == place[at + 1] else "out of order"
                raise FormatError(
                    f"{line_word} {int(line[at])} has {place_word} {int(place[at + 1])} {fault} "
                    f"at entry {where.start + at + 1}",
                    need=f"rising {place_word}s in each {line_word}",
                    hint="torch.sparse_coo_tensor(...).coalesce().to_sparse_csr()",
                )

    @classmethod
    def part_specs(
        cls, shape: tuple[int, int], dtype: torch.dtype, attributes: Mapping[str, Attribute]
    ) -> dict[str, PartSpec]:
        """See `SparseMatrix.part_specs`; needs the attribute `nnz`, the number of stored values."""
        nnz = count_attribute(attributes, "nnz")
        return {
            "values": ((nnz,), dtype),
            "indices": ((nnz,), torch.int32),
            "indptr": ((shape[cls.MAJOR] + 1,), pointer_dtype(nnz)),
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
        return cls(shape, parts["values"], parts["indices"], parts["indptr"])

    def attributes(self) -> dict[str, Attribute]:
        """The number of stored values; explicit zeros count."""
        return {"nnz": self.values.numel()}


@dataclass(frozen=True, eq=False, repr=False)
class CSR(_Compressed):
    """Compressed rows: row r holds entries indptr[r] to indptr[r + 1], sorted by column.

    Attributes:
        values: Stored numbers [nnz].
        indices: Column of each, int32 [nnz].
        indptr: Where rows start, int32 [rows + 1] (int64 from 2**31 entries on).
    """

    name: ClassVar[str] = "csr"
    MAJOR: ClassVar[int] = 0

    def row_counts(self) -> Tensor:
        """Stored entries of each row, int64 [rows]."""
        return self.indptr.diff().long()

    def without_zeros(self) -> CSR:
        """The same matrix without entries that are stored and zero; itself if there are none.

        Example:
            >>> stored = CSR((1, 2), torch.tensor([0.0, 5.0]), torch.tensor([0, 1]).int(),
            ...              torch.tensor([0, 2]).int())
            >>> stored.without_zeros().indices.tolist()
            [1]
        """
        live = nonzero_mask(self.values)
        if bool(live.all()):
            return self
        before = torch.zeros(live.numel() + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(live, 0, out=before[1:])
        indptr = before[self.indptr.long()].to(pointer_dtype(int(before[-1])))
        values = bit_view(self.values)[live].view(self.dtype)
        return CSR(self.shape, values, self.indices[live], indptr)

    @classmethod
    def from_torch(cls, tensor: Tensor) -> Self:
        """Wrap a `torch.sparse_csr` tensor; values are shared, and int32 indices too.

        Args:
            tensor: 2-D `torch.sparse_csr` [rows, cols], one number an entry.

        Raises:
            ArgumentError: The tensor has another layout, or batch or dense dimensions.
            FormatError: Its indices do not form a valid matrix.

        Example:
            >>> CSR.from_torch(CSR.from_dense(torch.eye(2)).to_torch()).to_dense()
            tensor([[1., 0.],
                    [0., 1.]])
        """
        if tensor.layout != torch.sparse_csr or tensor.ndim != 2 or tensor.dense_dim():
            raise ArgumentError(
                f"tensor of layout {tensor.layout} and shape {list(tensor.shape)}",
                need="a 2-D torch.sparse_csr tensor",
                hint="tensor.to_sparse_csr(), or CSR.from_dense(tensor)",
            )
        limit = torch.iinfo(torch.int32).max
        if tensor.shape[1] > limit:
            raise FormatError(
                f"{tensor.shape[1]} columns", need=f"at most {limit}", hint="split the matrix"
            )
        values, indices = tensor.values().detach(), tensor.col_indices()
        indptr = tensor.crow_indices()
        if indptr.numel() and int(indptr.abs().max()) <= limit:
            # A pointer past int32 keeps its dtype, and `validate` names it.
            indptr = indptr.to(pointer_dtype(values.numel()))
        # Out of the int32 range is out of the matrix too, but `validate` would see it wrapped.
        matrix = cls((tensor.shape[0], tensor.shape[1]), values, indices.to(torch.int32), indptr)
        beyond = (indices != matrix.indices).nonzero()
        if beyond.numel():
            at = int(beyond[0])
            row = int((tensor.crow_indices() <= at).sum()) - 1
            raise FormatError(
                f"row {row} has column {int(indices[at])} at entry {at}",
                need=f"columns from 0 to {tensor.shape[1] - 1}",
                hint="indices count from 0; is the shape right?",
            )
        matrix.validate()
        return matrix

    def to_torch(self) -> Tensor:
        """Return a `torch.sparse_csr` tensor that shares the values and, if int32, the pointers."""
        with warnings.catch_warnings():
            # torch says once in a process that this layout is in beta, and may say that checks are
            # off, although the call says so itself.
            for said in ("Sparse CSR tensor support", "Sparse invariant checks are implicitly"):
                warnings.filterwarnings("ignore", said, UserWarning)
            return torch.sparse_csr_tensor(
                self.indptr,
                self.indices.to(self.indptr.dtype),
                self.values,
                size=self.shape,
                check_invariants=False,
            )


@dataclass(frozen=True, eq=False, repr=False)
class CSC(_Compressed):
    """Compressed columns: column c holds entries indptr[c] to indptr[c + 1], sorted by row.

    Attributes:
        values: Stored numbers [nnz].
        indices: Row of each, int32 [nnz].
        indptr: Where columns start, int32 [cols + 1] (int64 from 2**31 entries on).
    """

    name: ClassVar[str] = "csc"
    MAJOR: ClassVar[int] = 1


@overload
def transposed(matrix: CSR) -> CSC: ...
@overload
def transposed(matrix: CSC) -> CSR: ...
def transposed(matrix: CSR | CSC) -> CSR | CSC:
    """The same matrix compressed along its other axis, without a dense copy.

    Needs working memory of about 24 bytes a stored entry.
    """
    other: type[CSR | CSC] = CSC if isinstance(matrix, CSR) else CSR
    lines = matrix.shape[other.MAJOR]
    order = torch.argsort(matrix.indices, stable=True)
    counts = torch.bincount(matrix.indices, minlength=lines)
    line = torch.repeat_interleave(matrix.indptr.diff())
    bits = bit_view(matrix.values)[order]
    values = bits.view(matrix.dtype)
    return other(matrix.shape, values, line[order].to(torch.int32), pointers(counts))
