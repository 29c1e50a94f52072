"""What attend_prefill means, in torch: a block of queries at a time, everything in float32."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from .._attention import softmax_product
from .._paged import PagedKV, block_tokens, gather_tokens


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
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    ends = starts.tolist()
    lengths = cache.lengths.tolist()
    for sequence, (first, last) in enumerate(pairwise(ends)):
        own = slice(sequence, sequence + 1)
        pages = replace(cache, table=cache.table[own], lengths=cache.lengths[own])
        before = lengths[sequence] - (last - first)
        for number, begin in enumerate(range(first, last, block)):
            rows = slice(begin, min(begin + block, last))
            place = before + torch.arange(rows.start - first, rows.stop - first, device=q.device)
            if indices is None:
                seen = torch.arange(int(place[-1]) + 1, device=q.device)
                tokens = seen.expand(1, cache.kv_heads, -1)
            else:
                count = None if counts is None else counts[own, :, number]
                tokens = block_tokens(indices[own, :, number], count, block, pages.lengths)
            out[rows], lse[rows] = _block(q[rows], pages, tokens, place, scale)
    return out, lse


def _block(
    q: Tensor, cache: PagedKV, tokens: Tensor, place: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Queries [rows, heads, dim] at `place` of their sequence, over tokens [1, lists, n]."""
    rows, heads, dim = q.shape
    lists = tokens.shape[1]
    wanted = (tokens >= 0) & (tokens <= place[-1])
    keys, values = gather_tokens(cache, tokens, wanted)
    queries = q.float().transpose(0, 1).reshape(lists, heads // lists * rows, dim)
    scores = (queries @ keys[0].transpose(-1, -2)) * scale
    seen = wanted[0][:, None] & (tokens[0][:, None] <= place[:, None])
    scores = scores.view(lists, heads // lists, rows, -1).masked_fill(~seen[:, None], -torch.inf)
    out, lse = softmax_product(scores, values[0][:, None])
    return out.view(heads, rows, dim).transpose(0, 1).to(q.dtype), lse.view(heads, rows).T
