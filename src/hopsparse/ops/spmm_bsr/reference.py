"""What spmm_bsr means: the product that all formats share, and its epilogue in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...formats import SparseMatrix
from .._call import apply_activation
from .._product import decompress, product

__all__ = ["apply_activation", "spmm_bsr"]


def spmm_bsr(
    w: SparseMatrix,
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
    plain = activation == "none" and alpha == 1 and residual is None
    if plain and out_dtype == x.dtype:
        return product(dense, x, bias)
    wide = F.linear(x.to(torch.float32), dense.to(torch.float32)) * alpha
    if bias is not None:
        wide = wide + bias.to(torch.float32)
    wide = apply_activation(wide, activation)
    if residual is not None:
        wide = wide + residual.to(torch.float32)
    return wide.to(out_dtype)
