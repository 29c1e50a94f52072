"""Rows of scores that are hard to select from."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("normal", "equal", "few values", "ascending", "descending", "crowded", "subnormal")


def scores_of(kind: str, rows: int, columns: int) -> Tensor:
    """float32 [rows, columns] of one of `KINDS`."""
    steps = torch.arange(rows * columns).view(rows, columns)
    if kind == "normal":
        return torch.randn(rows, columns)
    if kind == "equal":
        return torch.full((rows, columns), -2.5)
    if kind == "few values":
        return torch.randint(-3, 4, (rows, columns)).float()
    if kind == "ascending":
        return torch.linspace(-1, 1, columns).expand(rows, -1).contiguous()
    if kind == "descending":
        return torch.linspace(1, -1, columns).expand(rows, -1).contiguous()
    if kind == "subnormal":
        return (steps % 999 - 499).to(torch.int32).float() * 2.0**-149
    # One in thirteen shares its top 8 bits with the others of them and differs below.
    bits = 0x42800000 + (steps * 7919 % 65_536).to(torch.int32)
    return torch.where(steps % 13 == 5, bits.view(torch.float32), torch.rand(rows, columns))


def float64_top(scores: Tensor, k: int) -> Tensor:
    """The k largest values of each row, as float64, the largest first."""
    return scores.double().sort(1, descending=True).values[:, :k]
