"""What attend_decode means, in torch: chosen keys are gathered, everything is float32."""

from __future__ import annotations

import torch
from torch import Tensor

from .._attention import softmax_product
from .._paged import PagedKV, block_tokens, gather_tokens


def attend_decode(
    q: Tensor,
    cache: PagedKV,
    indices: Tensor | None,
    counts: Tensor | None,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and natural-log LSE of arguments that were checked; on any device.

    Args:
        q: [batch, heads, dim].
        cache: The pages.
        indices: int32 [batch, kv_heads, most] or None: all tokens.
        counts: int32 [batch, kv_heads] or None.
        block: Tokens of a block.
        scale: Of q.k.
    """
    batch, heads, dim = q.shape
    group = heads // cache.kv_heads
    if indices is None:
        every = torch.arange(cache.capacity, device=q.device)
        positions = every.where(every < cache.lengths.long()[:, None], -1)
        positions = positions[:, None].expand(batch, cache.kv_heads, -1)
    else:
        positions = block_tokens(indices, counts, block, cache.lengths)
    wanted = positions >= 0
    keys, values = gather_tokens(cache, positions, wanted)
    queries = q.float().view(batch, cache.kv_heads, group, dim)
    scores = (queries @ keys.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~wanted[:, :, None], -torch.inf)
    out, lse = softmax_product(scores, values)
    return out.reshape(batch, heads, dim).to(q.dtype), lse.reshape(batch, heads)
