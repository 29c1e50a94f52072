"""How wrong the gradient of attention may be that is computed in float32 from 16-bit weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .error import gamma, unit_roundoff
from .softmax_error import tensor_core_attention_bounds

_FUNCTION = 4  # unit roundoffs of a power, as in softmax_error


@dataclass(frozen=True)
class Scored:
    """One head of queries over keys, in float64.

    Attributes:
        q: [queries, dim].
        keys: [n, dim].
        values: [n, dim].
        seen: bool [queries, n].
        scale: Of q.k.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    seen: Tensor
    scale: float


#: Of q [queries, dim], keys [n, dim] and values [n, dim].
Gradients = tuple[Tensor, Tensor, Tensor]


def attention_gradient(
    case: Scored, grad: Tensor, grad_lse: Tensor, dtype: torch.dtype, terms: int
) -> tuple[Gradients, Gradients]:
    """The gradient of attention, and the largest errors of its sums before they are stored.

    With p = exp(s - lse): dv = p^T g, ds = p (g v^T - rowsum(g out) + e), dq = scale ds k and
    dk = scale ds^T q, for gradients g of the output and e of the LSE.

    - A power has the errors of a score and of the LSE, both as `tensor_core_attention_bounds` has
      them, and four roundings more of an LSE, or of 1, where both are brought to base 2.
    - A product with a value is off by 3 dim unit roundoffs of its magnitudes, as a score is. The
      output in rowsum was stored: its bound, and dim + 2 roundings of the sum.
    - ds and p are rounded to `dtype` for the second products; below its normal range, or that of
      float32, that is absolute. Sums of `terms` products: 4 terms + 64 roundings, the scale too.

    Args:
        case: Queries, keys and values, exact.
        grad: float64 [queries, dim], of the output.
        grad_lse: float64 [queries].
        dtype: Of the output, and of what meets the second products.
        terms: Most products that a sum has: keys, or queries of all heads and sequences.

    Returns:
        The gradient, and its errors; those of heads and sequences that share keys add up.

    Example:
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> case = Scored(one, one, one, one.bool(), 1.0)
        >>> exact, error = attention_gradient(case, one, one[0], torch.bfloat16, 1)
        >>> [float(each) for each in exact], all(float(each) < 0.02 for each in error)
        ([1.0, 1.0, 1.0], True)
    """
    stored, factor = unit_roundoff(dtype), abs(case.scale)
    parts, slope, of_slope = _slopes(case, grad, grad_lse, dtype)
    weights, moved = parts
    least = torch.finfo(dtype).smallest_normal * stored + torch.finfo(torch.float32).tiny
    of_slope = (of_slope + stored * (slope.abs() + of_slope) + least).where(case.seen, 0.0)
    of_weights = (weights * (moved + stored * (1 + moved)) + least).where(case.seen, 0.0)
    summed = gamma(4 * terms + 64, torch.float32)
    reached = of_slope + summed * (slope.abs() + of_slope)
    exact = (slope @ case.keys * case.scale, slope.T @ case.q * case.scale, weights.T @ grad)
    error = (
        factor * (reached @ case.keys.abs()),
        factor * (reached.T @ case.q.abs()),
        (of_weights + summed * (weights + of_weights)).T @ grad.abs(),
    )
    return exact, error


def _slopes(
    case: Scored, grad: Tensor, grad_lse: Tensor, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Weights and by what part they are off; ds, and its error before it is rounded."""
    unit, tiny = unit_roundoff(torch.float32), torch.finfo(torch.float32).tiny
    q, keys, values, seen = case.q, case.keys, case.values, case.seen
    dim, some = q.shape[1], seen.any(-1)
    scores = (q @ keys.T * case.scale).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.where(some, 0.0)[:, None]).exp()
    reach = (q.abs() @ keys.T.abs() * abs(case.scale)).where(seen, 0.0)
    of_out, of_lse = tensor_core_attention_bounds(reach, weights, values, lse, dim, dtype)
    finite = lse.where(some, 0.0).abs()
    off = (gamma(3 * dim, torch.float32) + 8 * unit) * reach.amax(-1) + of_lse.where(some, 0.0)
    moved = torch.expm1(off + 4 * unit * (finite + 1) + _FUNCTION * unit)[:, None]

    out, size = weights @ values, grad.abs() @ values.T.abs()
    shift = (grad * out).sum(-1) - grad_lse
    mass = (grad.abs() * (out.abs() + of_out)).sum(-1) + grad_lse.abs()
    of_shift = (grad.abs() * of_out).sum(-1) + gamma(dim + 2, torch.float32) * mass
    inner = grad @ values.T - shift[:, None]
    of_inner = gamma(3 * dim, torch.float32) * size + of_shift[:, None]
    of_inner = of_inner + unit * (size + shift.abs()[:, None] + of_inner)
    of_slope = weights * ((moved + unit * (1 + moved)) * (inner.abs() + of_inner) + of_inner)
    return (weights, moved), weights * inner, of_slope + tiny * (inner.abs() + of_inner)


def when_stored(exact: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of a sum that is rounded to a dtype.

    Args:
        exact: float64.
        error: float64, before it is stored.
        dtype: What it is stored in.

    Example:
        >>> float(when_stored(torch.ones(1).double(), torch.zeros(1).double(), torch.bfloat16)) > 0
        True
    """
    stored = unit_roundoff(dtype)
    least = torch.finfo(dtype).smallest_normal * stored
    return error + stored * (exact.abs() + error) + least
