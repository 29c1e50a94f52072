"""y = x @ w.T + bias for a weight in CSR format: checks, plan, run."""

from __future__ import annotations

from torch import Tensor

from ...formats.csr import CSR
from .._product import Plan, planned_product, product_plan
from . import reference


def spmm_csr(w: CSR, x: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply by a compressed-row weight: y = x @ w.T + bias.

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
        >>> w = CSR.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0]]))
        >>> spmm_csr(w, torch.ones(1, 2))
        tensor([[5., 0.]])
    """
    return planned_product(plan(w, x), w, x, bias, kind=CSR, reference=reference.spmm_csr)


def plan(w: CSR, x: Tensor) -> Plan:
    """What `spmm_csr(w, x)` will run."""
    return product_plan("spmm_csr", x)
