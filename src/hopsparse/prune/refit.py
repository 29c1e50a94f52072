"""Least squares on the weights that stay: SparseGPT never moves a column it has passed.

With the mask fixed, each row of W' solves H_SS w'_S = (H w)_S over its kept columns S. Conjugate
gradients, scaled by the diagonal, on all rows at once cost one product with H a step; ALPS (Meng
et al., arXiv:2406.07831) ends the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError
from .admm import damp
from .mask import check_matrix

ROWS = 2048  # rows solved together: bounds the six temporaries of a step


def refit(
    weight: Tensor, pruned: Tensor, hessian: Tensor, *, damping: float = 0.01, steps: int = 10
) -> Tensor:
    """Move the non-zero entries of `pruned` towards the least output error against `weight`.

    Args:
        weight: [out, k], the dense weight, floating.
        pruned: [out, k], where to start; its zeros stay.
        hessian: [k, k] XᵀX up to a positive scale.
        damping: Relative to the mean of the Hessian's diagonal over inputs that are not zero.
        steps: Conjugate-gradient steps; each lowers the damped error.

    Returns:
        [out, k], a new tensor of `pruned`'s dtype, computed in float32 or wider.

    Raises:
        ArgumentError: Shapes that do not fit, or a matrix that is not finite.

    Example:
        >>> w, h = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> refit(w, torch.tensor([[1.0, 0.0]]), h, damping=1e-9).tolist()
        [[1.5, 0.0]]
    """
    for matrix, what in ((weight, "weight"), (pruned, "pruned weight"), (hessian, "Hessian")):
        check_matrix(matrix, what)
    k = weight.shape[1]
    if weight.shape != pruned.shape or hessian.shape != (k, k):
        raise ArgumentError(
            f"shapes {tuple(weight.shape)}, {tuple(pruned.shape)}, {tuple(hessian.shape)}",
            need="[out, k], [out, k] and [k, k]",
            hint="the pruned weight and the Hessian of the same layer",
        )
    compute = torch.promote_types(weight.dtype, torch.float32)
    damped = damp(hessian.to(compute), damping)
    parts = zip(torch.split(weight, ROWS), torch.split(pruned, ROWS), strict=True)
    solved = [_solve(w.to(compute), p.to(compute), damped, steps) for w, p in parts]
    return torch.cat(solved).to(pruned.dtype)


def _solve(weight: Tensor, start: Tensor, damped: Tensor, steps: int) -> Tensor:
    """Conjugate gradients on each row, among its non-zero columns."""
    keep = start != 0
    inverse = damped.diagonal().reciprocal()
    solution = start.clone()
    residual = ((weight - start) @ damped).mul_(keep)
    scaled = residual * inverse
    direction = scaled.clone()
    energy = (residual * scaled).sum(1, keepdim=True)
    # A row that is solved to rounding must stop: further steps would follow noise, and grow it.
    noise = energy * torch.finfo(energy.dtype).eps ** 2
    for _ in range(steps):
        moved = (direction @ damped).mul_(keep)
        length = _ratio(energy, (direction * moved).sum(1, keepdim=True))
        length *= energy > noise
        solution.addcmul_(direction, length)
        residual.addcmul_(moved, length, value=-1)
        torch.mul(residual, inverse, out=scaled)
        before, energy = energy, (residual * scaled).sum(1, keepdim=True)
        direction.mul_(_ratio(energy, before)).add_(scaled)
    return solution


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """0 where a row is solved already."""
    return torch.where(bottom > 0, top / bottom, torch.zeros_like(top))
