"""spmm_nm as torch sees it: one operator with a shape rule and a gradient.

It is for torch.compile, torch.export and autograd. Its dispatch costs more than the launch, so a
call that needs none of them goes past it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...formats.nm import NM
from ...formats.pattern import NMPattern
from .._product import gather_kept
from . import device
from .reference import apply_activation, decode


def traced(
    w: NM,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """The kernel as a node of a graph; arguments as for `device.run`, where gradients may flow."""
    parts, out = [w.values, w.meta], w.shape[0]
    has_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (w.values, x, bias, residual)
    )
    if not has_gradient:
        fused: Tensor = _spmm_nm(parts, x, bias, residual, out, activation, alpha, out_dtype)
        return fused
    # The gradient of an activation needs what it was applied to.
    y: Tensor = _spmm_nm(parts, x, bias, None, out, "none", alpha, out_dtype)
    y = apply_activation(y, activation)
    return y if residual is None else y + residual


@torch.library.custom_op("hopsparse::spmm_nm", mutates_args=())
def _spmm_nm(
    parts: Sequence[Tensor],
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: int,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    values, meta = parts
    w = NM((out, x.shape[-1]), values, meta, NMPattern(2, 4))
    return device.run(w, x, bias, residual, activation, alpha, out_dtype)


@_spmm_nm.register_fake
def _(
    parts: Sequence[Tensor],
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: int,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out), dtype=out_dtype)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
    parts, x, bias, residual, out, activation, alpha, _ = inputs
    if activation != "none" or residual is not None:
        raise RuntimeError("gradients of a fused epilogue: `traced` takes it apart")
    ctx.save_for_backward(*parts, x)
    ctx.facts = (out, alpha, bias is not None)  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[object, ...]:
    values, meta, x = ctx.saved_tensors  # type: ignore[attr-defined]
    out, alpha, has_bias = ctx.facts  # type: ignore[attr-defined]
    needs = ctx.needs_input_grad  # type: ignore[attr-defined]
    k = x.shape[-1]
    grad = grad.to(x.dtype)
    scaled = grad if alpha == 1.0 else grad * alpha
    grad_values = grad_x = grad_bias = None
    if needs[1]:
        grad_x = scaled @ decode(values, meta, (out, k))
    if needs[0][0]:
        dense = scaled.reshape(-1, out).T @ x.reshape(-1, k)
        (grad_values,) = gather_kept(dense, [values, meta], "nm", out, k, "{'pattern': '2:4'}")
    if has_bias and needs[2]:
        grad_bias = grad.reshape(-1, out).sum(0)
    return [grad_values, None], grad_x, grad_bias, *[None] * 5


_spmm_nm.register_autograd(_backward, setup_context=_setup_context)
