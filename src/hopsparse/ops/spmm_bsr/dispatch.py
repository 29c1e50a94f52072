"""spmm_bsr as torch sees it: one operator with a shape rule and a gradient.

It is for torch.compile, torch.export and autograd; a call that needs none of them goes past it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...formats.bsr import BSR
from .reference import apply_activation, spmm_bsr
from .sddmm import sddmm_bsr as sddmm_bsr  # defines the operator that a gradient calls


def traced(
    w: BSR,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """The kernel as a node of a graph; arguments as for `device.run`, where gradients may flow."""
    parts, sides = [w.values, w.indices, w.indptr], [w.shape[0], *w.block]
    has_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (w.values, x, bias, residual)
    )
    if not has_gradient:
        fused: Tensor = _spmm_bsr(parts, x, bias, residual, sides, activation, alpha, out_dtype)
        return fused
    # The gradient of an activation needs what it was applied to.
    y: Tensor = _spmm_bsr(parts, x, bias, None, sides, "none", alpha, out_dtype)
    y = apply_activation(y, activation)
    return y if residual is None else y + residual


def _run(
    parts: Sequence[Tensor],
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    sides: Sequence[int],
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    # Here, because a process on the CPU needs neither a compiler nor a driver.
    from .device import run

    return run(_matrix(parts, sides, x), x, bias, residual, activation, alpha, out_dtype)


def _run_on_cpu(
    parts: Sequence[Tensor],
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    sides: Sequence[int],
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """For programs that were exported on a GPU."""
    return spmm_bsr(
        _matrix(parts, sides, x),
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
    sides: Sequence[int],
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], sides[0]), dtype=out_dtype)


def _matrix(parts: Sequence[Tensor], sides: Sequence[int], x: Tensor) -> BSR:
    """Sides are the rows of the matrix, and the rows and columns of a block."""
    (values, indices, indptr), (out, height, width) = parts, sides
    return BSR((out, x.shape[-1]), values, indices, indptr, (height, width))


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
    parts, x, bias, residual, sides, activation, alpha, _ = inputs
    if activation != "none" or residual is not None:
        raise UnsupportedError(
            f"a gradient through a fused epilogue: {activation}, residual {residual is not None}",
            need="the operator alone, as spmm_bsr runs it where there is a gradient to keep",
            hint="spmm_bsr, or a program that was exported with inputs that require a gradient",
        )
    ctx.save_for_backward(*parts, x)
    ctx.facts = (tuple(sides), alpha, bias is not None)  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[object, ...]:
    *parts, x = ctx.saved_tensors  # type: ignore[attr-defined]
    sides, alpha, has_bias = ctx.facts  # type: ignore[attr-defined]
    needs, k, out = ctx.needs_input_grad, x.shape[-1], sides[0]  # type: ignore[attr-defined]
    # The number of blocks, which may be a symbol while this is traced, is that of the parts.
    facts = ("bsr", out, k, f"{{'block': '{sides[1]}x{sides[2]}'}}")
    grad = grad.to(x.dtype)
    scaled = grad if alpha == 1.0 else grad * alpha
    grad_values = grad_x = grad_bias = None
    if needs[1]:
        grad_x = scaled @ torch.ops.hopsparse.decompress.default(parts, *facts)
    if needs[0][0]:
        values, *places = parts
        a, b = scaled.reshape(-1, out).T, x.reshape(-1, k).T
        found = torch.ops.hopsparse.sddmm_bsr.default(a, b, *places, [out, k, *sides[1:]])
        # Zeros stay zero, so their gradient is zero.
        grad_values = torch.where(values != 0, found, 0)
    if has_bias and needs[2]:
        grad_bias = grad.reshape(-1, out).sum(0)
    return [grad_values, None, None], grad_x, grad_bias, *[None] * 5


# Written out: torch.library.custom_op finds the schema itself, in 3 ms of every import.
LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "spmm_bsr(Tensor[] parts, Tensor x, Tensor? bias, Tensor? residual, int[] sides, "
    "str activation, float alpha, ScalarType out_dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.impl("spmm_bsr", _run, "CUDA")
LIBRARY.impl("spmm_bsr", _run_on_cpu, "CPU")
torch.library.register_fake("hopsparse::spmm_bsr", _result, lib=LIBRARY)
torch.library.register_autograd(
    "hopsparse::spmm_bsr", _backward, setup_context=_setup_context, lib=LIBRARY
)
_spmm_bsr = torch.ops.hopsparse.spmm_bsr.default
