"""What spmm_nm means: the product that all formats share, and its epilogue in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...formats.nm import NM
from .._product import decompress, product

__all__ = ["apply_activation", "spmm_nm"]


def apply_activation(y: Tensor, activation: str) -> Tensor:
    """One of `none`, `relu`, `gelu` (erf), `gelu_tanh`, `silu`, in the precision of `y`.

    `swiglu` makes silu(gate) * up of eight columns of gate, then eight of up: half as many.
    """
    if activation == "relu":
        return F.relu(y)
    if activation == "gelu":
        return F.gelu(y)
    if activation == "gelu_tanh":
        return F.gelu(y, approximate="tanh")
    if activation == "silu":
        return F.silu(y)
    if activation == "swiglu":
        gate, up = y.reshape(*y.shape[:-1], y.shape[-1] // 16, 2, 8).unbind(-2)
        return (F.silu(gate) * up).flatten(-2)
    return y


def spmm_nm(
    w: NM,
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    alpha: float = 1,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Y = act(alpha * x @ w.T + bias) + residual; sums and epilogue in float32, rounded once."""
    dense, out_dtype = decompress(w), out_dtype or x.dtype
    plain = activation == "none" and alpha == 1.0 and residual is None
    if plain and out_dtype == x.dtype:
        return product(dense, x, bias)
    wide = F.linear(x.to(torch.float32), dense.to(torch.float32)) * alpha
    if bias is not None:
        wide = wide + bias.to(torch.float32)
    wide = apply_activation(wide, activation)
    if residual is not None:
        wide = wide + residual.to(torch.float32)
    return wide.to(out_dtype)
