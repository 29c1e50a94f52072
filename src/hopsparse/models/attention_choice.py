"""Which blocks a query attends to, as an AttentionConfig says."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import (
    BlockBudget,
    KeyBlocks,
    append_keys,
    block_masses,
    score_tiles,
    select,
    select_blocks,
    select_certified,
)
from .attention_config import AttentionConfig


def key_blocks(keys: Tensor, page: int) -> KeyBlocks:
    """What is kept of keys [batch, kv_heads, tokens, dim], all of them there."""
    batch, heads, tokens, dim = keys.shape
    shape = (batch, heads, -(-tokens // page), dim)
    blocks = KeyBlocks.empty(shape, block=page, dtype=keys.dtype, device=keys.device)
    starts = torch.zeros(batch, dtype=torch.int32, device=keys.device)
    append_keys(blocks, keys.transpose(1, 2), starts)
    return blocks


def choose(
    config: AttentionConfig,
    q: Tensor,
    blocks: KeyBlocks,
    lengths: Tensor,
    scale: float,
    newest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks for one query of each sequence.

    Args:
        config: How.
        q: [batch, heads, dim].
        blocks: Of the keys.
        lengths: int32 [batch].
        scale: Of q.k.
        newest: [batch, 1, kv_heads, dim]: keys that the blocks do not know yet, taken in; or None.

    Returns:
        indices [batch, kv_heads, most] and counts [batch, kv_heads], as `select` returns them.
    """
    forced = {"sink": config.sink, "recent": config.recent}
    if config.mode == "certified":
        if newest is not None:
            append_keys(blocks, newest, lengths - 1)
        masses = block_masses(q, blocks, lengths, scale=scale)
        most = config.blocks
        indices, counts, _ = select_certified(
            masses, config.epsilon, kv_heads=blocks.low.shape[1], most=most, **forced
        )
        return indices, counts
    top_p = config.top_p if config.mode == "top-p" else None
    budget = BlockBudget(config.blocks, top_p=top_p, **forced)
    kind = config.score
    return select_blocks(q, blocks, lengths, budget, kind=kind, scale=scale, keys=newest)


def choose_tiles(
    config: AttentionConfig, q: Tensor, keys: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Blocks for every block of queries, which are the last tokens.

    There are no bounds for a block of queries: "certified" takes the whole budget.

    Args:
        config: How.
        q: [batch, heads, tokens, dim].
        keys: [batch, kv_heads, all tokens, dim].
        scale: Of q.k.

    Returns:
        indices [batch, heads, q_blocks, most] and counts, for `attend_prefill`.
    """
    page, tokens, total = config.page, q.shape[2], keys.shape[2]
    scores = score_tiles(q, keys, block=page, scale=scale)
    last = total - tokens + torch.arange(page, tokens + page, page, device=q.device)
    seen = (last.clamp(max=total) + page - 1) // page
    lengths = seen.int().expand(scores.shape[:3]).contiguous()
    # The diagonal of a block of queries that starts inside a block of keys lies in two of them.
    recent = config.recent + ((total - tokens) % page != 0)
    top_p = config.top_p if config.mode == "top-p" else None
    most = min(max(config.blocks, recent), scores.shape[3])
    return select(scores, most, lengths=lengths, top_p=top_p, sink=config.sink, recent=recent)
