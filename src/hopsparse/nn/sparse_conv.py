"""A graph layer whose aggregation is one sparse product."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError, UnsupportedError
from ..ops import csr_matmul
from ..ops.spmm_csr.pattern import ByMemory
from .aggregation import AGGREGATIONS, Aggregation


class SparseConv(nn.Module):
    """Aggregate neighbours and transform: y = A @ (x @ weight.T) + x @ root.T + bias.

    With "gcn" it is GCNConv of torch_geometric, with "mean" or "sum" SAGEConv, to rounding; pass
    `edge_index` as there. The product with A comes first where x has fewer features than y, so that
    the smaller side is gathered. Edges are sorted at the first call with their tensor, and known
    while it lives; an `Aggregation` made once serves all layers of a model.

    Args:
        in_features: Of x.
        out_features: Of y.
        aggregation: "gcn", "mean" or "sum".
        root: Whether a node sees itself through a weight of its own; None: unless "gcn".
        bias: Whether there is one.

    Example:
        >>> conv, edges = SparseConv(4, 2), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> conv(torch.ones(3, 4), edges).shape
        torch.Size([3, 2])
    """

    weight: nn.Parameter
    root: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        aggregation: str = "gcn",
        *,
        root: bool | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if aggregation not in AGGREGATIONS or in_features < 1 or out_features < 1:
            raise ArgumentError(
                f"SparseConv({in_features}, {out_features}, {aggregation!r})",
                need=f"positive sizes, and one of {', '.join(AGGREGATIONS)}",
                hint='SparseConv(64, 64, "mean")',
            )
        self.in_features, self.out_features = in_features, out_features
        self.aggregation = aggregation
        has_root = aggregation != "gcn" if root is None else root
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter(
            "root", nn.Parameter(torch.empty_like(self.weight)) if has_root else None
        )
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)
        self._sorted = ByMemory[Aggregation]()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot weights, as torch_geometric's GCNConv has them, and no bias."""
        for weight in (self.weight, self.root):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def from_geometric(cls, conv: Any) -> Self:
        """The same layer for a GCNConv or SAGEConv of torch_geometric, with its parameters.

        Raises:
            ArgumentError: Another layer.
            UnsupportedError: It has an option that this one has not.
        """
        kind = type(conv).__name__
        if kind not in ("GCNConv", "SAGEConv"):
            raise ArgumentError(
                f"a {kind}", need="a GCNConv or SAGEConv", hint="csr_matmul in a layer of your own"
            )
        plain: dict[str, tuple[object, ...]] = {"flow": ("source_to_target",)}
        if kind == "GCNConv":
            plain |= {"improved": (False,), "add_self_loops": (True,), "normalize": (True,)}
            linear, root, bias, aggregation = conv.lin, None, conv.bias, "gcn"
        else:
            plain |= {"normalize": (False,), "project": (False,), "aggr": ("mean", "sum", "add")}
            linear, bias = conv.lin_l, conv.lin_l.bias
            root = conv.lin_r.weight if conv.root_weight else None
            aggregation = "mean" if conv.aggr == "mean" else "sum"
        for option, known in plain.items():
            if getattr(conv, option) not in known:
                raise UnsupportedError(
                    f"a {kind} with {option}={getattr(conv, option)!r}",
                    need=" or ".join(f"{option}={value!r}" for value in known),
                    hint="csr_matmul in a layer of your own",
                )
        out_features, in_features = linear.weight.shape
        made = cls(in_features, out_features, aggregation, root=root is not None, bias=False)
        made.weight, made.root, made.bias = linear.weight, root, bias
        return made.train(conv.training)

    def forward(
        self, x: Tensor, edges: Tensor | Aggregation, weight: Tensor | None = None
    ) -> Tensor:
        """Aggregate over the edges.

        Args:
            x: [nodes, in_features], in the dtype of the parameters, or under autocast any.
            edges: Integers [2, edges], sources before targets; or what was made of them.
            weight: [edges], or None for 1 each; differentiable. A mean has none.

        Returns:
            [nodes, out_features].

        Raises:
            ArgumentError: They do not fit each other.
            UnsupportedError: A CUDA graph is being captured, and the edges are new.
        """
        if x.ndim != 2 or x.shape[1] != self.in_features:
            raise ArgumentError(
                f"x {list(x.shape)}",
                need=f"[nodes, {self.in_features}]",
                hint="a SparseConv of that many features",
            )
        over = edges if isinstance(edges, Aggregation) else self._sorted_once(edges, x.shape[0])
        if over.kind != self.aggregation:
            raise ArgumentError(
                f"edges sorted for {over.kind}",
                need=self.aggregation,
                hint="Aggregation.from_edges",
            )
        if self.in_features < self.out_features:
            y = F.linear(_aggregated(over, x, weight), self.weight, self.bias)
        else:
            y = _aggregated(over, F.linear(x, self.weight), weight)
            y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y if self.root is None else y + F.linear(x, self.root)

    def extra_repr(self) -> str:
        """Sizes and options."""
        facts = f"{self.in_features}, {self.out_features}, aggregation={self.aggregation!r}"
        return f"{facts}, root={self.root is not None}, bias={self.bias is not None}"

    def _sorted_once(self, edges: Tensor, nodes: int) -> Aggregation:
        if not isinstance(edges, Tensor):
            return Aggregation.from_edges(edges, nodes, self.aggregation)  # says what is wrong
        known = self._sorted.find((edges,), nodes)
        if known is None:
            known = Aggregation.from_edges(edges, nodes, self.aggregation)
            self._sorted.keep(known, (edges,), nodes)
        return known

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles start without what was worked out.
        return self.__dict__ | {"_sorted": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._sorted = ByMemory[Aggregation]()


def _aggregated(over: Aggregation, x: Tensor, weight: Tensor | None) -> Tensor:
    return csr_matmul(over.matrix, x, values=over.values(x.dtype, weight))
