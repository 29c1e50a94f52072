"""Any sparse weight on 2:4 units: what fits is packed, and what does not stays in CSR."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..formats import CSR, NM, stack_rows
from ..formats._base import row_slices
from ..measure.structure import fitting_order
from ..ops import COMPUTE_DTYPES, pack_nm
from .sparse_linear import SparseLinear

_PANEL = 64  # rows that are packed together


class SplitLinear(nn.Module):
    """y = x @ w.T + bias, w = main + rest: main is 2:4 in another order of columns, rest is CSR.

    No entry of w is lost or rounded. Where all of w fits 2:4, in its own order of columns or in the
    one that was found, there is no rest, and the result is that of the 2:4 product alone.

    Args:
        main: [out, k], 2:4, its columns in `order`.
        rest: [out, k] in CSR, its columns as those of w; None if nothing is left.
        order: int64 [k], column of w that is column j of main; None where it is the same.

    Example:
        >>> w = CSR.from_dense(torch.tensor([[1.0, 2.0, 3.0, 0.0], [0.0, 0.0, 0.0, 4.0]]))
        >>> layer = SplitLinear.from_csr(w, reorder=False)
        >>> layer(torch.ones(1, 4)), layer.describe()
        (tensor([[6., 4.]]), '3 of 4 non-zeros are 2:4, 1 stays in CSR')
    """

    order: Tensor | None

    def __init__(
        self, main: SparseLinear, rest: SparseLinear | None = None, order: Tensor | None = None
    ) -> None:
        super().__init__()
        self.main, self.rest = main, rest
        self.register_buffer("order", order)

    @classmethod
    def from_csr(cls, matrix: CSR, bias: Tensor | None = None, *, reorder: bool = True) -> Self:
        """Split a matrix; the two largest entries of each group of four go to main.

        Memory for a few rows at a time is taken beside the result.

        Args:
            matrix: [out, k], float32, bfloat16 or float16; sorted columns, none twice.
            bias: [out] or None.
            reorder: Look for an order of columns under which more entries fit (docs/inspect.md).

        Raises:
            ArgumentError: Another kind of matrix or dtype.
            FormatError: The parts are no valid matrix.
        """
        if not isinstance(matrix, CSR) or matrix.dtype not in COMPUTE_DTYPES:
            kind = type(matrix).__name__
            told = f"{kind} of {matrix.dtype}" if isinstance(matrix, CSR) else kind
            raise ArgumentError(
                f"a {told} to split",
                need="a CSR matrix of float32, bfloat16 or float16",
                hint='convert(matrix, "csr")',
            )
        matrix.validate()
        order = fitting_order(matrix) if reorder else None
        packed, rest = _split(matrix, order)
        main = SparseLinear(packed, bias)
        if rest.values.numel() == 0:
            return cls(main, None, order)
        left = SparseLinear(rest)
        left.keep_decoded = False  # Few entries: a decoded weight would cost what is saved.
        return cls(main, left, order)

    def forward(self, x: Tensor) -> Tensor:
        """[..., k] to [..., out]; arguments as for `SparseLinear`."""
        y: Tensor = self.main(x if self.order is None else x.index_select(-1, self.order))
        return y if self.rest is None else y + self.rest(x)

    def to_dense(self) -> Tensor:
        """The weight [out, k], as a new tensor."""
        dense = self.main.to_dense()
        if self.order is not None:
            dense = torch.empty_like(dense).index_copy_(1, self.order, dense)
        return dense if self.rest is None else dense + self.rest.to_dense()

    def describe(self) -> str:
        """How many entries each part holds."""
        held = int((self.main.to_dense() != 0).sum())
        left = 0 if self.rest is None else int((self.rest.to_dense() != 0).sum())
        ordered = "" if self.order is None else " with columns reordered"
        stays = f"{left:,} stay{'s' if left == 1 else ''} in CSR" if left else "nothing is left"
        return f"{held:,} of {held + left:,} non-zeros are 2:4{ordered}, {stays}"


def _split(matrix: CSR, order: Tensor | None) -> tuple[NM, CSR]:
    (rows, cols), pieces, left = matrix.shape, list[NM](), list[CSR]()
    place = None if order is None else torch.empty_like(order)
    if order is not None and place is not None:
        place[order] = torch.arange(cols, device=order.device)
    for which in row_slices(rows, cols, _PANEL, matrix.device):
        dense = _rows(matrix, which).to_dense()
        if order is not None:
            dense = dense[:, order]
        packed = pack_nm(dense, "2:4", select="magnitude")
        rest = torch.where(packed.to_dense() != 0, 0, dense)
        pieces.append(packed)
        left.append(CSR.from_dense(rest if place is None else rest[:, place]))
    return stack_rows(pieces), _below(matrix.shape, left)


def _rows(matrix: CSR, which: slice) -> CSR:
    pointers = matrix.indptr[which.start : which.stop + 1]
    first, last = int(pointers[0]), int(pointers[-1])
    shape = (which.stop - which.start, matrix.shape[1])
    return CSR(shape, matrix.values[first:last], matrix.indices[first:last], pointers - first)


def _below(shape: tuple[int, int], parts: list[CSR]) -> CSR:
    counts = torch.cat([part.indptr.diff() for part in parts])
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=indptr[1:])
    values, indices = (
        torch.cat([getattr(p, name) for p in parts]) for name in ("values", "indices")
    )
    return CSR(shape, values, indices, indptr.to(parts[0].indptr.dtype))
