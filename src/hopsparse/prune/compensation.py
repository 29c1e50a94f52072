"""SparseGPT: remove a weight, let the later columns of its row make up for it.

Frantar and Alistarh, arXiv:2301.00774. With H = XᵀX of the layer's inputs and UᵀU = H⁻¹ (U upper
triangular), zeroing w_j costs w_j² / U_jj² and moves the later weights of the row by
-(w_j / U_jj) * U[j, j+1:]. Columns are visited once, from left to right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError, CalibrationError
from ..formats.pattern import BlockPattern, NMPattern, Pattern
from .mask import block_sums, check_matrix, keep_ranked, keep_top, spread_blocks

MAX_DAMPING = 100.0


@dataclass(frozen=True)
class HessianFactor:
    """The upper Cholesky factor of an inverse Hessian, computed once for layers that share inputs.

    Args:
        upper: [k, k] upper triangular U with UᵀU = (H + damping * mean(diag H) * I)⁻¹.
        dead: [k] bool, inputs that are always zero.
        damping: The relative damping that made the factorisation succeed.
    """

    upper: Tensor
    dead: Tensor
    damping: float


def factor_hessian(
    hessian: Tensor, *, damping: float = 0.01, dtype: torch.dtype = torch.float32
) -> HessianFactor:
    """Factor the inverse of a damped Hessian; damping grows tenfold until Cholesky succeeds.

    U is the inverse of R where R Rᵀ = H with R upper triangular (Cholesky of H with both axes
    reversed): one factorisation, and no explicit inverse is factored a second time.

    Args:
        hessian: [k, k] XᵀX up to a positive scale, finite; not changed.
        damping: Relative to the mean of the diagonal over inputs that are not dead.
        dtype: To compute in, float32 or float64.

    Raises:
        ArgumentError: Not a square floating matrix.
        CalibrationError: Not finite, a negative diagonal, or no damping up to 100 is enough.

    Example:
        >>> factor_hessian(4 * torch.eye(2), damping=1e-9).upper.tolist()
        [[0.5, 0.0], [0.0, 0.5]]
    """
    _check_hessian(hessian)
    base = hessian.to(dtype)
    diagonal = base.diagonal()
    dead = diagonal == 0
    mean = float(diagonal[~dead].mean()) if not bool(dead.all()) else 1.0
    used = damping
    while used <= MAX_DAMPING:
        damped = base.clone()
        damped.diagonal()[dead] = mean
        damped.diagonal().add_(used * mean)
        lower, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not int(info):
            eye = torch.eye(len(dead), dtype=dtype, device=base.device)
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
            if bool(upper.isfinite().all()):
                return HessianFactor(upper, dead, used)
        used *= 10
    raise CalibrationError(
        f"a Hessian that is not positive definite, even with damping {used / 10:g}",
        need="XᵀX of real inputs",
        hint="more calibration tokens, or method wanda",
    )


def sparsegpt(
    weight: Tensor,
    pattern: Pattern,
    hessian: Tensor | HessianFactor,
    *,
    damping: float = 0.01,
    block_size: int = 128,
) -> Tensor:
    """Prune with error compensation (Frantar and Alistarh, arXiv:2301.00774).

    N:M masks are chosen a group at a time when its first column is reached, so after
    compensation. Unstructured masks are chosen for `block_size` columns over all rows. A block
    pattern is chosen a column of blocks at a time by the joint error ‖w U⁻¹‖² of its entries;
    each column of blocks loses its share. Weights on inputs that are always zero become zero.

    Args:
        weight: [out, k], floating, finite.
        pattern: The pattern.
        hessian: [k, k] XᵀX up to a positive scale, or its factor (then `damping` is unused).
        damping: Relative damping, see `factor_hessian`.
        block_size: Columns between two updates of all later columns; rounded to whole groups.

    Returns:
        [out, k], a new tensor of the same dtype, computed in float32 or wider; pruned are +0.

    Raises:
        ArgumentError: The weight is no finite floating matrix, or the Hessian's size differs.
        CalibrationError: The Hessian is not finite or cannot be factored.

    Example:
        >>> from hopsparse.formats.pattern import NMPattern
        >>> h = torch.tensor([[2.0, 1.9], [1.9, 2.0]])
        >>> sparsegpt(torch.tensor([[1.0, 3.0]]), NMPattern(1, 2), h, damping=1e-6)[0, 0].item()
        0.0
    """
    check_matrix(weight, "weight")
    compute = torch.promote_types(weight.dtype, torch.float32)
    k = weight.shape[1]
    size = len(hessian.dead if isinstance(hessian, HessianFactor) else hessian)
    if size != k:
        raise ArgumentError(
            f"a Hessian of size {size} for k={k}", need="one row an input feature", hint="XᵀX"
        )
    if isinstance(hessian, Tensor):
        hessian = factor_hessian(hessian, damping=damping, dtype=compute)
    upper = hessian.upper.to(compute)
    columns = weight.to(compute).t().contiguous()  # [k, out]: a column of the weight is contiguous
    if columns.data_ptr() == weight.data_ptr():
        columns = columns.clone()
    columns[hessian.dead] = 0
    step = _decided_together(pattern)
    width = max(step, block_size // step * step) if step else block_size
    for start in range(0, k, width):
        stop = min(start + width, k)
        errors = _prune_columns(columns, upper, (start, stop), pattern, step or width)
        columns[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
    return columns.t().to(weight.dtype).contiguous()


def _decided_together(pattern: Pattern) -> int:
    """How many columns get their mask at once; 0 means as many as a lazy update spans."""
    if isinstance(pattern, NMPattern):
        return pattern.m
    return pattern.cols if isinstance(pattern, BlockPattern) else 0


def _prune_columns(
    columns: Tensor, upper: Tensor, span: tuple[int, int], pattern: Pattern, step: int
) -> Tensor:
    """Prune columns [start, stop) in place; their errors [stop - start, out] update the rest."""
    start, stop = span
    local = columns[start:stop]
    factor = upper[start:stop, start:stop].contiguous()
    diagonal = factor.diagonal().tolist()
    errors = torch.empty_like(local)
    for first in range(0, stop - start, step):
        last = min(first + step, stop - start)
        part = factor[first:last, first:last]
        drop = ~_choose(local[first:last], part, pattern, start + first)
        for j in range(first, last):
            dropped = drop[j - first]
            torch.mul(local[j], dropped, out=errors[j]).div_(diagonal[j])
            local[j].masked_fill_(dropped, 0)
            local[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
    return errors


def _choose(columns: Tensor, upper: Tensor, pattern: Pattern, start: int) -> Tensor:
    """The entries of columns [width, out] to keep; `start` is the first column's index."""
    width, out = columns.shape
    if isinstance(pattern, BlockPattern):
        joint = torch.linalg.solve_triangular(upper.t(), columns, upper=False).square_()
        sums = block_sums(joint.t(), pattern.rows, width)
        done, share = start // pattern.cols, len(sums) * pattern.sparsity
        zeros = round((done + 1) * share) - round(done * share)
        kept = keep_top(sums.view(1, -1), len(sums) - zeros).view_as(sums)
        return spread_blocks(kept, pattern.rows, width, (out, width)).t()
    scores = (columns / upper.diagonal().unsqueeze(1)).square_()
    if isinstance(pattern, NMPattern):
        return keep_ranked(scores, pattern.n)
    share = out * pattern.sparsity
    zeros = round((start + width) * share) - round(start * share)
    flat = scores.t().reshape(1, -1)
    return keep_top(flat, flat.shape[1] - zeros).view(out, width).t()


def _check_hessian(hessian: Tensor) -> None:
    if hessian.dim() != 2 or hessian.shape[0] != hessian.shape[1] or not hessian.numel():
        raise ArgumentError(
            f"a Hessian of shape {tuple(hessian.shape)}", need="a square matrix [k, k]", hint="XᵀX"
        )
    bad = ~hessian.isfinite()
    bad.diagonal().logical_or_(hessian.diagonal() < 0)
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise CalibrationError(
            f"the Hessian holds {float(hessian[row, column])} at row {row}, column {column}",
            need="finite entries and a diagonal of at least 0",
            hint="another calibration text, or a model in float32",
        )
