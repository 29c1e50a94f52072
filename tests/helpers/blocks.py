"""Small numbers in blocks, and products of them that are exact."""

from __future__ import annotations

import torch
from torch import Tensor

from hopsparse.formats import BSR


def blocked(
    out: int,
    k: int,
    block: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    kept: float = 0.4,
    largest: int = 3,
) -> Tensor:
    """Integers in random blocks; the first block row is full, the second empty."""
    mask = torch.rand(-(-out // block[0]), -(-k // block[1]), device=device) < kept
    mask[0] = True
    mask[1:2] = False
    mask = mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:out, :k]
    return (torch.randint(-largest, largest + 1, (out, k), device=device) * mask).to(dtype)


def two_four_inside(dense: Tensor) -> Tensor:
    """The same with two random columns of each group of four set to zero."""
    rows, cols = dense.shape
    order = torch.rand(rows, -(-cols // 4), 4, device=dense.device).argsort(-1)
    return dense * (order < 2).flatten(1)[:, :cols]


def small(tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randint(-2, 3, (tokens, k), device=device).to(dtype)


def exact_product(x: Tensor, dense: Tensor) -> Tensor:
    """Of small integers: exact in float32, rounded once."""
    assert x.numel() == 0 or x.float().abs().max() * dense.float().abs().max() * x.shape[-1] < 2**24
    return (x.double() @ dense.double().T).to(x.dtype)


def pattern(out: int, k: int, block: int, sparsity: float, seed: int = 0) -> BSR:
    """A weight whose blocks are random, and whose values nobody asks for."""
    torch.manual_seed(seed)
    kept = torch.rand(out // block, k // block) >= sparsity
    row, column = kept.nonzero().unbind(1)
    counts = torch.bincount(row, minlength=out // block)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    values = torch.zeros(1, dtype=torch.bfloat16).expand(len(column), block, block)
    return BSR((out, k), values, column.int(), indptr, (block, block))
