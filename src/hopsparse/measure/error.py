"""How wrong a product may be: bounds derived from precision, never chosen.

With unit roundoff u, a sum of n terms in any order is off by at most gamma_n times the sum of
their magnitudes, gamma_n = n u / (1 - n u) (Higham, Accuracy and Stability of Numerical
Algorithms, section 3.1). Rounding the sum to the dtype of the output adds u_out of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest.

    Example:
        >>> unit_roundoff(torch.bfloat16)
        0.00390625
    """
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, dtype: torch.dtype) -> float:
    """The constant of a sum of `terms` products in `dtype`; infinite where precision is gone.

    Example:
        >>> gamma(1, torch.float32) > unit_roundoff(torch.float32)
        True
    """
    part = terms * unit_roundoff(dtype)
    return part / (1 - part) if part < 1 else float("inf")


def product_bound(
    x: Tensor,
    w: Tensor,
    accumulate_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Largest possible error of each entry of `x @ w.T + bias` as stored in `out_dtype`.

    Inputs count as exact: the reference must be computed from the very same numbers.

    Args:
        x: [..., k].
        w: Dense [out, k]; zeros cost nothing.
        accumulate_dtype: Dtype of the running sums.
        out_dtype: Dtype of the result.
        bias: [out] or None.

    Returns:
        float64 [..., out].

    Example:
        >>> one = torch.ones(1, 1)
        >>> bool(product_bound(one, one, torch.float32, torch.float32) < 1e-7)
        True
    """
    size, exact = x.double().abs() @ w.double().abs().T, x.double() @ w.double().T
    terms = w.shape[1]
    if bias is not None:
        size, exact, terms = size + bias.double().abs(), exact + bias.double(), terms + 1
    summed = gamma(terms, accumulate_dtype) * size
    # Below the normal range rounding is absolute: half the spacing of the subnormals.
    least = torch.finfo(out_dtype).smallest_normal * unit_roundoff(out_dtype)
    if out_dtype == accumulate_dtype:
        return summed + least
    return summed + unit_roundoff(out_dtype) * (exact.abs() + summed) + least
