"""Rows of q, k and v, turns and a cache for `rope_append`, and what transformers makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hopsparse.ops.rope_append import rope_append

SENTINEL = 7.0


@dataclass
class Problem:
    """Arguments of a call."""

    qkv: Tensor
    turns: tuple[Tensor, Tensor]
    cache: tuple[Tensor, Tensor]
    ends: Tensor
    norms: tuple[Tensor, Tensor] | None

    def run(self) -> Tensor:
        return rope_append(self.qkv, self.turns, self.cache, self.ends, norms=self.norms, eps=1e-5)

    def copied(self) -> Problem:
        keys, values = (each.clone() for each in self.cache)
        return replace(self, cache=(keys, values))


def problem(
    heads: tuple[int, int],
    dim: int,
    ends: list[int],
    tokens: int,
    *,
    room: int = 32,
    norm: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Problem:
    """Normal numbers; every place of the cache holds a sentinel."""
    count, kv_heads = heads
    batch = len(ends)
    qkv = torch.randn(batch, tokens, (count + 2 * kv_heads) * dim)
    frequencies = 10000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    at = torch.tensor(ends)[:, None] - tokens + torch.arange(tokens)
    angles = (at[..., None] * frequencies).repeat(1, 1, 2)
    keys, values = torch.full((2, batch, kv_heads, room, dim), SENTINEL)
    weights = (torch.randn(dim) + 1, torch.randn(dim) + 1) if norm else None

    def put(each: Tensor) -> Tensor:
        return each.to(device, dtype)

    return Problem(
        put(qkv),
        (put(angles.cos()), put(angles.sin())),
        (put(keys), put(values)),
        torch.tensor(ends, dtype=torch.int32, device=device),
        None if weights is None else (put(weights[0]), put(weights[1])),
    )


def by_transformers(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [batch, heads, tokens, dim], by its own functions."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    batch, tokens, _ = p.qkv.shape
    _, kv_heads, _, dim = p.cache[0].shape
    rows = p.qkv.view(batch, tokens, -1, dim)
    q, k, v = rows.split([rows.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
    if p.norms is not None:
        made = []
        for each, weight in zip((q, k), p.norms, strict=True):
            norm = Qwen3RMSNorm(dim, eps=1e-5).to(each.device, each.dtype)
            norm.weight.data.copy_(weight)
            made.append(norm(each).detach())
        q, k = made
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    q, k = apply_rotary_pos_emb(q, k, *p.turns)
    return q, k, v


def assert_right(p: Problem, before: tuple[Tensor, Tensor], q: Tensor) -> None:
    """Against transformers: bit for bit without norms, to two roundings with them."""
    right_q, right_k, right_v = by_transformers(p)
    close = {"atol": 0.0, "rtol": 0.0} if p.norms is None else {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(q.transpose(1, 2), right_q, **close)
    tokens, room = p.qkv.shape[1], p.cache[0].shape[2]
    for b, end in enumerate(p.ends.tolist()):
        for pool, old, right, bound in (
            (p.cache[0], before[0], right_k, close),
            (p.cache[1], before[1], right_v, {"atol": 0.0, "rtol": 0.0}),
        ):
            wanted = old[b].clone()
            for t, at in enumerate(range(end - tokens, end)):
                if 0 <= at < room:
                    wanted[:, at] = right[b, :, t]
            torch.testing.assert_close(pool[b], wanted, **bound)
