"""Edges of a graph as the matrix that a layer aggregates with, sorted once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from ..errors import ArgumentError, UnsupportedError
from ..formats.csr import CSR
from ..launch import is_capturing

#: How neighbours are put together.
AGGREGATIONS = ("gcn", "mean", "sum")


@dataclass(frozen=True, eq=False)
class Aggregation:
    """The matrix A [nodes, nodes] of y = A @ x: row t has the edges that end in t.

    - `sum`: the weight of an edge, or 1.
    - `mean`: 1 / the number of edges that end in t.
    - `gcn`: d(s)^-1/2 weight d(t)^-1/2 with the weights d that end in a node, after every node got
      an edge of weight 1 to itself where it has none (Kipf and Welling, arXiv:1609.02907).

    Edges may repeat, and then count each.

    Attributes:
        matrix: Values are those without weights, float32.
        kind: One of `AGGREGATIONS`.
        edges: How many there were.
        order: For each entry the edge that it comes from; from `edges` on the node of a new one.
    """

    matrix: CSR
    kind: str
    edges: int
    order: Tensor
    _known: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def from_edges(cls, edges: Tensor, nodes: int, kind: str = "gcn") -> Self:
        """Sort the edges of a graph. On a GPU it waits for it.

        Args:
            edges: Integers [2, edges]: sources, then targets, as torch_geometric's `edge_index`.
            nodes: At least one.
            kind: One of `AGGREGATIONS`.

        Raises:
            ArgumentError: They are no edges between so many nodes, or there is no such kind.
            UnsupportedError: A CUDA graph is being captured.

        Example:
            >>> chain = Aggregation.from_edges(torch.tensor([[0, 1], [1, 2]]), 3, "sum")
            >>> chain.matrix.to_dense().tolist()
            [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
        """
        _check_edges(edges, nodes, kind)
        # What is kept of a graph serves calls that train, whatever mode it was first seen in.
        with torch.inference_mode(False), torch.no_grad():
            return cls._sorted(edges, nodes, kind)

    @classmethod
    def _sorted(cls, edges: Tensor, nodes: int, kind: str) -> Self:
        source, target = edges.long()
        number = torch.arange(source.numel(), device=edges.device)
        if kind == "gcn":
            # Each node has one edge to itself: the last of its own, as torch_geometric takes it.
            own = torch.arange(nodes, device=edges.device)
            of_own, loops = number.numel() + own, source == target
            of_own = of_own.scatter_reduce(
                0, source[loops], number[loops], "amax", include_self=False
            )
            source, target = torch.cat((source[~loops], own)), torch.cat((target[~loops], own))
            number = torch.cat((number[~loops], of_own))
        order = torch.argsort(target * nodes + source, stable=True)
        counts = torch.bincount(target, minlength=nodes)
        indptr = torch.zeros(nodes + 1, dtype=torch.int64, device=edges.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        size = torch.int32 if order.numel() < 2**31 else torch.int64
        columns = source[order].to(torch.int32)
        blank = torch.ones(order.numel(), device=edges.device)
        found = cls(
            CSR((nodes, nodes), blank, columns, indptr.to(size)),
            kind,
            edges.shape[1],
            number[order],
        )
        values = found.values(torch.float32)
        return replace(found, matrix=found.matrix.with_parts({"values": values}))

    def values(self, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
        """The values of A for weights of the edges; differentiable in them.

        Args:
            dtype: Of the result; float64 is computed in float64, all else in float32.
            weight: [edges], in the order in which the edges were given; None is 1 for each.

        Raises:
            ArgumentError: Weights do not fit, or are given for a mean.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if weight is None:
            if dtype not in self._known:
                # A tensor of inference mode could not serve a later call that trains.
                with torch.inference_mode(False), torch.no_grad():
                    ones = torch.ones_like(self.matrix.values, dtype=wide)
                    self._known[dtype] = self._weighted(ones).to(dtype)
            return self._known[dtype]
        if weight.shape != (self.edges,) or not weight.is_floating_point() or self.kind == "mean":
            raise ArgumentError(
                f"weights {list(weight.shape)} of {weight.dtype} for {self.kind}",
                need=f"[{self.edges}] floating numbers, for gcn or sum",
                hint="gcn, which divides by the weights of a node",
            )
        own = weight.new_ones(self.matrix.shape[0], dtype=wide)
        return self._weighted(torch.cat((weight.to(wide), own))[self.order]).to(dtype)

    def _weighted(self, weight: Tensor) -> Tensor:
        """Values for a weight of each entry."""
        if self.kind == "sum":
            return weight
        counts = self.matrix.row_counts()
        # Told how many there are, it does not ask the device.
        row = torch.repeat_interleave(counts, output_size=self.order.numel())
        if self.kind == "mean":
            return weight / counts.clamp(min=1).to(weight.dtype)[row]
        degree = torch.zeros_like(counts, dtype=weight.dtype).index_add(0, row, weight)
        root = torch.where(degree > 0, degree, 1).rsqrt() * (degree > 0)
        return root[self.matrix.indices] * weight * root[row]


def _check_edges(edges: Tensor, nodes: int, kind: str) -> None:
    if kind not in AGGREGATIONS:
        raise ArgumentError(
            f"aggregation {kind!r}", need=f"one of {', '.join(AGGREGATIONS)}", hint='"gcn"'
        )
    if (
        not isinstance(edges, Tensor)
        or edges.ndim != 2
        or edges.shape[0] != 2
        or edges.dtype not in (torch.int64, torch.int32)
    ):
        told = f"{list(edges.shape)} of {edges.dtype}" if isinstance(edges, Tensor) else type(edges)
        raise ArgumentError(
            f"edges {told}",
            need="int64 or int32 [2, edges], sources before targets",
            hint="edge_index of torch_geometric, or torch.stack((sources, targets))",
        )
    if edges.is_cuda and is_capturing(edges.get_device()):
        raise UnsupportedError(
            "edges that are new, while a CUDA graph is captured",
            need="a graph that was sorted before",
            hint="one call with these edges before the capture",
        )
    limit = torch.iinfo(torch.int32).max
    least, most = (int(end) for end in edges.aminmax()) if edges.numel() else (0, -1)
    if least < 0 or most >= nodes or not 0 < nodes <= limit:
        raise ArgumentError(
            f"edges between nodes {least} to {most} of a graph of {nodes}",
            need=f"nodes from 0 to {nodes - 1}, at least one and at most {limit} of them",
            hint="a row of x for every node",
        )
