"""A layer whose result is added to something, in the launch of its product where a kernel runs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import NM, Quantized
from ..ops.spmm_nm import op as spmm_nm
from ..ops.spmm_nm.kernel import SWIGLU
from ._codes import product_of_codes, put_together, takes_codes
from .sparse_linear import SparseLinear


def plus_residual(layer: SparseLinear, x: Tensor, residual: Tensor) -> Tensor:
    """What `residual + layer(x)` is, in a launch less where the layer has a kernel.

    There the product is not rounded to 16 bits before the sum is.

    Args:
        layer: The layer.
        x: [..., in_features], as the layer takes it.
        residual: [..., out_features].

    Returns:
        [..., out_features].

    Example:
        >>> layer = SparseLinear.from_linear(torch.nn.Linear(8, 2, bias=False), "csr")
        >>> plus_residual(layer, torch.zeros(3, 8), torch.ones(3, 2)).unique()
        tensor([1.])
    """
    form, act = layer._form, layer.act or "none"
    fits = x.is_cuda and act != SWIGLU and not torch.is_autocast_enabled("cuda")
    if fits and (residual.dtype, residual.device) == (x.dtype, x.device):
        fits = residual.shape == (*x.shape[:-1], layer.out_features)
        if fits and isinstance(form, NM) and (y := _of_16_bits(layer, x, residual)) is not None:
            return y
        learns = torch.is_grad_enabled() and residual.requires_grad
        if fits and isinstance(form, Quantized) and takes_codes(form, x, layer.bias) and not learns:
            w = put_together(layer, form)
            return product_of_codes(w, x, layer.bias, layer.act, residual=residual)
    made: Tensor = layer(x)
    return residual + made


def _of_16_bits(layer: SparseLinear, x: Tensor, residual: Tensor) -> Tensor | None:
    """By the kernel; None where the layer runs another product."""
    compiling, bias = torch.compiler.is_compiling(), layer._parameters["bias"]
    packed = layer.matrix if compiling else layer._packed()
    assert isinstance(packed, NM)
    if not spmm_nm.check_operands("linear", packed, x, bias):
        return None
    # Dense was measured to be faster for some token counts: the layer knows.
    asks = not compiling and not layer._dense_counts.never
    if asks and layer._faster_weight(packed, x) is not None:
        return None
    return spmm_nm.run_kernel(packed, x, bias, residual, layer.act or "none")
