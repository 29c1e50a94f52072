"""What the gradient of attend_prefill means, in torch: a block of queries at a time.

With p = exp(scale q.k - lse), and e the gradient of the LSE:

    dv = p^T dout,  ds = p (dout v^T - rowsum(dout out) + e),  dq = scale ds k,  dk = scale ds^T q.

Tokens that several sequences or lists read get the sum of what each of them gives.
"""

from __future__ import annotations

from torch import Tensor

from .._paged import PagedKV, gather_tokens, places_in_pool, wide
from .reference import QueryBlock, by_list, parts_of_queries

#: Gradients of the output and of the LSE; and q, the output and the LSE.
Given = tuple[Tensor, Tensor]
Kept = tuple[Tensor, Tensor, Tensor]
Lists = tuple[Tensor | None, Tensor | None]


def shift_of(given: Given, kept: Kept) -> Tensor:
    """rowsum(dout out) - e, wide [tokens, heads]: what products with values are shifted by."""
    dtype = wide(kept[0].dtype)
    return (given[0].to(dtype) * kept[1].to(dtype)).sum(-1) - given[1].to(dtype)


def attend_prefill_gradient(
    given: Given,
    kept: Kept,
    starts: Tensor,
    cache: PagedKV,
    lists: Lists,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, keys and values; on any device, but it waits.

    Args:
        given: [tokens, heads, dim] and [tokens, heads].
        kept: What the call was given and gave.
        starts: int32 [batch + 1].
        cache: The pages.
        lists: Indices and counts.
        block: Tokens of a block.
        scale: Of q.k.
    """
    q = kept[0]
    dtype = wide(q.dtype)
    of_q = q.new_zeros(q.shape)  # contiguous, whatever q is
    shape = cache.keys.shape
    pools = [q.new_zeros(shape, dtype=dtype) for _ in range(2)]
    shift = shift_of(given, kept)
    for part in parts_of_queries(starts, cache, lists, block):
        if cache.table.shape[1] == 0 or shape[0] == 0:
            continue
        rows = part.rows
        mine = (q[rows], given[0][rows], kept[2][rows], shift[rows])
        of_q[rows], *of_tokens = _block(mine, part, scale)
        wanted = part.wanted[0]
        page, head, inner = places_in_pool(part.pages, part.tokens, part.wanted)
        at = (page[0][wanted], head[0].expand_as(wanted)[wanted], inner[0][wanted])
        for pool, each in zip(pools, of_tokens, strict=True):
            pool.index_put_(at, each[wanted], accumulate=True)
    return of_q, pools[0].to(cache.keys.dtype), pools[1].to(cache.values.dtype)


def _block(
    mine: tuple[Tensor, Tensor, Tensor, Tensor], part: QueryBlock, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries [rows, heads, dim], and of the tokens of their lists, [lists, n, dim]."""
    rows, heads, dim = mine[0].shape
    lists = part.tokens.shape[1]
    keys, values = (each[0] for each in gather_tokens(part.pages, part.tokens, part.wanted))
    q, grad = (by_list(each, lists) for each in mine[:2])
    lse, shift = (by_list(each[..., None], lists) for each in mine[2:])
    seen = part.seen.repeat(1, heads // lists, 1)
    # A query without a key has an LSE of -inf, and nothing that is seen.
    powers = (q @ keys.transpose(-1, -2) * scale - lse).exp()
    weights = powers.where(seen, 0.0)
    slope = (weights * (grad @ values.transpose(-1, -2) - shift)).where(seen, 0.0) * scale
    of_q = (slope @ keys).view(heads, rows, dim).transpose(0, 1)
    return of_q.to(mine[0].dtype), slope.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad
