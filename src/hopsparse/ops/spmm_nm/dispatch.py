"""spmm_nm as torch sees it: one operator with a shape rule and a gradient.

It is for torch.compile, torch.export and autograd. Its dispatch costs more than the launch, so a
call that needs none of them goes past it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...formats.nm import NM
from ...formats.pattern import NMPattern
from .._product import decompress, gather_kept
from .kernel import fold_of
from .reference import apply_activation, spmm_nm


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


def _run(
    parts: Sequence[Tensor],
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: int,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    # Here, because a process on the CPU needs neither a compiler nor a driver.
    from .device import run

    return run(_matrix(parts, out, x), x, bias, residual, activation, alpha, out_dtype)


def _run_on_cpu(
    parts: Sequence[Tensor],
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: int,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """For programs that were exported on a GPU."""
    return spmm_nm(
        _matrix(parts, out, x),
        x,
        bias,
        activation=activation,
        alpha=alpha,
        residual=residual,
        out_dtype=out_dtype,
    )


def _result(
    parts: Sequence[Tensor],
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: int,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out // fold_of(activation)), dtype=out_dtype)


def _matrix(parts: Sequence[Tensor], out: int, x: Tensor) -> NM:
    values, meta = parts
    return NM((out, x.shape[-1]), values, meta, NMPattern(2, 4))


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
    parts, x, bias, residual, out, activation, alpha, _ = inputs
    if activation != "none" or residual is not None:
        raise UnsupportedError(
            f"a gradient through a fused epilogue: {activation}, residual {residual is not None}",
            need="the operator alone, as spmm_nm runs it where there is a gradient to keep",
            hint="spmm_nm, or a program that was exported with inputs that require a gradient",
        )
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
        grad_x = scaled @ decompress(_matrix([values, meta], out, x))
    if needs[0][0]:
        dense = scaled.reshape(-1, out).T @ x.reshape(-1, k)
        (grad_values,) = gather_kept(dense, [values, meta], "nm", out, k, "{'pattern': '2:4'}")
    if has_bias and needs[2]:
        grad_bias = grad.reshape(-1, out).sum(0)
    return [grad_values, None], grad_x, grad_bias, *[None] * 5


# Written out: torch.library.custom_op finds the schema itself, in 3 ms of every import.
LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "spmm_nm(Tensor[] parts, Tensor x, Tensor? bias, Tensor? residual, SymInt out, str activation, "
    "float alpha, ScalarType out_dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.impl("spmm_nm", _run, "CUDA")
LIBRARY.impl("spmm_nm", _run_on_cpu, "CPU")
torch.library.register_fake("hopsparse::spmm_nm", _result, lib=LIBRARY)
torch.library.register_autograd(
    "hopsparse::spmm_nm", _backward, setup_context=_setup_context, lib=LIBRARY
)
_spmm_nm = torch.ops.hopsparse.spmm_nm.default
