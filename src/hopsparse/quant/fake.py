"""Rounding that training sees through: straight-through gradients (arXiv:1308.3432)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..formats.scheme import Scheme
from .grid import signed_codes, spread, weight_scales
from .inputs import round_inputs

# What still rounds to the largest code is rounded, not clipped: half a step beyond it.
_CLIPPED = {"int8": (-127.5, 127.5), "int4": (-8.5, 7.5), "fp8": (-464.0, 464.0)}


def fake_weight(weight: Tensor, scheme: Scheme, scales: Tensor | None = None) -> Tensor:
    """`round_weight(weight, scheme, scales)`, with the gradient of the identity.

    A clipped entry gets no gradient. A zero stays exactly zero; whoever trains with fixed zeros
    masks its gradient, as without rounding. Scales get none. What is not finite becomes NaN.

    Backward looks at `weight` again instead of keeping a tensor: it must not change in between.

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
    values, wide = spread(weight, found, scheme)
    return _clipping(values, wide, scheme.weights).view(weight.shape)


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
    if scale is not None:
        return _clipping(x, scale, scheme.activations)
    dynamic: Any = round_inputs
    if _is_learnt_through(x):
        dynamic = (_Dynamic if torch.compiler.is_compiling() else _DynamicTangents).apply
    rounded: Tensor = dynamic(x, scheme)
    return rounded


def _clipping(values: Tensor, scales: Tensor, kind: str) -> Tensor:
    clipping: Any = _clipped
    if _is_learnt_through(values):
        clipping = (_Clipping if torch.compiler.is_compiling() else _ClippingTangents).apply
    rounded: Tensor = clipping(values, scales, kind)
    return rounded


def _is_learnt_through(values: Tensor) -> bool:
    # A Function that has no gradient to pass cannot be compiled.
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and values.requires_grad


def _clipped(values: Tensor, scales: Tensor, kind: str) -> Tensor:
    rounded = signed_codes(values, scales, kind).mul_(scales).to(values.dtype)
    # Takes the sign off zeros, and makes NaN of infinity, which clipping hid.
    return rounded.add_(values, alpha=-0.0)


class _Dynamic(torch.autograd.Function):
    """Inputs that have a scale a token: nothing is clipped, so that nothing is remembered."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scheme: Scheme) -> Tensor:
        return round_inputs(x, scheme)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _DynamicTangents(_Dynamic):
    """The same with a forward derivative; torch.compile traces no Function that has one."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].clone()


class _Clipping(torch.autograd.Function):
    """Values under scales that may be too small for some of them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, scales: Tensor, kind: str) -> Tensor:
        return _clipped(values, scales, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        values, scales, ctx.kind = inputs
        ctx.save_for_backward(values, scales)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        values, scales = ctx.saved_tensors
        return _passed(grads[0], values, scales, ctx.kind), None, None


class _ClippingTangents(_Clipping):
    """The same with a forward derivative."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Clipping.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        values, scales = ctx.saved_tensors
        return _passed(tangents[0], values, scales, ctx.kind)


def _passed(moved: Tensor, values: Tensor, scales: Tensor, kind: str) -> Tensor:
    """A gradient or a tangent, zero where a value is clipped."""
    low, high = _CLIPPED[kind]
    # NaN is outside too. The operator takes it for inside on some devices.
    scaled = (values.float() / scales).nan_to_num_(nan=torch.inf)
    passed: Tensor = torch.ops.aten.hardtanh_backward(
        moved.float(), scaled, _next_float(low), _next_float(high)
    )
    return passed.to(values.dtype)


def _next_float(limit: float) -> float:
    """The next float32 beyond it: the operator's limits are outside."""
    # A float64 has 29 more bits.
    return limit + math.copysign(math.ulp(limit) * 2**29, limit)
