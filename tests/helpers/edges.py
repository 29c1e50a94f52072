"""Sparse matrices as graphs have them: few entries here, very many there, none elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from hopsparse.formats import CSR
from hopsparse.formats._base import pointers
from hopsparse.ops.spmm_csr.cases import power_law

#: Entries of each row, and columns.
SHAPES: dict[str, tuple[list[int], int]] = {
    "one entry": ([1], 1),
    "nothing": ([0, 0, 0], 5),
    "empty ends": ([0] * 40 + [3] + [0] * 75, 9),
    "short rows": ([(7 * i) % 5 for i in range(333)], 200),
    "one huge row": ([2] * 10 + [3001] + [1] * 30, 4000),
    "huge rows together": ([500, 1, 700, 0, 33, 32, 31, 0, 900], 1000),
    "huge last": ([0, 4, 640], 641),
}


def counts_matrix(counts: list[int], cols: int, dtype: torch.dtype = torch.float32) -> CSR:
    """A matrix with so many entries in each row, at random columns; values -2 to 2, none zero."""
    nnz = sum(counts)
    rows = [torch.randperm(cols)[:count].sort().values for count in counts]
    indices = torch.cat(rows).to(torch.int32)
    values = torch.tensor([-2.0, -1.0, 1.0, 2.0])[torch.randint(0, 4, (nnz,))].to(dtype)
    return CSR((len(counts), cols), values, indices, pointers(torch.tensor(counts)))


def disordered(nodes: int, edges: int) -> tuple[Tensor, Tensor]:
    """Pointers and columns of a power-law graph whose rows are in no order, with repetitions."""
    indptr, indices = power_law(nodes, edges)
    row = torch.repeat_interleave(indptr.diff())
    order = torch.randperm(edges)
    order = order[torch.argsort(row[order], stable=True)]
    return indptr, indices[order]


def exact(a: CSR | Tensor, x: Tensor) -> Tensor:
    """A @ x in float64."""
    dense = a.to_dense()
    return dense.double() @ x.double()


def few(rows: int, features: int, longest: int, dtype: torch.dtype) -> Tensor:
    """-1, 0 and 1 in few rows, so that sums of a long row fit the 8 bits of bfloat16."""
    kept = torch.rand(rows, 1) < 20 / max(20, longest)
    return (torch.randint(-1, 2, (rows, features)) * kept).to(dtype)


def poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Leave NaN where the next result of this shape will be."""
    torch.full(shape, float("nan"), dtype=dtype, device=device)
