"""What the kernels of peer_sum compute, bit for bit, of parts that are all here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def peer_sum(
    parts: Sequence[Tensor],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The sum of all parts, in the order of the ranks, + bias + residual; rounded once.

    In float32, or in float64 where parts have it.

    Args:
        parts: [..., out] of each rank.
        out_dtype: Of the result.
        bias: [out] or None.
        residual: [..., out] or None.

    Returns:
        [..., out].

    Example:
        >>> peer_sum([torch.ones(1, 2), torch.ones(1, 2)], torch.float32, torch.tensor([0.0, 1.0]))
        tensor([[2., 3.]])
    """
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    for more in (bias, residual):
        if more is not None:
            total = total + more.to(wide)
    return total.to(out_dtype)
