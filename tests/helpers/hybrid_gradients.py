"""Gradients that are hard to choose from and to round, and what must come out bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = (
    "normal",
    "few values",
    "zeros",
    "sparse",
    "equal",
    "nan",
    "infinity",
    "tiny",
    "huge",
    "overflow",
    "one block",
)


def gradient_of(kind: str, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A gradient, and the residual that makes it what its kind says; None: any will do."""
    values, residual = torch.randn(n) * 0.01, None
    if kind == "few values":
        values = torch.randint(-3, 4, (n,)).float()
    elif kind == "zeros":
        values = torch.where(torch.rand(n) < 0.5, 0.0, -0.0)
    elif kind == "sparse":
        values = values * (torch.rand(n) < 0.0005)
    elif kind == "equal":
        values = torch.full((n,), -2.5)
    elif kind == "nan":
        values[n // 2] = torch.nan
    elif kind == "infinity":
        values[-1] = -torch.inf
    elif kind == "tiny":
        values, residual = values * 1e-40, torch.randn(n) * 1e-41
    elif kind == "huge":
        values, residual = values.sign() * 6e4, torch.randn(n).clamp(-3, 3) * 1.1e38
    elif kind == "overflow":
        values, residual = torch.full((n,), 3e38), torch.full((n,), 3e38)
    elif kind == "one block":
        values[n // 3 : n // 3 + 64] *= 1000
    return values.to(dtype), residual


def differing(got: Sequence[Tensor], wanted: Sequence[Tensor], names: Sequence[str]) -> list[str]:
    """Which results are not the same bit by bit."""
    return [
        name
        for name, one, two in zip(names, got, wanted, strict=True)
        if one.shape != two.shape or not torch.equal(_bits(one), _bits(two))
    ]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)
