"""Masks by ADMM: all weights of a layer decide together, not column by column.

The least-squares problem with a constraint on the zeros is split into a dense one, solved exactly,
and the nearest matrix that obeys the pattern; a penalty on their difference grows until the zeros
stop changing. The splitting and the rule for the penalty are those of ALPS (Meng et al.,
arXiv:2406.07831), with the Hessian scaled to a unit diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError, CalibrationError
from ..formats.pattern import Pattern
from .mask import check_matrix, keep_mask

FIRST_PENALTY = 0.1
MOST_ITERATIONS = 120  # it stops before when the zeros no longer change
EVERY = 3  # iterations between two looks at the zeros
# Part of the kept entries that changed -> growth of the penalty; the first that is reached holds.
GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))


def admm(weight: Tensor, pattern: Pattern, hessian: Tensor, *, damping: float = 0.01) -> Tensor:
    """Prune to the pattern with the least output error that ADMM finds.

    Args:
        weight: [out, k], floating, finite.
        pattern: The pattern.
        hessian: [k, k] XᵀX up to a positive scale.
        damping: Relative to the mean of the Hessian's diagonal over inputs that are not zero.

    Returns:
        [out, k], a new tensor of the same dtype, computed in float32 or wider.

    Raises:
        ArgumentError: The weight is no finite floating matrix, or the Hessian's size differs.
        CalibrationError: The Hessian is not finite.

    Example:
        >>> from hopsparse.formats import NMPattern
        >>> h = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
        >>> admm(torch.tensor([[1.0, 3.0]]), NMPattern(1, 2), h)[0, 0].item()
        0.0
    """
    check_matrix(weight, "weight")
    check_matrix(hessian, "Hessian")
    k = weight.shape[1]
    if hessian.shape != (k, k):
        raise ArgumentError(
            f"a Hessian of shape {tuple(hessian.shape)} for k={k}", need="[k, k]", hint="XᵀX"
        )
    compute = torch.promote_types(weight.dtype, torch.float32)
    damped = damp(hessian.to(compute), damping)
    # On the scale of its input each weight counts for what it does.
    unit = damped.diagonal().sqrt()
    values, vectors = _spectrum(damped / unit / unit.unsqueeze(1))
    scaled = weight.to(compute) * unit
    pulled = ((scaled @ vectors) * values) @ vectors.t()
    keep = keep_mask(scaled.abs(), pattern)
    sparse, dual = scaled * keep, torch.zeros_like(scaled)
    penalty = FIRST_PENALTY
    for iteration in range(1, MOST_ITERATIONS + 1):
        dense = ((pulled - dual + penalty * sparse) @ vectors).div_(values + penalty) @ vectors.t()
        wanted = dense + dual / penalty
        before, keep = keep, keep_mask(wanted.abs(), pattern)
        sparse = wanted * keep
        dual += penalty * (dense - sparse)
        if iteration % EVERY:
            continue
        changed = float((keep != before).sum()) / (2 * max(1, int(keep.sum())))
        if not changed:
            break
        penalty *= next(growth for least, growth in GROWTH if changed >= least)
    return (sparse / unit).to(weight.dtype)


def damp(hessian: Tensor, damping: float) -> Tensor:
    """A copy of the Hessian with `damping` times the mean of its diagonal added to the diagonal."""
    damped = hessian.clone()
    diagonal = damped.diagonal()
    live = diagonal[diagonal > 0]
    diagonal.add_(damping * float(live.mean()) if len(live) else 1.0)
    return damped


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError as error:
        raise CalibrationError(
            f"a Hessian whose eigenvalues cannot be found ({error})",
            need="XᵀX of finite inputs",
            hint="more calibration tokens, or search greedy",
        ) from error
    return values.clamp_(min=0), vectors
