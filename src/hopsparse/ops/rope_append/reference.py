"""Rotated queries and keys in torch, step by step as transformers takes them."""

from __future__ import annotations

import torch
from torch import Tensor

#: Weights of the norms of q and k, both or neither.
Norms = tuple[Tensor, Tensor] | None


def rope_append(
    qkv: Tensor,
    turns: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    ends: Tensor,
    norms: Norms,
    eps: float,
) -> Tensor:
    """Queries, and keys and values in their places.

    Args:
        qkv: [batch, tokens, (heads + 2 kv_heads) dim].
        turns: Cosines and sines [batch or 1, tokens, dim].
        cache: Keys and values [batch, kv_heads, room, dim], changed in place.
        ends: int32 [batch].
        norms: Weights, or None.
        eps: Added to the mean square.

    Returns:
        [batch, tokens, heads, dim].
    """
    keys, values = cache
    batch, kv_heads, room, dim = keys.shape
    tokens = qkv.shape[1]
    split = qkv.reshape(batch, tokens, -1, dim).transpose(1, 2)  # [batch, all heads, tokens, dim]
    heads = split.shape[1] - 2 * kv_heads
    q, k, v = torch.split(split, [heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = normalized(q, norms[0], eps), normalized(k, norms[1], eps)
    q, k = rotated(q, turns), rotated(k, turns)
    at = ends.long()[:, None] - tokens + torch.arange(tokens, device=ends.device)
    fits = (at >= 0) & (at < room)
    row, token = fits.nonzero(as_tuple=True)
    where = at[row, token]
    keys[row, :, where] = k.transpose(1, 2)[row, token]
    values[row, :, where] = v.transpose(1, 2)[row, token]
    return q.transpose(1, 2).contiguous()


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the last dimension, rounded before the weight."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Both halves of [batch, heads, tokens, dim], by the places of tokens."""
    cos, sin = (each[:, None] for each in turns)
    lower, upper = x.chunk(2, -1)
    return x * cos + torch.cat([-upper, lower], -1) * sin
