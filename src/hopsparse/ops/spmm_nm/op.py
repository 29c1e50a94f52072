"""y = x @ w.T + bias for a weight in NM format: checks, plan, run."""

from __future__ import annotations

from torch import Tensor

from ...formats.nm import NM
from .._product import Plan, planned_product, product_plan
from . import reference


def spmm_nm(w: NM, x: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply by a 2:4 (or other N:M) weight: y = x @ w.T + bias.

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
        >>> w = NM.from_dense(torch.tensor([[1.0, 0.0, 0.0, 2.0]]))
        >>> spmm_nm(w, torch.ones(3, 4))
        tensor([[3.],
                [3.],
                [3.]])
    """
    return planned_product(plan(w, x), w, x, bias, kind=NM, reference=reference.spmm_nm)


def plan(w: NM, x: Tensor) -> Plan:
    """What `spmm_nm(w, x)` will run."""
    return product_plan("spmm_nm", x)
