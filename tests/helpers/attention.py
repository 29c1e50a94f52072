"""Attention one key at a time in float64, and caches in pages to try it on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hopsparse.measure.softmax_error import attention_bounds, score_size
from hopsparse.ops import PagedKV

#: Query heads for each head of keys.
GROUPS = (1, 3, 4, 5, 6, 7, 8, 12, 16)


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page: int = 16

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.dim)


def tokens_of(
    shape: Shape, lengths: list[int], dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    """Random keys and values [kv_heads, length, dim] of each sequence."""
    sizes = [(shape.kv_heads, length, shape.dim) for length in lengths]
    return [(torch.randn(size).to(dtype), torch.randn(size).to(dtype)) for size in sizes]


def paged(
    shape: Shape, sequences: list[tuple[Tensor, Tensor]], *, order: Tensor | None = None
) -> PagedKV:
    """The sequences in pages, in a random order, among pages and entries that hold NaN."""
    lengths = [keys.shape[1] for keys, _ in sequences]
    wide = max(-(-max(lengths) // shape.page), 1)
    count = len(sequences) * wide + 3
    order = torch.randperm(count) if order is None else order
    dtype = sequences[0][0].dtype
    size = (count, shape.kv_heads, shape.page, shape.dim)
    pools = [torch.full(size, float("nan")).to(dtype) for _ in range(2)]
    table = torch.full((len(sequences), wide), 2**31 - 1, dtype=torch.int32)
    for row, pair in enumerate(sequences):
        for column, first in enumerate(range(0, lengths[row], shape.page)):
            page = int(order[row * wide + column])
            table[row, column] = page
            for pool, tokens in zip(pools, pair, strict=True):
                part = tokens[:, first : first + shape.page]
                pool[page, :, : part.shape[1]] = part
    return PagedKV(pools[0], pools[1], table, torch.tensor(lengths, dtype=torch.int32))


def listed(blocks: list[int], block: int, length: int) -> list[int]:
    """Token positions of blocks; negative blocks are none."""
    positions = [b * block + t for b in blocks if b >= 0 for t in range(block)]
    return [position for position in positions if position < length]


def assert_attention(
    got: tuple[Tensor, Tensor], q: Tensor, keys: Tensor, values: Tensor, scale: float
) -> None:
    """One query [dim] over keys [n, dim]: within what float32 allows of float64, or empty."""
    out, lse = got
    if keys.shape[0] == 0:
        assert (out == 0).all()
        assert lse == -math.inf
        return
    scores = keys.double() @ q.double() * scale
    weights, exact = scores.softmax(0), scores.logsumexp(0)
    size = score_size(q[None], keys, scale)[0]
    bounds = attention_bounds(size, weights, values.double(), exact, out.dtype)
    assert ((out.double() - weights @ values.double()).abs() <= bounds[0]).all()
    assert (lse.double() - exact).abs() <= bounds[1]
