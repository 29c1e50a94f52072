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


def rms_norm_bound(k: int) -> float:
    """Largest relative error of x * rsqrt(mean(x^2) + eps) * weight in float32.

    The squares are positive, so that their sum is off by gamma_k of itself, and a root halves that,
    and what a division and a rounded eps add. Then come rsqrt (2 units in the last place, CUDA C++
    Programming Guide; a unit is at most twice the unit roundoff) and two products.

    Args:
        k: Columns.

    Example:
        >>> rms_norm_bound(1) < 1e-6
        True
    """
    return gamma(k + 3, torch.float32) / 2 + gamma(6, torch.float32)


def gated_bound(gate: Tensor) -> Tensor:
    """Largest relative error of silu(gate) * up in float32, by fast exponential and division.

    __expf is off by 2 + floor(1.173 |gate|) units in the last place and __fdividef by 2 (CUDA C++
    Programming Guide); a unit is at most twice the unit roundoff. A sum and two products, one of
    them that of the exponential's argument, add one each.

    Args:
        gate: Any shape, magnitudes below 87: beyond, the quotient underflows.

    Returns:
        float64, as gate.

    Example:
        >>> bool(gated_bound(torch.zeros(1)) < 1e-6)
        True
    """
    units = 2 * (2 + (1.173 * gate.double().abs()).floor()) + 4 + 3
    return units * unit_roundoff(torch.float32) * (1 + 2**-16)


def finish_bound(size: Tensor, result: Tensor, residual: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Largest possible error of act(scales * sum + bias) + residual of an exact sum, in float32.

    Scales, the bias, the activation (no steeper than 1.13, a few units of float32 with its fast
    exponential) and the residual round in float32, the end in `out_dtype`.

    Args:
        size: Magnitude of what the activation is applied to: its terms, added without signs.
        result: The exact result.
        residual: What was added last.
        out_dtype: What the result is stored in.

    Returns:
        float64, as result.

    Example:
        >>> one = torch.ones(1)
        >>> bool(finish_bound(one, one, one, torch.float32) < 1e-5)
        True
    """
    unit = unit_roundoff(torch.float32)
    slack = 64 * unit * (size.double() + 1)
    slack = slack + 4 * unit * (result.double().abs() + residual.double().abs())
    end = unit_roundoff(out_dtype) * (result.double().abs() + slack)
    return slack + end + torch.finfo(out_dtype).tiny
