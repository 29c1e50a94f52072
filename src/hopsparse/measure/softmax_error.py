"""How wrong attention may be that is computed in float32: derived, like all of `measure.error`."""

from __future__ import annotations

import torch
from torch import Tensor

from .error import gamma, unit_roundoff

# exp and log of float32 are off by two units in the last place, each at most twice the unit
# roundoff (CUDA C++ Programming Guide; torch on the CPU is no worse).
_FUNCTION = 4


def attention_bounds(
    size: Tensor, weights: Tensor, values: Tensor, lse: Tensor, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Largest errors of softmax(scores) @ values and of its LSE, for scores of rounded products.

    A score is off by at most gamma of its terms, which moves a weight by the factor exp of twice
    the largest such error; then come the sums over keys in any order, two divisions or products
    where parts are merged, and the dtype of the result. Weights that are stored in 16 bits before
    they meet the values add their unit roundoff.

    Args:
        size: float64 [..., n]: |scale| times the sum of |q| |k| and its terms' count folded in by
            `score_size`; 0 for keys that are not seen.
        weights: float64 [..., n], exact.
        values: float64 [..., n, dim].
        lse: float64 [...], exact.
        out_dtype: What the result is stored in.

    Returns:
        float64 [..., dim] and [...].

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> out, lse = attention_bounds(0 * one, one, one[:, None], 0 * one[0], torch.float32)
        >>> bool(out < 1e-5), bool(lse < 1e-5)
        (True, True)
    """
    unit = unit_roundoff(torch.float32)
    terms = weights.shape[-1] + _FUNCTION + 8
    # exp is evaluated at score - maximum, which rounds once more.
    off = size.amax(-1) + unit * 2 * size.amax(-1) + _FUNCTION * unit
    moved = torch.expm1(2 * off) + gamma(2 * terms, torch.float32)
    stored = 0.0 if out_dtype == torch.float32 else 2 * unit_roundoff(out_dtype)
    mass = (weights[..., None] * values.abs()).sum(-2)
    exact = (weights[..., None] * values).sum(-2).abs()
    error = (moved + stored)[..., None] * mass
    rounded = unit_roundoff(out_dtype) * (exact + error) + torch.finfo(out_dtype).tiny
    finite = lse.where(lse.isfinite(), 0.0).abs()
    return error + rounded, off + gamma(terms, torch.float32) + 4 * unit * (finite + 1)


def score_size(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Largest error of scale q.k in float32, of every pair.

    Args:
        q: [..., queries, dim].
        keys: [..., n, dim].
        scale: Of the product.

    Returns:
        float64 [..., queries, n].

    Example:
        >>> bool(score_size(torch.ones(1, 8), torch.ones(1, 8), 1.0) < 1e-5)
        True
    """
    size = q.double().abs() @ keys.double().abs().transpose(-1, -2) * abs(scale)
    return gamma(q.shape[-1] + 3, torch.float32) * size + torch.finfo(torch.float32).tiny
