"""Trials that the products y = act(alpha x @ w.T + bias) + residual share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..measure.error import finish_bound, product_bound
from .check import Expected, Trial
from .inputs import small_integers, wide_integers

Run = Callable[..., Tensor]


def exact_trial(run: Run, x: Tensor, dense: Tensor, bias: Tensor | None = None) -> Trial:
    """Small integers, whose sums no order of adding rounds; the result is rounded once.

    Args:
        run: Called with x and bias.
        x: [tokens, k] of integers, where the product runs.
        dense: [out, k] of integers, there.
        bias: [out] of integers or None.
    """
    right = wide_integers(x, dense)
    if bias is not None:
        right = right + bias.double()
    return Trial(lambda: run(x, bias=bias), [Expected(right.to(x.dtype).double(), x.dtype)])


def bounded_trial(run: Run, x: Tensor, dense: Tensor, bias: Tensor | None = None) -> Trial:
    """Any numbers, within what float32 sums and one rounding allow of float64."""
    right = x.double() @ dense.double().T
    if bias is not None:
        right = right + bias.double()
    slack = product_bound(x, dense, torch.float32, x.dtype, bias)
    return Trial(lambda: run(x, bias=bias), [Expected(right, x.dtype, slack)])


def epilogue_trial(
    run: Run, x: Tensor, dense: Tensor, act: str, out_dtype: torch.dtype, apply: Run
) -> Trial:
    """All of an epilogue behind an exact sum.

    Args:
        run: Called with x, and the epilogue by name.
        x: [tokens, k] of integers.
        dense: [out, k] of integers.
        act: Name of an activation, or "none".
        out_dtype: Of the result.
        apply: Applies an activation in float64.
    """
    tokens, out = len(x), len(dense)
    bias = torch.randn(out).to(x.device, x.dtype)
    # One number into its storage, so that it does not start on 16 bytes.
    residual = torch.randn(tokens * out + 1).to(x.device, out_dtype)[1:].view(tokens, out)
    sums = 0.125 * wide_integers(x, dense) + bias.double()
    right = apply(sums, act) + residual.double()
    slack = finish_bound(sums.abs(), right, residual, out_dtype)
    words = {"act": None if act == "none" else act, "alpha": 0.125, "out_dtype": out_dtype}
    return Trial(
        lambda: run(x, bias=bias, residual=residual, **words), [Expected(right, out_dtype, slack)]
    )


def strided(k: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """X [tokens, k] of integers as views: transposed, cut out, repeated, off 16 bytes."""
    source = small_integers((2 * k + 3, 3 * k), dtype, 1).to(device)
    yield source[:k, :9].T
    yield source[:7, k + 1 : 2 * k + 1]
    yield source[:1, :k].expand(5, k)
    yield source.flatten()[13 : 13 + 4 * k].view(4, k)
