"""How wrong a product may be: bounds derived from precision, never chosen.

With unit roundoff u, a sum of n terms in any order is off by at most gamma_n times the sum of
their magnitudes, gamma_n = n u / (1 - n u) (Higham, Accuracy and Stability of Numerical
Algorithms, section 3.1). Rounding the sum to the dtype of the output adds u_out of the result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# An instruction of Hopper shifts 32 products of 8-bit floats, and the sum before them, to the
# largest exponent, cuts what falls below 13 bits of fraction, and cuts their sum to as many again
# (MMA-Sim, arXiv:2511.10909; 14 bits with the leading one, DeepSeek-V3, arXiv:2412.19437).
_FP8_CUT = 2.0**-13
_FP8_PRODUCTS = 32
_FP8_LEAST = 2.0**-6  # the exponent of subnormal E4M3 numbers
# |sum of n errors below c that have no preferred sign| exceeds t sqrt(n) c with a probability of at
# most 2 exp(-t^2 / 2) (Hoeffding, 1963): 3e-14 for 8.
_DEVIATIONS = 8.0

#: Most columns whose sum stays in the tensor cores where sums of 8-bit floats are promoted.
PROMOTED_COLUMNS = 256


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


def swiglu_bound(gate: Tensor, up: Tensor, gate_off: Tensor, up_off: Tensor) -> Tensor:
    """Largest possible error of silu(gate) * up in float32, of sides that are off by so much.

    silu is no steeper than 1.0999.

    Args:
        gate: Exact, magnitudes below 87.
        up: Exact, as gate.
        gate_off: Largest error of what stands for gate, as gate.
        up_off: That of up.

    Returns:
        float64, as gate.

    Example:
        >>> one, none = torch.ones(1), torch.zeros(1)
        >>> bool(swiglu_bound(one, one, none, none) < 1e-5)
        True
    """
    gate, up, gate_off, up_off = (each.double() for each in (gate, up, gate_off, up_off))
    silu = torch.nn.functional.silu(gate).abs()
    moved = 1.1 * gate_off * (up.abs() + up_off) + silu * up_off
    return moved + gated_bound(gate.abs() + gate_off) * (silu * up.abs() + moved)


def rounded_bound(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest distance of numbers to the nearest code of 8 bits, after a division in float32.

    Args:
        values: What is rounded, of no larger magnitude than the largest code.
        dtype: int8 or float8_e4m3fn.

    Returns:
        float64, as values.

    Example:
        >>> 4 < rounded_bound(torch.tensor([100.0]), torch.float8_e4m3fn).item() < 4.001
        True
    """
    size = values.double().abs()
    divided = gamma(4, torch.float32) * size  # a reciprocal, of a quotient, and a product
    if not dtype.is_floating_point:
        return divided + 0.5
    # Half of the spacing is the unit roundoff of the power of two below.
    exponent = torch.frexp((size + divided).clamp(min=torch.finfo(dtype).smallest_normal)).exponent
    return divided + unit_roundoff(dtype) * torch.exp2(exponent.double() - 1)


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


