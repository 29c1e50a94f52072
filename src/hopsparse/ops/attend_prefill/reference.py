"""What attend_prefill means, in torch: a block of queries at a time, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from .._attention import softmax_product
from .._paged import PagedKV, block_tokens, gather_tokens, wide


def attend_prefill(
    q: Tensor,
    starts: Tensor,
    cache: PagedKV,
    indices: Tensor | None,
    counts: Tensor | None,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and natural-log LSE of arguments that were checked; on any device, but it waits.

    Args:
        q: [tokens, heads, dim].
        starts: int32 [batch + 1].
        cache: The pages.
        indices: int32 [batch, lists, q_blocks, most] or None: all tokens.
        counts: int32 [batch, lists, q_blocks] or None.
        block: Tokens of a block.
        scale: Of q.k.
    """
    out = q.new_zeros(q.shape)  # contiguous, whatever q is
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide(q.dtype))
    for part in parts_of_queries(starts, cache, (indices, counts), block):
        out[part.rows], lse[part.rows] = _block(q[part.rows], part, scale)
    return out, lse


@dataclass(frozen=True)
class QueryBlock:
    """Queries that share their lists.

    Attributes:
        rows: Of q.
        place: int64 [rows], in their sequence.
        tokens: int64 [1, lists, n]: what they attend to, before causality; -1 is none.
        wanted: bool, as tokens: what any of them sees.
        pages: The cache of their sequence alone.
    """

    rows: slice
    place: Tensor
    tokens: Tensor
    wanted: Tensor
    pages: PagedKV

    @property
    def seen(self) -> Tensor:
        """Bool [lists, rows, n]."""
        return self.wanted[0][:, None] & (self.tokens[0][:, None] <= self.place[:, None])


def parts_of_queries(
    starts: Tensor, cache: PagedKV, lists: tuple[Tensor | None, Tensor | None], block: int
) -> Iterator[QueryBlock]:
    """Every block of queries of every sequence, with the tokens of its lists; waits for a GPU."""
    indices, counts = lists
    ends = starts.tolist()
    lengths = cache.lengths.tolist()
    for sequence, (first, last) in enumerate(pairwise(ends)):
        own = slice(sequence, sequence + 1)
        pages = replace(cache, table=cache.table[own], lengths=cache.lengths[own])
        before = lengths[sequence] - (last - first)
        for number, begin in enumerate(range(first, last, block)):
            rows = slice(begin, min(begin + block, last))
            place = before + torch.arange(
                rows.start - first, rows.stop - first, device=starts.device
            )
            if indices is None:
                seen = torch.arange(int(place[-1]) + 1, device=starts.device)
                tokens = seen.expand(1, cache.kv_heads, -1)
            else:
                count = None if counts is None else counts[own, :, number]
                tokens = block_tokens(indices[own, :, number], count, block, pages.lengths)
            wanted = (tokens >= 0) & (tokens <= place[-1])
            yield QueryBlock(rows, place, tokens, wanted, pages)


def by_list(x: Tensor, lists: int) -> Tensor:
    """Wide [lists, heads of a list * rows, dim] of [rows, heads, dim]."""
    rows, heads, dim = x.shape
    return x.to(wide(x.dtype)).transpose(0, 1).reshape(lists, heads // lists * rows, dim)


def _block(q: Tensor, part: QueryBlock, scale: float) -> tuple[Tensor, Tensor]:
    """Queries [rows, heads, dim] over the tokens of their lists."""
    rows, heads, dim = q.shape
    lists = part.tokens.shape[1]
    keys, values = gather_tokens(part.pages, part.tokens, part.wanted)
    scores = (by_list(q, lists) @ keys[0].transpose(-1, -2)) * scale
    scores = scores.view(lists, heads // lists, rows, -1)
    scores = scores.masked_fill(~part.seen[:, None], -torch.inf)
    out, lse = softmax_product(scores, values[0][:, None])
    return out.view(heads, rows, dim).transpose(0, 1).to(q.dtype), lse.view(heads, rows).T
