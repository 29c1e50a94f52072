"""A bound on the attention that chosen blocks leave out, and a choice that keeps it small."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._paged import looks_at_values
from .._product import is_dense, told
from .op import Masses

_UNIT = 2.0**-24
_SMALL = 2.0**-40  # what sums of float64 may lose, with a lot of room


def missed_mass(
    masses: Masses, indices: Tensor, counts: Tensor, *, lse: Tensor | None = None
) -> Tensor:
    """The most of its attention that a query head can have outside of the chosen blocks.

    With U the most that exp(score) can sum to outside and E what it sums to inside, at most
    U / (U + E). E is bounded from below by the blocks, or known where they were attended.

    Args:
        masses: Of all blocks.
        indices: int32 [batch, kv_heads, most], the chosen blocks; negative ones are none.
        counts: int32 [batch, kv_heads].
        lse: float32 [batch, heads], natural logarithm, as `attend_decode` returned it for these
            blocks in float32: a tighter bound.

    Returns:
        float32 [batch, heads], rounded up; 0 where nothing is left out.

    Raises:
        ArgumentError: Arguments do not fit each other.

    Example:
        >>> upper = torch.tensor([[[0.0, 0.0, 0.0, 0.0]]], dtype=torch.float64)
        >>> masses = Masses(upper, upper, torch.zeros(1, 1, dtype=torch.float64), 64)
        >>> indices, counts = torch.tensor([[[0, 1, 2, -1]]]).int(), torch.tensor([[3]]).int()
        >>> round(missed_mass(masses, indices, counts).item(), 4)
        0.25
    """
    batch, heads, blocks = masses.upper.shape
    kv_heads = _check(masses, indices, counts, lse)
    listed = indices.long()
    there = (listed >= 0) & (
        torch.arange(indices.shape[-1], device=listed.device) < counts.long()[..., None]
    )
    inside = torch.zeros(batch, kv_heads, blocks + 1, dtype=torch.bool, device=listed.device)
    inside.scatter_(2, listed.where(there & (listed < blocks), blocks), True)
    inside = inside[..., :blocks].repeat_interleave(heads // kv_heads, 1)
    outside = masses.upper.masked_fill(inside, -torch.inf).logsumexp(-1)
    if lse is None:
        kept = masses.lower.masked_fill(~inside, -torch.inf).logsumexp(-1)
    else:
        tokens = min(blocks * masses.block * _UNIT, 0.5)
        kept = lse.double() - masses.slack - 2 * tokens - 8 * _UNIT * (1 + lse.double().abs())
    return _rounded_up(_part(outside, kept))


def select_certified(
    masses: Masses,
    epsilon: float,
    *,
    kv_heads: int,
    most: int | None = None,
    sink: int = 0,
    recent: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add blocks until no query head can have more than epsilon of its attention outside.

    Blocks are added by the largest part of any query head's attention that they may hold. What is
    chosen is what the certificate needs, which is more than what attention needs.

    Args:
        masses: Of all blocks.
        epsilon: 0 to 1.
        kv_heads: Heads of keys, which share a list of blocks among their query heads.
        most: At most so many blocks; the bound that is returned may then be above epsilon.
        sink: First blocks that are always chosen.
        recent: Last ones.

    Returns:
        indices: int32 [batch, kv_heads, most], ascending, -1 behind the chosen ones.
        counts: int32 [batch, kv_heads].
        bound: float32 [batch, heads], as `missed_mass` without lse.

    Raises:
        ArgumentError: Arguments do not fit each other.

    Example:
        >>> upper = torch.tensor([[[0.0, -9.0, 2.0]]], dtype=torch.float64)
        >>> masses = Masses(upper, upper, torch.zeros(1, 1, dtype=torch.float64), 64)
        >>> indices, counts, bound = select_certified(masses, 0.01, kv_heads=1)
        >>> indices.tolist(), bound.item() < 0.01
        ([[[0, 2, -1]]], True)
    """
    batch, heads, blocks = masses.upper.shape
    width = blocks if most is None else min(most, blocks)
    _check_certified(masses, epsilon, kv_heads, width if blocks else 1, (sink, recent))
    order, forced, there = _order(masses, kv_heads, sink, recent)
    each = order.repeat_interleave(heads // kv_heads, 1)
    inside = masses.lower.gather(-1, each).logcumsumexp(-1)
    outside = masses.upper.gather(-1, each).flip(-1).logcumsumexp(-1).flip(-1)
    # Behind the first t + 1 of the order lies what is counted from t + 1 on.
    outside = torch.cat((outside[..., 1:], outside.new_full((batch, heads, 1), -torch.inf)), -1)
    small = _part(outside, inside)[..., :width] <= epsilon * (1 - 2.0**-20)
    small = small.view(batch, kv_heads, -1, width).all(2)
    counts = torch.maximum((~small).sum(-1) + 1, forced)
    counts = torch.minimum(counts, there.clamp(max=width))
    number = torch.arange(width, device=counts.device)
    chosen = order[..., :width].where(number < counts[..., None], blocks)
    indices = chosen.sort(-1).values
    indices = indices.where(indices < blocks, -1).int()
    counts = counts.int()
    return indices, counts, missed_mass(masses, indices, counts)


def _order(masses: Masses, kv_heads: int, sink: int, recent: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks as they are added [batch, kv_heads, blocks]; how many are forced, and how many are."""
    batch, heads, blocks = masses.upper.shape
    upper = masses.upper.view(batch, kv_heads, heads // kv_heads, blocks)
    whole = masses.lower.logsumexp(-1).view(batch, kv_heads, -1, 1)
    exists = upper != -torch.inf
    # Blocks with what is not finite come first, behind those that are forced: they may hold all.
    largest = torch.finfo(upper.dtype).max
    worth = (upper - whole.where(whole.isfinite(), 0.0)).where(exists, -torch.inf)
    worth = worth.nan_to_num(nan=largest, posinf=largest, neginf=-torch.inf).amax(2)
    there = exists.any(2)
    number = torch.arange(blocks, device=upper.device)
    ends = there.sum(-1, keepdim=True)
    forced = there & ((number < sink) | (number >= ends - recent))
    worth = worth.masked_fill(forced, torch.inf)
    order = worth.argsort(dim=-1, descending=True, stable=True)
    return order, forced.sum(-1), ends.squeeze(-1)


def _part(outside: Tensor, inside: Tensor) -> Tensor:
    """exp(outside) / (exp(outside) + exp(inside)); 0 where nothing is outside, 1 where all is.

    Also 1 where NaN is outside, which no one can tell from all.
    """
    part = torch.sigmoid(outside - inside).nan_to_num(nan=1.0)
    return part.where(outside != -torch.inf, 0.0)


def _rounded_up(part: Tensor) -> Tensor:
    two = torch.full((), 2.0, dtype=torch.float32, device=part.device)  # made there, in a graph too
    above = torch.nextafter((part * (1 + _SMALL)).float(), two)
    return above.where(part > 0, 0.0).clamp(max=1.0)


def _check(masses: Masses, indices: Tensor, counts: Tensor, lse: Tensor | None) -> int:
    batch, heads, blocks = masses.upper.shape
    fits = is_dense(indices) and indices.dim() == 3 and indices.dtype == torch.int32
    if not fits or indices.shape[0] != batch or not indices.shape[1] or heads % indices.shape[1]:
        raise ArgumentError(
            f"missed_mass: indices {told(indices)} for masses of {batch} x {heads} heads",
            need="int32 [batch, kv_heads, most]",
            hint="what select returned",
        )
    if not is_dense(counts) or counts.shape != indices.shape[:2] or counts.dtype != torch.int32:
        raise ArgumentError(
            f"missed_mass: counts {told(counts)}",
            need=f"int32 {list(indices.shape[:2])}",
            hint="what select returned",
        )
    if lse is not None and (not is_dense(lse) or lse.shape != (batch, heads)):
        raise ArgumentError(
            f"missed_mass: lse {told(lse)}",
            need=f"[{batch}, {heads}]",
            hint="what attend_decode returned",
        )
    if looks_at_values(indices) and bool((indices >= blocks).any()):
        raise ArgumentError(
            f"missed_mass: block {int(indices.max())}",
            need=f"below {blocks}",
            hint="indices of these blocks",
        )
    return indices.shape[1]


def _check_certified(
    masses: Masses, epsilon: float, kv_heads: int, most: int, forced: tuple[int, int]
) -> None:
    if not isinstance(epsilon, float | int) or not 0 <= epsilon <= 1:
        raise ArgumentError(f"select_certified: epsilon={epsilon!r}", need="0 to 1", hint="0.05")
    heads = masses.upper.shape[1]
    if kv_heads < 1 or heads % kv_heads:
        raise ArgumentError(
            f"select_certified: kv_heads={kv_heads} for {heads} query heads",
            need="a divisor of them",
            hint=str(heads),
        )
    if most < 1 or min(forced) < 0:
        raise ArgumentError(
            f"select_certified: most={most}, sink and recent {forced}",
            need="at least one block, and none below zero",
            hint="most=None",
        )
