"""What decode and prefill share: the softmax, the scale, and what is refused."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from ..errors import ArgumentError, UnsupportedError
from ._paged import PagedKV, wide


def softmax_product(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(scores) @ values and the LSE; zeros and -inf where every score is -inf.

    Args:
        scores: Wide, [..., queries, n].
        values: Wide, [..., n, dim].
    """
    if scores.shape[-1] == 0:
        nothing = scores.new_full(scores.shape[:-1], -torch.inf)
        return scores.new_zeros((*scores.shape[:-1], values.shape[-1])), nothing
    top = scores.amax(-1, keepdim=True)
    powers = (scores - top.where(top > -torch.inf, 0.0)).exp()
    sums = powers.sum(-1, keepdim=True)
    out = (powers @ values) / sums.where(sums != 0, 1.0)
    return out, (top + sums.log()).squeeze(-1)


def empty_results(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """What attention of q gives, by shape: out and the LSE; the rule of both operators."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide(q.dtype))


def checked_scale(op: str, scale: float | None, dim: int) -> float:
    """The scale of q.k, 1 / sqrt(dim) if None.

    Raises:
        ArgumentError: It is no number.
    """
    if scale is None:
        return 1.0 / math.sqrt(dim)
    if not isinstance(scale, Real) or not math.isfinite(scale):
        raise ArgumentError(f"{op}: scale={scale!r}", need="a number", hint="None: 1 / sqrt(dim)")
    return float(scale)


def refuse_gradients(op: str, q: Tensor, cache: PagedKV) -> None:
    """Refuse to run where a gradient would be lost.

    Raises:
        UnsupportedError: One would.
    """
    tensors = (q, cache.keys, cache.values)
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise UnsupportedError(
            f"{op}: a tensor that requires a gradient",
            need="torch.no_grad(), or tensors that require none",
            hint="torch's scaled_dot_product_attention, to train",
        )
