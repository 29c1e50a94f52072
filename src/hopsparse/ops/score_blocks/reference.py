"""Bounds of scores and of mass, in torch.

q.k of a key inside a box is at most the sum of the larger of q low and q high, dimension by
dimension (Quest, arXiv:2406.10774). exp is convex: of n scores in [L, U] with mean m, the sum of
exp is at most that of scores at both ends with the same mean, and at least n exp(m) (Jensen).

All bounds hold for real numbers: what float32 may have lost is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .key_blocks import KeyBlocks

_UNIT = 2.0**-24  # of float32
_UNIT_OF_DOUBLE = 2.0**-50  # of float64, and room for a few operations


@dataclass(frozen=True)
class Ranges:
    """What scaled scores of the keys of each block can be: float32 [batch, heads, blocks].

    Attributes:
        low: None is below.
        high: None is above.
        mean: Their mean, not exact.
        slack: How far the mean, or one score in float32, may be off.
        counts: Keys of each block, int64 [batch, 1, blocks].
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    slack: Tensor
    counts: Tensor


def ranges(q: Tensor, blocks: KeyBlocks, lengths: Tensor, scale: float) -> Ranges:
    """Ranges of scores of arguments that were checked.

    Args:
        q: [batch, heads, dim].
        blocks: Of the same batch.
        lengths: int32 [batch].
        scale: Of scores, positive.
    """
    batch, heads, dim = q.shape
    kv_heads, count = blocks.low.shape[1:3]
    queries = (q.float() * scale).view(batch, kv_heads, heads // kv_heads, dim)
    up, down = queries.clamp(min=0), queries.clamp(max=0)
    low, high = blocks.low.float(), blocks.high.float()
    first = torch.arange(count, device=q.device) * blocks.block
    counts = (lengths.long()[:, None] - first).clamp(0, blocks.block)
    means = blocks.total / counts.clamp(min=1)[:, None, :, None]

    def scores(of: Tensor, keys: Tensor) -> Tensor:
        # In float64, which is no more precise than is claimed: float32 products of a GPU may run in
        # TF32, with half of the bits.
        product = of.double() @ keys.double().transpose(-1, -2)
        return product.float().reshape(batch, heads, count)

    # The product with the scale, 2 dim products and their sum; the sum of a block in any order.
    terms = (2 * dim + blocks.block + 8) * _UNIT
    size = scores(queries.abs(), torch.maximum(low.abs(), high.abs()))
    slack = terms / (1 - terms) * (1 + terms) * size + 2.0**-126
    least = scores(up, low) + scores(down, high) - slack
    most = scores(up, high) + scores(down, low) + slack
    return Ranges(least, most, scores(queries, means), slack, counts[:, None, :])


def log_masses(found: Ranges) -> tuple[Tensor, Tensor]:
    """Log of the most and of the least that exp(score) of a block can sum to; -inf where none is.

    Returns:
        upper, lower: float64 [batch, heads, blocks].
    """
    low, high, slack = found.low.double(), found.high.double(), found.slack.double()
    above = torch.minimum(found.mean.double() + slack, high)
    below = torch.maximum(found.mean.double() - slack, low)
    width = high - low
    share = ((above - low) / width.clamp(min=1e-300)).clamp(0.0, 1.0)
    upper = high + torch.log(share + (1 - share) * torch.exp(-width))
    size = found.counts.double().log()
    rounding = _UNIT_OF_DOUBLE * (1 + high.abs() + low.abs())
    there = found.counts > 0
    upper = (upper + size + rounding).where(there, -torch.inf)
    lower = (below + size - rounding).where(there, -torch.inf)
    return upper, lower


def score(found: Ranges, kind: str) -> Tensor:
    """Scores of blocks, float32 [batch, heads, blocks], -inf where no key is.

    Args:
        found: The ranges.
        kind: "bound", "mean" or "mass".
    """
    if kind == "mass":
        return log_masses(found)[0].float()
    return (found.high if kind == "bound" else found.mean).where(found.counts > 0, -torch.inf)


def shared(scores: Tensor, kv_heads: int) -> Tensor:
    """The most that a block has of any query head's mass: log, [batch, kv_heads, blocks]."""
    batch, heads, blocks = scores.shape
    whole = scores.logsumexp(-1, keepdim=True)
    # What is infinite or NaN stays so, and takes nothing else with it.
    relative = scores - whole.where(whole.isfinite(), 0.0)
    return relative.view(batch, kv_heads, heads // kv_heads, blocks).amax(2)


def default_scale(dim: int) -> float:
    """1 / sqrt(dim)."""
    return 1.0 / math.sqrt(dim)
