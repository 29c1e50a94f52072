"""y = x @ w.T + bias for a weight in BSR format: checks, plan, run."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ...formats.bsr import BSR
from .. import Plan, check_product, decompress, product_plan
from . import reference


def spmm_bsr(w: BSR, x: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply by a block-sparse weight: y = x @ w.T + bias.

    Differentiable in x, bias and the kept values; one graph under torch.compile.

    Args:
        w: [out, k], float32, bfloat16 or float16.
        x: [..., k], dtype and device of w, any strides, any number of tokens, also none.
        bias: [out], dtype and device of w, or None.

    Returns:
        [..., out], dtype and device of x.

    Raises:
        ArgumentError: Arguments do not fit each other.
        FormatError: Parts of w have the wrong shape or dtype.
        UnsupportedError: Values are 8-bit.

    Example:
        >>> import torch
        >>> w = BSR.from_dense(torch.block_diag(*torch.ones(2, 16, 16)), (16, 16))
        >>> spmm_bsr(w, torch.ones(1, 32)).unique()
        tensor([16.])
    """
    check_product("spmm_bsr", w, x, bias, kind=BSR)
    if plan(w, x).name == "reference":
        return reference.spmm_bsr(w, x, bias)
    return F.linear(x, decompress(w), bias)


def plan(w: BSR, x: Tensor) -> Plan:
    """What `spmm_bsr(w, x)` will run."""
    return product_plan("spmm_bsr", x)
