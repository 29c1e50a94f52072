"""Sparse matrices as graphs have them: few entries here, very many there, none elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from hopsparse.formats import CSR
from hopsparse.formats._base import pointers

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


def power_law(
    nodes: int, edges: int, *, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Pointers and columns of a graph: degrees fall as 1 / rank^0.6, both ways, in shuffled order.

    Columns of a row may repeat, and are in no order.
    """
    weight = torch.arange(1, nodes + 1, device=device, dtype=torch.float64).pow(-0.6)
    weight = weight[torch.randperm(nodes, device=device)]
    share = (weight / weight.sum()).cumsum(0)

    def drawn() -> Tensor:
        at = torch.rand(edges, device=device, dtype=torch.float64)
        return torch.searchsorted(share, at).clamp_(max=nodes - 1)

    row, column = drawn(), drawn()
    indptr = pointers(torch.bincount(row, minlength=nodes))
    return indptr, column.to(torch.int32)


def exact(a: CSR | Tensor, x: Tensor) -> Tensor:
    """A @ x in float64."""
    dense = a.to_dense()
    return dense.double() @ x.double()