def fp8_sum_bound(x: Tensor, w: Tensor, *, batch: int | None = None) -> Tensor:
    """How far Hopper's tensor cores may be off `x @ w.T` of 8-bit floats without preferred signs.

    What is cut of the running sum, twice an instruction, always pulls towards zero, so that it is
    added up; what is cut of a product has the sign of the product, so that it is added up as a
    random walk. Both are parts of the largest running sum, of any slice of k in any direction.

    Args:
        x: [tokens, k], exact.
        w: Dense [out, k], exact; zeros cost nothing.
        batch: Columns whose sum leaves the tensor cores, to be added in float32: promoted sums, of
            `PROMOTED_COLUMNS` at most here. None leaves everything there: fast ones.

    Returns:
        float64 [tokens, out]; an entry is beyond with a probability of 3e-14.

    Example:
        >>> x, w = torch.ones(1, 4096), torch.ones(1, 4096)
        >>> bool(fp8_sum_bound(x, w, batch=256) < fp8_sum_bound(x, w))
        True
    """
    x, w = x.double(), w.double()
    k = x.shape[1]
    pulled = torch.zeros(len(x), len(w), dtype=torch.float64, device=x.device)
    walked, reached = torch.zeros_like(pulled), torch.zeros_like(pulled)
    for first in range(0, k, batch or k):
        ends = slice(first, min(first + (batch or k), k))
        of_x, of_w = x[:, ends], w[:, ends]
        reach = _largest_running_sum(of_x, of_w)
        tops = [each.abs().amax(1).clamp(min=_FP8_LEAST) for each in (of_x, of_w)]
        largest = 2 * reach + tops[0].outer(tops[1])
        pulled += 2 * math.ceil(of_x.shape[1] / _FP8_PRODUCTS) * largest
        walked += (of_w != 0).sum(1) * largest.square()
        reached += reach
    bound = _FP8_CUT * (pulled + _DEVIATIONS * walked.sqrt())
    return bound if batch is None else bound + gamma(-(-k // batch), torch.float32) * reached


def grouped_sum_bound(x: Tensor, w: Tensor, scales: Tensor, group: int, *, floats: bool) -> Tensor:
    """How far sums may be off that are scaled in float32 group by group, and added there.

    A group's sum is taken by tensor cores: integers exactly, 8-bit floats as `fp8_sum_bound` has
    it. Its scale rounds once, and so does each addition.

    Args:
        x: [tokens, k], exact.
        w: Dense [out, k] as it is multiplied, exact, without scales.
        scales: [out, groups]: what entries of a group of w stand for.
        group: Columns that share a scale; the last group may be shorter.
        floats: Whether x and w are 8-bit floats.

    Returns:
        float64 [tokens, out].

    Example:
        >>> x, w, scales = torch.ones(1, 256), torch.ones(1, 256), torch.ones(1, 2)
        >>> exact = grouped_sum_bound(x, w, scales, 128, floats=False)
        >>> bool(exact < 256 * 2.0**-22), bool(
        ...     exact < grouped_sum_bound(x, w, scales, 128, floats=True))
        (True, True)
    """
    x, w, scales = x.double(), w.double(), scales.double().abs()
    off = torch.zeros(len(x), len(w), dtype=torch.float64, device=x.device)
    size = torch.zeros_like(off)
    for index, first in enumerate(range(0, x.shape[1], group)):
        of_x, of_w = x[:, first : first + group], w[:, first : first + group]
        sums = (of_x @ of_w.T).abs()
        if floats:
            error = fp8_sum_bound(of_x, of_w)
            sums += error
            off += scales[:, index] * error
        size += scales[:, index] * sums
    return off + gamma(scales.shape[1] + 1, torch.float32) * size


def scaled_bound(
    sums: Tensor, sum_error: Tensor, scale: Tensor, out_dtype: torch.dtype, roundings: int = 1
) -> Tensor:
    """Largest possible error of `scale * sums` computed in float32 from inexact sums.

    A sum of integers is rounded to float32, and either side may have a scale: three roundings. Then
    comes the dtype of the result, more than once where a kernel of its own multiplies a scale.

    Args:
        sums: Exact [tokens, out].
        sum_error: How far the sums may be off, as `sums`; or one number.
        scale: Of both sides, multiplied; what `sums` can be multiplied with.
        out_dtype: What the result is stored in; integers are exact.
        roundings: How often the result is rounded to `out_dtype`.

    Returns:
        float64 [tokens, out], positive.

    Example:
        >>> one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1)
        >>> scaled_bound(one, none, one, torch.int32).item()
        0.5
    """
    off = scale.abs() * sum_error.double()
    if not out_dtype.is_floating_point:
        return off + 0.5  # Another integer is one off.
    size = (scale * sums).abs() + off
    off = off + gamma(3, torch.float32) * size
    unit = unit_roundoff(out_dtype)
    least = roundings * torch.finfo(out_dtype).smallest_normal * unit
    return off + ((1 + unit) ** roundings - 1) * (size + off) + least


def _largest_running_sum(x: Tensor, w: Tensor) -> Tensor:
    """[tokens, out]: the largest magnitude of `x[:, :n] @ w[:, :n].T`, n whole instructions."""
    running = torch.zeros(len(x), len(w), dtype=x.dtype, device=x.device)
    largest = torch.zeros_like(running)
    for start in range(0, x.shape[1], _FP8_PRODUCTS):
        ends = slice(start, start + _FP8_PRODUCTS)
        running.addmm_(x[:, ends], w[:, ends].T)
        torch.maximum(largest, running.abs(), out=largest)
    return largest


def block_rounding_bound(rows: Tensor, most: int) -> Tensor:
    """Largest error of rounding rows to integers of -`most` to `most` times a bfloat16 scale.

    Half a step, and what lies beyond the last integer where the scale was rounded down; below the
    normal range a scale is off by half the spacing of the subnormals.

    Args:
        rows: [n, block].
        most: The largest integer.

    Returns:
        float64 [n, 1].

    Example:
        >>> block_rounding_bound(torch.tensor([[7.0, 0.2]]), 7).item() < 0.6
        True
    """
    unit, step = unit_roundoff(torch.bfloat16), rows.double().abs().amax(1, keepdim=True) / most
    least = torch.finfo(torch.bfloat16).smallest_normal * unit
    return (0.5 + (0.5 + most) * unit) * step + (0.5 + most) * least
