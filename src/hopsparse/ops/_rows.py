"""Rows of inputs as TMA reads them: each on 16 bytes."""

from __future__ import annotations

from torch import Tensor


def rows_for_tma(x: Tensor, *, whole: bool = False) -> Tensor:
    """Rows [tokens, k] of x, each on 16 bytes; copied only where they are not that already.

    Args:
        x: [..., k].
        whole: Whether the last 16 bytes of a row are read whole, and its pitch in 32 bits.

    Example:
        >>> import torch
        >>> x = torch.ones(3, 20, dtype=torch.bfloat16)
        >>> rows_for_tma(x).stride(0), rows_for_tma(x[:, :16].contiguous()).stride(0)
        (24, 16)
    """
    rows, atom = x.reshape(-1, x.shape[-1]), 16 // x.itemsize
    tokens, k = rows.shape
    pitch = -(-k // atom) * atom
    aligned = (rows.stride(1) == 1 or k == 1) and rows.data_ptr() % 16 == 0
    apart = whole and (k % atom or rows.stride(0) >= 2**31)
    if aligned and not apart:
        if tokens == 1:
            return rows.as_strided(
                (1, k), (pitch, 1)
            )  # The stride of a single row may be anything.
        if rows.stride(0) % atom == 0 and rows.stride(0) >= k:
            return rows
    return x.new_empty((tokens, pitch))[:, :k].copy_(rows)
