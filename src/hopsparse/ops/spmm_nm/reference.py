"""What spmm_nm means."""

from __future__ import annotations

from torch import Tensor

from ...formats.nm import NM
from .. import decompress, product


def spmm_nm(w: NM, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product y = x @ w.T + bias, accumulated in float32.

    Args:
        w: [out, k].
        x: [..., k], any strides, on any device.
        bias: [out] or None.

    Returns:
        [..., out] in the dtype of x.
    """
    return product(decompress(w), x, bias)
