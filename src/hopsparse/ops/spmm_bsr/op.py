"""y = x @ w.T + bias for a weight in BSR format: checks, plan, run."""

from __future__ import annotations

from torch import Tensor

from ...formats.bsr import BSR
from .._product import Plan, planned_product, product_plan
from . import reference


def spmm_bsr(w: BSR, x: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply by a block-sparse weight: y = x @ w.T + bias.

    Differentiable in x, bias and the kept values; one graph under torch.compile. There is no kernel
    yet: every call decodes w. `SparseLinear` decodes once.

    Args:
        w: [out, k], float32, bfloat16 or float16.
        x: [..., k], dtype and device of w, any strides, any number of tokens, also none.
        bias: [out], dtype and device of w, or None.

    Returns:
        [..., out], dtype and device of x.

    Raises:
        ArgumentError: Arguments do not fit each other.
        FormatError: Parts of w have the wrong shape or dtype.
        UnsupportedError: Values are 8-bit, or a CUDA graph is being captured and decoding w would
            stop it.

    Example:
        >>> import torch
        >>> w = BSR.from_dense(torch.block_diag(*torch.ones(2, 16, 16)), (16, 16))
        >>> spmm_bsr(w, torch.ones(1, 32)).unique()
        tensor([16.])
    """
    return planned_product(plan(w, x), w, x, bias, kind=BSR, reference=reference.spmm_bsr)


def plan(w: BSR, x: Tensor) -> Plan:
    """What `spmm_bsr(w, x)` will run."""
    return product_plan("spmm_bsr", x)
