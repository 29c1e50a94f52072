"""Round the kept weights of a layer to a grid, letting them make up for each other's errors.

Every column is revisited: with all others fixed, the best number on the grid for one entry is known
exactly (QuantEase, Behdin et al., arXiv:2309.01885), so the error never rises, and zeros stay zero.
It starts from pruned and refitted weights and ends lower than GPTQ (arXiv:2210.17323), which fixes
each column once, from left to right, and undoes the refit (docs/quality.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.scheme import Scheme
from ..quant import expand_scales, round_to
from .admm import damp

WIDTH = 128  # columns between two updates of all others


def descend_on_grid(
    weight: Tensor,
    start: Tensor,
    hessian: Tensor,
    scales: Tensor,
    scheme: Scheme,
    *,
    keep: Tensor | None = None,
    damping: float = 0.01,
    sweeps: int = 2,
) -> Tensor:
    """Lower the output error of a rounded weight, one column at a time.

    Args:
        weight: [out, k], what the layer should compute with, floating.
        start: [out, k] on the grid.
        hessian: [k, k] XᵀX up to a positive scale.
        scales: [out, groups] of that grid.
        scheme: The scheme.
        keep: [out, k] bool, entries that may be other than zero; those of `start` when None.
        damping: Relative to the mean of the Hessian's diagonal over inputs that are not zero.
        sweeps: Visits of every column.

    Returns:
        [out, k] float32 on the grid.
    """
    k = weight.shape[1]
    damped = damp(hessian.float(), damping)
    solution = start.float().t().contiguous().clone()
    kept = (solution != 0) if keep is None else keep.t().contiguous()
    steps = expand_scales(scales, k, scheme).t()
    residual = damped @ (weight.float().t() - solution)
    for _ in range(sweeps):
        for first in range(0, k, WIDTH):
            last = min(first + WIDTH, k)
            local = damped[first:last, first:last].contiguous()
            gap, moved = residual[first:last].clone(), torch.empty_like(solution[first:last])
            for j, pivot in enumerate(local.diagonal().tolist()):
                old = solution[first + j]
                step = steps[first + j] if len(steps) > 1 else steps[0]
                new = round_to(gap[j] / pivot + old, step, scheme.weights).mul_(kept[first + j])
                torch.sub(new, old, out=moved[j])
                solution[first + j] = new
                gap[j + 1 :].addr_(local[j + 1 :, j], moved[j], alpha=-1)
            residual.addmm_(damped[:, first:last], moved, alpha=-1)
    return solution.t().contiguous().add_(0.0)
