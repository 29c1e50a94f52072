"""spmm_nm as torch sees it: one operator with a shape rule and a gradient, and a way past it.

The operator is for torch.compile, torch.export and autograd. Its dispatch costs more than the
launch, so a call that needs none of them goes straight to the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._product import gather_kept
from . import device
from .kernel import Config
from .reference import apply_activation, decode


def spmm_nm_kernel(
    values: Tensor,
    meta: Tensor,
    x: Tensor,
    out: int,
    epilogue: device.Epilogue,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    config: Config | None = None,
) -> Tensor:
    """The kernel, by the shortest way that what surrounds the call allows.

    Args:
        values: As `NM.values` of a 2:4 matrix, bfloat16 or float16.
        meta: As `NM.meta`.
        x: [..., k] on a Hopper GPU, dtype of the values, any strides.
        out: Rows of w.
        epilogue: What happens to the sums.
        bias: [out], dtype of x, or None.
        residual: As the result, or None.
        alpha: What the sums are multiplied by.
        config: The tile, for direct calls; None chooses one.

    Returns:
        [..., out], contiguous, in the dtype of the epilogue.
    """
    if _is_plain(values, x, bias, residual):
        return device.run(
            values,
            meta,
            x,
            out,
            epilogue,
            bias=bias,
            residual=residual,
            alpha=alpha,
            config=config,
        )
    has_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (values, x, bias, residual)
    )
    if not has_gradient:
        fused: Tensor = _spmm_nm(
            values, meta, x, bias, residual, out, epilogue.activation, alpha, epilogue.out_dtype
        )
        return fused
    # The gradient of an activation needs what it was applied to.
    y: Tensor = _spmm_nm(values, meta, x, bias, None, out, "none", alpha, epilogue.out_dtype)
    y = apply_activation(y, epilogue.activation)
    return y if residual is None else y + residual


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are tensors alone: nothing traced, no gradient to keep, no subclass."""
    if torch.compiler.is_compiling():
        return False
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in (Tensor, torch.nn.Parameter) or (grad and tensor.requires_grad):
            return False
    return True


@torch.library.custom_op("hopsparse::spmm_nm", mutates_args=())
def _spmm_nm(
    values: Tensor,
    meta: Tensor,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: int,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    epilogue = device.Epilogue(out_dtype, activation, residual is not None)
    return device.run(values, meta, x, out, epilogue, bias=bias, residual=residual, alpha=alpha)


@_spmm_nm.register_fake
def _(
    values: Tensor,
    meta: Tensor,
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
    values, meta, x, bias, residual, out, activation, alpha, _ = inputs
    if activation != "none" or residual is not None:
        raise RuntimeError("gradients of a fused epilogue: spmm_nm_kernel takes it apart")
    ctx.save_for_backward(values, meta, x)
    ctx.facts = (out, alpha, bias is not None)  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[object, ...]:
    values, meta, x = ctx.saved_tensors  # type: ignore[attr-defined]
    out, alpha, has_bias = ctx.facts  # type: ignore[attr-defined]
    needs = ctx.needs_input_grad  # type: ignore[attr-defined]
    k = x.shape[-1]
    grad = grad.to(x.dtype)
    scaled = grad if alpha == 1.0 else grad * alpha
    grad_values = grad_x = grad_bias = None
    if needs[2]:
        grad_x = scaled @ decode(values, meta, (out, k))
    if needs[0]:
        dense = scaled.reshape(-1, out).T @ x.reshape(-1, k)
        (grad_values,) = gather_kept(dense, [values, meta], "nm", out, k, "{'pattern': '2:4'}")
    if has_bias and needs[3]:
        grad_bias = grad.reshape(-1, out).sum(0)
    return grad_values, None, grad_x, grad_bias, *[None] * 5


_spmm_nm.register_autograd(_backward, setup_context=_setup_context)
