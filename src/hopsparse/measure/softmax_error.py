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


def tensor_core_attention_bounds(
    reach: Tensor, weights: Tensor, values: Tensor, lse: Tensor, dim: int, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Largest errors of attention by wgmma, tile after tile, with weights of 16 bits.

    An instruction sums 16 products and what was there: 17 terms, each cut to 24 bits of the
    largest. That is at most 34 unit roundoffs of the sum of their magnitudes, or 2.125 a product.

    - A score is off by 2.125 dim unit roundoffs of `reach`, counted as 3 dim. Its power of two has
      an argument that rounds the scale, the shift and their sum, and 2 dim more roundoffs than one
      tile's are in what the shifts of earlier tiles add up to: 8 of `reach` together.
    - A power is off by 4, and so is what earlier sums are multiplied by where a larger score came.
      Sums of weights add n, products with values 2.125 n: counted as 4 n + 64.
    - Weights are rounded to `out_dtype` for the values, not in their own sum. Below its normal
      range, or that of float32 for powers, that is absolute; the largest weight so far was 1, and
      sums are divided by at least that.

    Args:
        reach: float64 [..., n]: |scale| times the sum of |q| |k|; 0 for keys that are not seen.
        weights: float64 [..., n], exact.
        values: float64 [..., n, dim].
        lse: float64 [...], exact.
        dim: Terms of a score.
        out_dtype: Of weights and of the result.

    Returns:
        float64 [..., dim] and [...].

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> out, lse = tensor_core_attention_bounds(
        ...     0 * one, one, one[:, None], 0 * one[0], 64, torch.bfloat16
        ... )
        >>> bool(out < 0.02), bool(lse < 1e-4)
        (True, True)
    """
    unit, stored = unit_roundoff(torch.float32), unit_roundoff(out_dtype)
    most = reach.amax(-1)
    off = (gamma(3 * dim, torch.float32) + 8 * unit) * most + _FUNCTION * unit
    terms = 4 * weights.shape[-1] + 64
    moved = torch.expm1(2 * off) + gamma(terms, torch.float32)
    mass = weights @ values.abs()
    exact = (weights @ values).abs()
    least = torch.finfo(out_dtype).smallest_normal * stored + torch.finfo(torch.float32).tiny
    lost = least * weights.amax(-1, keepdim=True) * values.abs().sum(-2)
    error = (moved + stored * (1 + moved))[..., None] * mass + 2 * lost
    rounded = stored * (exact + error) + torch.finfo(out_dtype).smallest_normal * stored
    finite = lse.where(lse.isfinite(), 0.0).abs()
    return error + rounded, off + gamma(terms, torch.float32) + 4 * unit * (finite + most + 1)
