"""All entries, row by row: for layers that are rounded to fewer bits and keep every weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ._base import (
    Attribute,
    PartSpec,
    SparseMatrix,
    bit_view,
    check_dense,
    nonzero_mask,
    row_slices,
)


@dataclass(frozen=True, eq=False, repr=False)
class Dense(SparseMatrix):
    """Every entry of the matrix, zeros included, in row-major order.

    Attributes:
        values: [rows, cols].
    """

    values: Tensor

    name: ClassVar[str] = "dense"
    PARTS: ClassVar[tuple[str, ...]] = ("values",)

    @classmethod
    def from_dense(cls, dense: Tensor) -> Self:
        """Store a copy of `dense`.

        Args:
            dense: [rows, cols], any strides, any shape.

        Raises:
            FormatError: The matrix is empty, or of a dtype that no format stores.

        Example:
            >>> Dense.from_dense(torch.tensor([[0.0, 9.0]])).values.tolist()
            [[0.0, 9.0]]
        """
        dense = check_dense(dense)
        values = torch.empty(dense.shape, dtype=dense.dtype, device=dense.device)
        for rows in row_slices(dense.shape[0], dense.shape[1], device=dense.device):
            piece = dense[rows].contiguous()
            bit_view(values)[rows] = bit_view(piece).masked_fill(~nonzero_mask(piece), 0)
        return cls((dense.shape[0], dense.shape[1]), values)

    def to_dense(self) -> Tensor:
        """Return a copy, [rows, cols]."""
        return self.values.clone()

    def validate(self) -> None:
        """Check shape and dtype.

        Raises:
            FormatError: The first fact that does not hold.
        """
        self._check_parts()

    @classmethod
    def part_specs(
        cls, shape: tuple[int, int], dtype: torch.dtype, attributes: Mapping[str, Attribute]
    ) -> dict[str, PartSpec]:
        """See `SparseMatrix.part_specs`; needs no attribute."""
        return {"values": (shape, dtype)}

    @classmethod
    def from_parts(
        cls,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        attributes: Mapping[str, Attribute],
    ) -> Self:
        """See `SparseMatrix.from_parts`."""
        return cls(shape, parts["values"])

    def attributes(self) -> dict[str, Attribute]:
        """None."""
        return {}
