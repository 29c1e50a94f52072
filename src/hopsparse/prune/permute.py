"""Which order of columns keeps most under N:M: strong columns are spread over the groups.

After the channel permutation of RIA (Zhang et al., ICLR 2024): columns are dealt out by importance,
then, one slot of all groups at a time, assigned anew by the Hungarian method, so that the kept
importance never falls. The search is over columns only; folding the order into the layers around
is up to who knows them (`models/permute.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, UnsupportedError
from ..formats.pattern import NMPattern
from .mask import check_matrix

_CHUNK = 1 << 24  # entries of the largest temporary


def kept_importance(importance: Tensor, pattern: NMPattern) -> float:
    """The importance that the best N:M mask keeps, as a part of all of it.

    Example:
        >>> kept_importance(torch.tensor([[3.0, 0.0, 0.0, 1.0]]), NMPattern(1, 2))
        1.0
    """
    out, k = importance.shape
    groups = importance.reshape(out, k // pattern.m, pattern.m)
    kept = groups.topk(pattern.n, -1).values.sum(dtype=torch.float64)
    return float(kept / importance.sum(dtype=torch.float64).clamp_min(1e-300))


def spread_columns(importance: Tensor, pattern: NMPattern, *, sweeps: int = 2) -> Tensor:
    """Find an order of columns that keeps more importance under N:M.

    Args:
        importance: [out, k], not negative: what an entry is worth, such as its square times the
            mean square of its input.
        pattern: N:M; M divides k.
        sweeps: Times that each slot is assigned anew.

    Returns:
        [k] int64: column `order[j]` of the old matrix becomes column j. The order as it is, if
        none better was found.

    Raises:
        ArgumentError: Not a matrix of finite numbers of at least 0, or k is no multiple of M.
        UnsupportedError: scipy is not installed.

    Example:
        >>> strong_together = torch.tensor([[9.0, 8.0, 1.0, 0.0]])
        >>> order = spread_columns(strong_together, NMPattern(1, 2))
        >>> kept_importance(strong_together[:, order], NMPattern(1, 2)) > 0.9
        True
    """
    check_matrix(importance, "importance")
    k, m = importance.shape[1], pattern.m
    if k % m or bool((importance < 0).any()):
        raise ArgumentError(
            f"importance of shape {tuple(importance.shape)} for {pattern}",
            need=f"numbers of at least 0, and k a multiple of {m}",
            hint="weight.square() * inputs.square().mean(0)",
        )
    assign = _assignment()
    natural = torch.arange(k, device=importance.device)
    dealt = importance.sum(0).argsort(descending=True, stable=True).view(m, k // m).t()
    starts = [natural.view(-1, m), dealt]
    slots = max(starts, key=lambda s: kept_importance(importance[:, s.flatten()], pattern)).clone()
    best = kept_importance(importance[:, slots.flatten()], pattern)
    for _ in range(sweeps):
        for slot in range(m):
            gains = _gains(importance, slots, slot, pattern)
            chosen = assign(gains.cpu().numpy(), maximize=True)[1]
            slots[:, slot] = slots[:, slot][torch.as_tensor(chosen, device=slots.device)]
        before, best = best, kept_importance(importance[:, slots.flatten()], pattern)
        if best <= before * (1 + 1e-5):
            break
    order = slots.flatten()
    return order if best > kept_importance(importance, pattern) else natural


def _gains(importance: Tensor, slots: Tensor, slot: int, pattern: NMPattern) -> Tensor:
    """[groups, groups]: what group g gains by getting into `slot` what group c has there.

    With the others of a group fixed, a column adds, in each row, what it has beyond the N-th
    largest of them.
    """
    out, (groups, m) = len(importance), slots.shape
    others = slots[:, [other for other in range(m) if other != slot]]
    rest = importance[:, others.flatten()].view(out, groups, m - 1)
    least = rest.topk(pattern.n, -1).values[..., -1]
    offered = importance[:, slots[:, slot]]
    gains = torch.zeros(groups, groups, device=importance.device)
    rows = max(1, _CHUNK // groups**2)
    for own, other in zip(torch.split(least, rows), torch.split(offered, rows), strict=True):
        gains += (other.unsqueeze(1) - own.unsqueeze(2)).clamp_(min=0).sum(0)
    return gains


def _assignment() -> Any:
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise UnsupportedError(
            "a permutation of channels without scipy",
            need="scipy",
            hint='pip install "hopsparse[models]"',
        ) from error
    return linear_sum_assignment
