"""The numbers that a scheme can hold, and the scales that put a weight on them.

All grids are symmetric around an exact zero, so a pruned weight stays pruned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..formats.quantized import code_dtype as code_dtype
from ..formats.quantized import groups_of as groups_of
from ..formats.quantized import scale_dtype as scale_dtype
from ..formats.scheme import Scheme

#: Largest magnitude that a scale maps its group's largest entry to; int4 also holds -8.
LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
_LEAST = {"int8": -127.0, "int4": -8.0}
# Shrinking the range costs the few largest entries and serves the many small ones.
_CLIPS = tuple(1 - step / 40 for step in range(16))
# Entries in one pass over several candidates: 64 MiB.
_AT_ONCE = 2**24


def weight_scales(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Tensor:
    """Scales under which `weight` loses least, rounded to what a checkpoint stores.

    For int4 the range of each group is shrunk to where the squared error, weighted by
    `importance`, is least (16 candidates down to 0.625 of the largest entry); 8-bit grids keep
    the largest entry exactly.

    Args:
        weight: [out, k], floating, finite; zeros do not count.
        scheme: The scheme.
        importance: [k] weight of each column in the error, such as the mean square of its input.

    Returns:
        [out, groups] float32, all positive.

    Example:
        >>> weight_scales(torch.tensor([[127.0, -2.0]]), Scheme("int8"))
        tensor([[1.]])
    """
    values = _grouped(weight.float(), scheme)
    peak = values.abs().amax(-1) / LARGEST[scheme.weights]
    if scheme.weights != "int4":
        return _storable(peak, scheme)
    cost = None
    if importance is not None:
        cost = _grouped(importance.float().to(weight.device).unsqueeze(0), scheme)
    candidates = _storable(torch.stack([peak * clip for clip in _CLIPS]), scheme)
    # Few large passes where each is a launch; one that fits a cache where it is not.
    at_once = 1 if weight.device.type == "cpu" else max(1, _AT_ONCE // max(1, weight.numel()))
    errors = _squared_errors(values, candidates, cost, at_once)
    # Of equal errors the first, that of the widest range, is taken.
    return candidates.gather(0, errors.argmin(0, keepdim=True)).squeeze(0)


def round_to(values: Tensor, scales: Tensor, weights: str) -> Tensor:
    """The nearest representable numbers, `codes * scales`, in float32; halves go to even.

    Args:
        values: Any shape.
        scales: Broadcasts against it; positive.
        weights: `int8`, `fp8` or `int4`.

    Example:
        >>> round_to(torch.tensor([0.6, -9.0]), torch.tensor(1.0), "int4").tolist()
        [1.0, -8.0]
    """
    return to_codes(values, scales, weights).mul_(scales)


def to_codes(values: Tensor, scales: Tensor, weights: str) -> Tensor:
    """The stored numbers as float32: integers, or E4M3 values; -0 becomes 0."""
    return signed_codes(values, scales, weights).add_(0.0)


def signed_codes(values: Tensor, scales: Tensor, weights: str) -> Tensor:
    """`to_codes` with the sign of zeros left on."""
    scaled = values.float() / scales
    if weights == "fp8":
        limit = LARGEST["fp8"]
        return _nearest_e4m3(scaled.clamp_(-limit, limit))
    return scaled.round_().clamp_(_LEAST[weights], LARGEST[weights])


def round_weight(weight: Tensor, scheme: Scheme, scales: Tensor | None = None) -> Tensor:
    """`weight` rounded to nearest under a scheme, in its own dtype; zeros stay zero.

    Args:
        weight: [out, k].
        scheme: The scheme.
        scales: [out, groups]; those of `weight_scales(weight, scheme)` when None.

    Raises:
        ArgumentError: Scales of another shape.

    Example:
        >>> round_weight(torch.tensor([[7.0, 0.4, 0.0]]), Scheme("int4", 32))
        tensor([[7., 0., 0.]])
    """
    scales = weight_scales(weight, scheme) if scales is None else scales
    values, wide = spread(weight, scales, scheme)
    return round_to(values, wide, scheme.weights).to(weight.dtype).view(weight.shape)


def spread(weight: Tensor, scales: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """A weight and its scales in shapes that broadcast: views where groups are whole.

    Args:
        weight: [out, k]; where groups are whole it is viewed as [out, groups, group].
        scales: [out, groups]; there [out, groups, 1], elsewhere what `expand_scales` returns.
        scheme: The scheme.

    Raises:
        ArgumentError: Another number of groups than a row of k has.
    """
    out, k = weight.shape
    if not scheme.group or k % scheme.group or scales.shape != (out, k // scheme.group):
        return weight, expand_scales(scales, k, scheme)
    return weight.view(out, k // scheme.group, scheme.group), scales.float().unsqueeze(-1)


def expand_scales(scales: Tensor, k: int, scheme: Scheme) -> Tensor:
    """[out, groups] -> [out, k], or [out, 1] where a row has one scale.

    Raises:
        ArgumentError: Another number of groups than a row of k has.
    """
    groups = groups_of(k, scheme)
    if scales.dim() != 2 or scales.shape[1] != groups:
        raise ArgumentError(
            f"scales of shape {list(scales.shape)} for k = {k} under {scheme}",
            need=f"[out, {groups}]",
            hint="weight_scales(weight, scheme)",
        )
    if not scheme.group:
        return scales.float()
    return scales.float().repeat_interleave(scheme.group, dim=1)[:, :k]


def _nearest_e4m3(values: Tensor) -> Tensor:
    """The E4M3 numbers nearest to float32 `values` of at most 448; the sign of zeros may go."""
    if values.device.type != "cpu":
        return values.to(torch.float8_e4m3fn).float()
    # torch casts 300 000 of them back in 1.3 ms there; this takes 0.2. A number that is large
    # against `values` leaves them three bits behind the first; the least exponent is -6.
    exponents = (values.view(torch.int32) & 0x7F800000).clamp_(min=(127 - 6) << 23)
    large = exponents.add_((20 << 23) + (1 << 22)).view(torch.float32)
    return (values + large).sub_(large)


def _squared_errors(
    values: Tensor, candidates: Tensor, cost: Tensor | None, at_once: int
) -> Tensor:
    """[n, out, groups] of [out, groups, group] in int4 under each of [n, out, groups] scales."""
    found = []
    for first in range(0, len(candidates), at_once):
        scales = candidates[first : first + at_once].unsqueeze(-1)
        gap = signed_codes(values, scales, "int4").mul_(scales).sub_(values).square_()
        if cost is not None:
            gap.mul_(cost)
        found.append(gap.sum(-1))
    return torch.cat(found)


def _grouped(matrix: Tensor, scheme: Scheme) -> Tensor:
    """[rows, groups, group], the last group filled up with zeros."""
    rows, k = matrix.shape
    width = scheme.group or k
    missing = groups_of(k, scheme) * width - k
    return torch.nn.functional.pad(matrix, (0, missing)).view(rows, -1, width)


def _storable(scales: Tensor, scheme: Scheme) -> Tensor:
    """Rounded to the stored dtype; a group of zeros gets 1, and no scale rounds to zero."""
    tiny = torch.finfo(scale_dtype(scheme)).tiny
    stored = scales.clamp(min=tiny).to(scale_dtype(scheme)).float()
    return torch.where(scales > 0, stored, torch.ones_like(stored))
