"""A low-rank product beside a sparse weight: y = sparse(x) + (x @ a.T) @ b.T (arXiv:2106.09685).

It is never merged: the sum of a sparse and a low-rank matrix is dense, and the zeros that the
sparse kernel skips would be gone. It costs its own bytes and two more small products a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError
from ..measure import Product, predict
from ..nn import SparseLinear
from ..plan import Target


class LowRank(nn.Module):
    """A sparse layer and a trainable product beside it.

    Args:
        base: The layer; its weight is not trained.
        rank: Rank of the product, at least 1.
        seed: Draws `a` from a normal distribution of variance 1 / k; `b` starts at zero, so the
            layer starts as `base`.

    Attributes:
        a: [rank, k], in the dtype and on the device of the base.
        b: [out, rank], likewise.

    Raises:
        ArgumentError: No rank, or one that saves nothing over a dense weight.

    Example:
        >>> base = SparseLinear.from_linear(nn.Linear(64, 32), "csr").requires_grad_(False)
        >>> layer, x = LowRank(base, rank=2), torch.randn(3, 64)
        >>> torch.equal(layer(x), base(x))
        True
    """

    def __init__(self, base: SparseLinear, rank: int, seed: int = 0) -> None:
        super().__init__()
        out, k = base.out_features, base.in_features
        if not 1 <= rank < min(out, k):
            raise ArgumentError(
                f"rank {rank} beside a weight [{out}, {k}]",
                need=f"1 to {min(out, k) - 1}",
                hint="lora_rank=8",
            )
        self.base = base
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(rank, k, generator=generator) * k**-0.5
        device, dtype = base.matrix.device, base.values_dtype
        self.a = nn.Parameter(drawn.to(device, dtype))
        self.b = nn.Parameter(torch.zeros(out, rank, device=device, dtype=dtype))
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """[..., k] -> [..., out]."""
        beside = F.linear(F.linear(x, self.a), self.b)
        return self.base(x) + beside  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LowRankCost:
    """What low-rank products add to a model.

    Attributes:
        bytes: Stored and read at every decode step.
        time_us: Predicted time of the two more products of every layer at `tokens` tokens.
        tokens: Tokens of a step.
    """

    bytes: int
    time_us: float
    tokens: int


def low_rank_cost(
    shapes: Iterable[tuple[int, int]],
    rank: int,
    target: Target,
    tokens: int = 1,
    dtype: str = "bfloat16",
) -> LowRankCost:
    """What a product of `rank` beside each weight costs on a target; predicted, not measured.

    Args:
        shapes: [out, k] of each weight.
        rank: Rank of each product.
        target: The GPU.
        tokens: Tokens of a step.
        dtype: Of a and b.

    Example:
        >>> from hopsparse.plan import TARGETS
        >>> low_rank_cost([(576, 1536)], 8, TARGETS["h200"]).bytes
        33792
    """
    total, time_us = 0, 0.0
    itemsize = getattr(torch, dtype).itemsize
    for out, k in shapes:
        down, up = Product((rank, k), dtype), Product((out, rank), dtype)
        total += rank * (out + k) * itemsize
        time_us += sum(predict(part, tokens, target).time_us for part in (down, up))
    return LowRankCost(total, time_us, tokens)
