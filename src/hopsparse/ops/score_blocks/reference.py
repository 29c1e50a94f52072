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


#: low, high and total of `KeyBlocks`.
Kept = tuple[Tensor, Tensor, Tensor]


def slack_factor(dim: int, block: int) -> float:
    """How far scores in float32 may be off, of the sum of their magnitudes.

    The sum of a block in any order, with the product with its scale; and products, summed by one of
    two kernels. In float32: 2 dim products and their sum. By the tensor cores: an instruction
    cuts its 16 products and the sum before them to 24 bits of the largest, which none of them
    exceeds by itself, and cuts their sum to as many; a cut takes less than 2 units. For 16
    dimensions there are two instructions, of q+ and of q-, but 16 products that are not 0: 16 cuts
    of products or sums and 2 of results, or 4 if each does its work in halves. 20 cuts for 16
    dimensions are 2.5 units for each; the slack itself, the scale, and scale q where that is what a
    score is made of, round once each.

    Example:
        >>> 2e-5 < slack_factor(128, 64) < 3e-5
        True
    """
    terms = (2.5 * dim + block + 8) * _UNIT
    return terms / (1 - terms) * (1 + terms)


def ranges(q: Tensor, kept: Kept, block: int, lengths: Tensor, scale: float) -> Ranges:
    """Ranges of scores of arguments that were checked.

    Args:
        q: [batch, heads, dim].
        kept: What is kept of keys, of the same batch.
        block: Tokens of a block.
        lengths: int32 [batch].
        scale: Of scores, positive.
    """
    batch, heads, dim = q.shape
    kv_heads, count = kept[0].shape[1:3]
    queries = (q.float() * scale).view(batch, kv_heads, heads // kv_heads, dim)
    up, down = queries.clamp(min=0), queries.clamp(max=0)
    low, high = kept[0].float(), kept[1].float()
    first = torch.arange(count, device=q.device) * block
    counts = (lengths.long()[:, None] - first).clamp(0, block)
    means = kept[2] / counts.clamp(min=1)[:, None, :, None]

    def scores(of: Tensor, keys: Tensor) -> Tensor:
        # In float64, which is no more precise than is claimed: float32 products of a GPU may run in
        # TF32, with half of the bits.
        product = of.double() @ keys.double().transpose(-1, -2)
        return product.float().reshape(batch, heads, count)

    size = scores(queries.abs(), torch.maximum(low.abs(), high.abs()))
    slack = slack_factor(dim, block) * size + 2.0**-126
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


def append(kept: Kept, keys: Tensor, starts: Tensor, counts: Tensor | None, block: int) -> None:
    """Take in keys, in place, of arguments that were checked.

    Args:
        kept: What is kept of keys.
        keys: [batch, new, kv_heads, dim].
        starts: int32 [batch].
        counts: int32 [batch] or None: all.
        block: Tokens of a block.
    """
    batch, new, heads, dim = keys.shape
    count = kept[0].shape[2]
    step = torch.arange(new, device=keys.device)
    ends = starts.long() + (new if counts is None else counts.long())
    position = starts.long()[:, None] + step
    place = position // block
    # One more block of each sequence takes what is not there, and is cut off.
    there = (position >= 0) & (position < ends[:, None]) & (place < count)
    place = place.where(there, count)
    first = torch.arange(count, device=keys.device) * block
    begun = (first >= starts.long()[:, None]) & (first < ends[:, None])
    into = place.view(batch, 1, new, 1).expand(batch, heads, new, dim)
    source = keys.transpose(1, 2)
    for each, how, start in zip(
        kept, ("amin", "amax", "sum"), (torch.inf, -torch.inf, 0.0), strict=True
    ):
        room = each.masked_fill(begun.view(batch, 1, count, 1), start)
        room = torch.cat((room, room.new_full((batch, heads, 1, dim), start)), dim=2)
        room.scatter_reduce_(2, into, source.to(each.dtype), how)
        each.copy_(room[:, :, :count])


def default_scale(dim: int) -> float:
    """1 / sqrt(dim)."""
    return 1.0 / math.sqrt(dim)
