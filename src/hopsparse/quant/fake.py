"""Rounding that training sees through: straight-through gradients (arXiv:1308.3432)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.scheme import Scheme
from .grid import expand_scales, round_to, weight_scales
from .inputs import input_scales, round_inputs

# What still rounds to the largest code is rounded, not clipped: half a step beyond it.
_CLIPPED = {"int8": (-127.5, 127.5), "int4": (-8.5, 7.5), "fp8": (-464.0, 464.0)}


def fake_weight(weight: Tensor, scheme: Scheme, scales: Tensor | None = None) -> Tensor:
    """`round_weight(weight, scheme, scales)`, with the gradient of the identity.

    A clipped entry gets no gradient. A zero stays exactly zero; whoever trains with fixed zeros
    masks its gradient, as without rounding. Scales get none.

    Args:
        weight: [out, k], floating.
        scheme: The scheme.
        scales: [out, groups]; those of `weight_scales` when None, computed at every call.

    Raises:
        ArgumentError: Scales of another shape.

    Example:
        >>> w = torch.tensor([[0.6, 9.0, 0.0]], requires_grad=True)
        >>> rounded = fake_weight(w, Scheme("int4", 32), torch.ones(1, 1))
        >>> rounded.sum().backward()
        >>> rounded.tolist(), w.grad.tolist()
        ([[1.0, 7.0, 0.0]], [[1.0, 0.0, 1.0]])
    """
    with torch.no_grad():
        found = weight_scales(weight, scheme) if scales is None else scales
        wide = expand_scales(found, weight.shape[1], scheme)
        rounded = round_to(weight, wide, scheme.weights).to(weight.dtype)
    return _straight_through(weight, rounded, wide, scheme.weights)


def fake_inputs(x: Tensor, scheme: Scheme, scale: Tensor | None = None) -> Tensor:
    """`round_inputs(x, scheme, scale)`, with the gradient of the identity where nothing is clipped.

    With a scale a token nothing is ever clipped, and the scale gets no gradient. Infinity becomes
    NaN under a static scale too.

    Args:
        x: [..., k], floating.
        scheme: A scheme whose `activations` are "none" returns x itself.
        scale: float32 [1], positive; needed by a static scheme.

    Raises:
        ArgumentError: A static scheme without a scale.

    Example:
        >>> x = torch.tensor([[200.0, 0.4]], requires_grad=True)
        >>> scheme = Scheme("int8", 0, "int8", static=True)
        >>> fake_inputs(x, scheme, torch.ones(1)).sum().backward()
        >>> x.grad.tolist()
        [[0.0, 1.0]]
    """
    if scheme.activations == "none":
        return x
    with torch.no_grad():
        rounded = round_inputs(x, scheme, scale)
        wide = input_scales(x, scheme) if scale is None else scale
    return _straight_through(x, rounded, wide, scheme.activations)


def _straight_through(values: Tensor, rounded: Tensor, scales: Tensor, kind: str) -> Tensor:
    """`rounded` bit for bit, with a gradient of 1 where `values` are not clipped."""
    low, high = _CLIPPED[kind]
    with torch.no_grad():
        scaled = values.float() / scales
        inside = ((scaled >= low) & (scaled <= high)).to(values.dtype)
    # x - x is zero; what is not finite becomes NaN.
    passing = values * inside
    return rounded + (passing - passing.detach())
