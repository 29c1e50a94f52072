"""What select means, in torch: a stable sort of integer ranks, and sums of integer weights.

A rank is a float32 as an unsigned number of the same order: -0.0 is zero, NaN is above +inf, and
what is never chosen by its score is 0. Weights of top-p are integers as well, made by operations
that IEEE 754 defines to the last bit, so that sums have no order and every device chooses alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .exponential import COEFFICIENTS, LOG2_E

#: The rank of NaN, of +inf, and of what is not there.
NAN_RANK, INF_RANK, ABSENT = 0xFFFFFFFF, 0xFF800000, 0
#: The weight of the largest score; one that is 2^-33 of it weighs nothing.
ONE = 1 << 32


@dataclass(frozen=True)
class Sizes:
    """The numbers of a call that are the same for all rows.

    Attributes:
        k: At most so many, where rows have no k of their own.
        width: Columns of the result.
        sink: First columns that are always chosen.
        recent: Last ones.
    """

    k: int
    width: int
    sink: int = 0
    recent: int = 0


def select(
    scores: Tensor,
    k: Tensor | None,
    lengths: Tensor | None,
    by: str,
    limit: Tensor | None,
    number: float,
    sizes: Sizes,
) -> list[Tensor]:
    """Indices and counts, of arguments that were checked; on any device.

    Args:
        scores: [rows, columns].
        k: int32 [rows], or None: that of `sizes`.
        lengths: int32 [rows], or None: all columns.
        by: "rank", "mass" or "threshold".
        limit: float32 [rows]: top_p or threshold of each row; None: `number`.
        number: top_p or threshold of all rows.
        sizes: The same for all rows.
    """
    rows, columns = scores.shape
    column = torch.arange(columns, device=scores.device)
    n = _whole(lengths, columns, scores).clamp(0, columns)
    if limit is None:
        limit = torch.full((rows,), number, dtype=torch.float32, device=scores.device)
    budget = torch.minimum(_whole(k, sizes.k, scores).clamp(0, sizes.width), n)
    last = budget.clamp(max=sizes.recent)
    first = torch.minimum((budget - last).clamp(max=sizes.sink), n - last)
    forced = (column < first[:, None]) | ((column >= (n - last)[:, None]) & (column < n[:, None]))
    there = ranks(scores, limit if by == "threshold" else None)
    there = torch.where(column < n[:, None], there, ABSENT)
    free = torch.where(forced, ABSENT, there)
    order = free.argsort(dim=1, descending=True, stable=True)
    room = torch.minimum(budget - first - last, (free > ABSENT).sum(1))
    if by == "mass":
        room = torch.minimum(room, _needed(weights(scores, there), forced, order, limit))
    place = torch.empty_like(order).scatter_(1, order, column.expand(rows, -1))
    return _compact(forced | (place < room[:, None]), sizes.width)


def _whole(each: Tensor | None, of_all: int, scores: Tensor) -> Tensor:
    """int64 [rows]."""
    if each is None:
        return torch.full(scores.shape[:1], of_all, dtype=torch.int64, device=scores.device)
    return each.long()


def ranks(scores: Tensor, threshold: Tensor | None = None) -> Tensor:
    """int64: numbers of 32 bits in the order of the scores; 0 for -inf and what is below.

    Args:
        scores: [rows, columns].
        threshold: float32 [rows] or None.

    Example:
        >>> nan, inf = float("nan"), float("inf")
        >>> found = ranks(torch.tensor([[-inf, -1.0, -0.0, 0.0, inf, nan, -nan]]))[0].tolist()
        >>> found[0], found[2] == found[3], found[5] == found[6], found == sorted(found)
        (0, True, True, True)
    """
    values = scores.float()
    bits = (values + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    rank = torch.where(bits >> 31 == 1, 0xFFFFFFFF - bits, bits | 0x80000000)
    rank = torch.where(values.isnan(), NAN_RANK, rank)
    below = values == -torch.inf
    if threshold is not None:
        below = below | (values < threshold[:, None])
    return torch.where(below, ABSENT, rank)


def weights(scores: Tensor, rank: Tensor) -> Tensor:
    """int64: 2^32 exp(score - largest), rounded down.

    Where the largest is not finite, infinity and NaN weigh 2^32 and numbers nothing.

    Args:
        scores: [rows, columns].
        rank: Of them; what is absent weighs nothing.

    Example:
        >>> x = torch.tensor([[0.0, -1.0]])
        >>> [round(each / ONE, 6) for each in weights(x, ranks(x))[0].tolist()]
        [1.0, 0.367879]
    """
    top = rank.amax(1, keepdim=True)
    endless = top >= INF_RANK
    largest = _value(top)
    below = (scores.float() - torch.where(endless, 0.0, largest)).clamp(min=-64.0, max=0.0)
    power = below * LOG2_E
    whole = power.floor()
    part = power - whole
    sum_ = torch.full_like(part, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        sum_ = sum_ * part + coefficient
    # In [1, 2] with 23 bits behind the point: whole numbers, which shifts round down.
    mantissa = (sum_.nan_to_num(1.0) * 2.0**23).long()
    shift = (9 + whole.nan_to_num(0.0)).long()
    up, down = shift.clamp(min=0), (-shift).clamp(0, 31)
    weight = torch.where(shift >= 0, mantissa << up, mantissa >> down)
    weight = torch.where(endless, torch.where(rank >= INF_RANK, ONE, 0), weight)
    return torch.where(rank > ABSENT, weight, 0)


def _value(rank: Tensor) -> Tensor:
    """The float32 of a rank."""
    bits = torch.where(rank >> 31 == 1, rank & 0x7FFFFFFF, 0xFFFFFFFF - rank)
    return (
        torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    )


def _needed(weight: Tensor, forced: Tensor, order: Tensor, top_p: Tensor) -> Tensor:
    """[rows]: how many in `order` reach top_p of the whole weight, beside those that are forced."""
    total = weight.sum(1)
    target = (top_p.double() * total.double()).ceil().long().clamp(min=0)
    target = torch.minimum(target, total)
    left = target - torch.where(forced, weight, 0).sum(1)
    running = torch.where(forced, 0, weight).gather(1, order).cumsum(1)
    return (running < left[:, None]).sum(1) + (left > 0).long()


def _compact(chosen: Tensor, width: int) -> list[Tensor]:
    """Column numbers of what is chosen, ascending, -1 behind them; and how many."""
    rows, columns = chosen.shape
    counts = chosen.sum(1)
    place = (chosen.cumsum(1) - 1).where(chosen, width)
    indices = torch.full((rows, width + 1), -1, dtype=torch.int32, device=chosen.device)
    column = torch.arange(columns, dtype=torch.int32, device=chosen.device)
    indices.scatter_(1, place, column.expand(rows, -1))
    return [indices[:, :width].contiguous(), counts.to(torch.int32)]
