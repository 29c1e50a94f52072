"""Cheap estimates of how much attention lies in each tile of queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ArgumentError
from .._paged import QUERY_DTYPES
from .._product import is_dense, told

_KINDS = ("mean", "antidiagonal")


def score_tiles(
    q: Tensor,
    keys: Tensor,
    *,
    block: int = 64,
    kind: str = "antidiagonal",
    stride: int = 16,
    scale: float | None = None,
) -> Tensor:
    """Estimate the logarithm of the part of attention in each tile, causally.

    The queries are the last tokens of their sequences. "mean" is the score of the mean query and
    the mean key of a tile. "antidiagonal" adds the scores of every stride-th antidiagonal, which
    crosses every column and every diagonal of a tile (XAttention, arXiv:2503.16428), for
    1 / stride of the work of attention. Estimates, not bounds.

    Args:
        q: [batch, heads, tokens, dim], float32, bfloat16 or float16.
        keys: [batch, kv_heads, all tokens, dim].
        block: Tokens of a side of a tile.
        kind: "mean" or "antidiagonal".
        stride: Of antidiagonals, a divisor of the block.
        scale: Of q.k; None: 1 / sqrt(dim).

    Returns:
        float32 [batch, heads, q_blocks, k_blocks]; -inf where no query of a tile sees a key.

    Raises:
        ArgumentError: Arguments do not fit each other.

    Example:
        >>> score = score_tiles(torch.ones(1, 1, 32, 8), torch.ones(1, 1, 32, 8), block=16)
        >>> score.exp().round(decimals=2)[0, 0].tolist()
        [[1.0, 0.0], [0.5, 0.5]]
    """
    _check(q, keys, block, kind, stride)
    batch, heads, tokens, dim = q.shape
    total = keys.shape[2]
    factor = 1.0 / math.sqrt(dim) if scale is None else scale
    step = block if kind == "mean" else stride
    queries, every = q.detach().float(), keys.detach().float()
    queries = queries.view(batch, keys.shape[1], heads // keys.shape[1], tokens, dim)
    if kind == "mean":
        rows, columns = _means(queries, block), _means(every, block)
        scores = rows @ columns[:, :, None].transpose(-1, -2) * factor
    else:
        # The r-th query of a strip meets the key that is r from the end of its strip.
        rows = _strips(queries, stride).flip(-2).flatten(-2)
        columns = _strips(every, stride).flatten(-2)
        scores = rows @ columns[:, :, None].transpose(-1, -2) * (factor / stride)
    last = total - tokens + torch.arange(step - 1, step * scores.shape[-2], step, device=q.device)
    first = torch.arange(0, step * scores.shape[-1], step, device=q.device)
    seen = first <= last.clamp(max=total - 1)[:, None]
    parts = scores.masked_fill(~seen, -torch.inf).softmax(-1).flatten(1, 2)
    there = _tiles(seen.float()[None, None], block // step, tokens, step)[0, 0] > 0
    return _tiles(parts, block // step, tokens, step).log().where(there, -torch.inf)


def _means(x: Tensor, block: int) -> Tensor:
    """Means of `block` neighbours along the last dimension but one; the last may have fewer."""
    tokens = x.shape[-2]
    sums = _strips(x, block).sum(-2)
    first = torch.arange(0, tokens, block, device=x.device)
    return sums / (tokens - first).clamp(max=block)[:, None]


def _strips(x: Tensor, size: int) -> Tensor:
    """[..., tokens, dim] as [..., strips, size, dim], zeros behind the end."""
    *lead, tokens, dim = x.shape
    return F.pad(x, (0, 0, 0, -tokens % size)).view(*lead, -(-tokens // size), size, dim)


def _tiles(parts: Tensor, strips: int, tokens: int, step: int) -> Tensor:
    """Means over the strips of queries of a tile of the sums over its strips of keys."""
    *lead, rows, columns = parts.shape
    padded = F.pad(parts, (0, -columns % strips, 0, -rows % strips))
    down, across = -(-rows // strips), -(-columns // strips)
    sums = padded.view(*lead, down, strips, across, strips).sum((-1, -3))
    first = torch.arange(0, rows, strips, device=parts.device)
    return sums / (-(-tokens // step) - first).clamp(max=strips)[:, None]


def _check(q: Tensor, keys: Tensor, block: int, kind: str, stride: int) -> None:
    if kind not in _KINDS:
        raise ArgumentError(
            f"score_tiles: kind={kind!r}", need="one of " + ", ".join(_KINDS), hint="mean"
        )
    for name, each in (("q", q), ("keys", keys)):
        if not is_dense(each) or each.dim() != 4 or each.dtype not in QUERY_DTYPES:
            raise ArgumentError(
                f"score_tiles: {name} {told(each)}",
                need="[batch, heads, tokens, dim] in float32, bfloat16 or float16",
                hint=f"{name}.float()",
            )
    same = (q.shape[0], q.shape[3]) == (keys.shape[0], keys.shape[3]) and q.device == keys.device
    heads = keys.shape[1] > 0 and q.shape[1] > 0 and q.shape[1] % keys.shape[1] == 0
    if not same or not heads or not 0 < q.shape[2] <= keys.shape[2]:
        raise ArgumentError(
            f"score_tiles: q {told(q)}, keys {told(keys)}",
            need="one batch and dim, heads that are a multiple, and queries that have keys",
            hint="keys of all tokens, those of the queries last",
        )
    if block < 1 or stride < 1 or block % stride:
        raise ArgumentError(
            f"score_tiles: block={block}, stride={stride}",
            need="a block that is a multiple of the stride",
            hint="block=64, stride=16",
        )
