"""Matrices whose structure is known before it is counted."""

from __future__ import annotations

import torch
from torch import Tensor


def banded(side: int, below: int, above: int) -> Tensor:
    """Ones within a band about the main diagonal."""
    offset = torch.arange(side) - torch.arange(side)[:, None]
    return ((offset >= -below) & (offset <= above)).float()


def blocks(grid: tuple[int, int], side: int, share: float, seed: int = 0) -> Tensor:
    """Full blocks of ones, on a grid of which a share is kept."""
    generator = torch.Generator().manual_seed(seed)
    count = round(share * grid[0] * grid[1])
    kept = torch.zeros(grid[0] * grid[1])
    kept[torch.randperm(kept.numel(), generator=generator)[:count]] = 1
    return torch.kron(kept.view(grid), torch.ones(side, side))


def two_four(rows: int, cols: int, seed: int = 0) -> Tensor:
    """Exactly two ones in each group of four."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(rows, cols // 4, 4, generator=generator)
    return (noise.argsort(-1).argsort(-1) < 2).flatten(1).float()


def shuffled_columns(dense: Tensor, seed: int = 1) -> Tensor:
    """The same columns in another order."""
    generator = torch.Generator().manual_seed(seed)
    return dense[:, torch.randperm(dense.shape[1], generator=generator)]


def power_law_rows(rows: int, cols: int) -> Tensor:
    """Row r begins with cols / (r + 1) ones, but at least one: few rows hold most."""
    lengths = (cols // (torch.arange(rows) + 1)).clamp(min=1)
    return (torch.arange(cols) < lengths[:, None]).float()


def scattered(rows: int, cols: int, density: float, seed: int = 0) -> Tensor:
    """Ones at random places."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, cols, generator=generator) < density).float()
