"""The gradient of attend_prefill in Triton: one kernel for q, one for keys and values.

That of q walks lists as the forward does. That of keys and values has a program for some tokens of
a page: it walks the sequences that read the page, and for each the queries whose lists name the
block, by the lists the other way round (transposed.py). Its sums stay in registers and are rounded
once, so that no addition is atomic and two runs have the same bits, also where sequences share
pages. Weights are computed again from the LSE.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ranges import in_phase
from .._paged import PagedKV
from .transposed import queries_of_blocks, readers_of_pages, tiles_of_queries
from .triton import (
    TILE,
    Lists,
    keys_at,
    list_of_tile,
    listed_of,
    lists_of,
    pools_of,
    queries_of_tile,
    rows_of_pool,
    rows_of_queries,
    shape_of,
    sizes_of,
    store_rows,
    table_of,
    warps_of,
)

#: Most queries and keys of a tile, where keys are what is summed.
TILE_OF_KEYS = (32, 128)


@triton.jit  # type: ignore[untyped-decorator]
def _shifts(rows, shift, count, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """rowsum(dout out) - e of rows [dim], in one pass over both."""
    out, grad, grad_lse = rows
    ROWS: tl.constexpr = SHAPE[4]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < count
    mine = rows_of_queries(out, row, 0, 1, exists, SHAPE).to(tl.float32)
    other = rows_of_queries(grad, row, 0, 1, exists, SHAPE).to(tl.float32)
    found = tl.sum(mine * other, 1) - tl.load(grad_lse + row, mask=exists, other=0.0)
    tl.store(shift + row, found, mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _of_queries(  # type: ignore[no-untyped-def]
    rows,  # q, gradient of the output, LSE, shift; gradient of q
    pools,  # these four as in the forward
    table,
    tiles,
    lists,
    sizes,  # tokens, batch, heads, heads of keys, scale
    SHAPE: tl.constexpr,
    LISTED: tl.constexpr,
):
    q, grad, lse, shift, result = rows
    keys, values, key_steps, value_steps = pools
    pages_of, lengths, pages, width, blocks = table
    tokens, batch, heads, kv_heads, scale = sizes
    PADDED: tl.constexpr = SHAPE[1]
    BLOCK: tl.constexpr = SHAPE[3]
    QUERIES: tl.constexpr = SHAPE[4]
    KEYS: tl.constexpr = SHAPE[5]
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv = head // (heads // kv_heads)
    sequence, number, row, place, exists = queries_of_tile(
        tile, tiles, lengths, tokens, batch, QUERIES
    )
    mine = rows_of_queries(q, row, head, heads, exists, SHAPE)
    slope_out = rows_of_queries(grad, row, head, heads, exists, SHAPE)
    to = row.to(tl.int64) * heads + head
    own_lse = tl.load(lse + to, mask=exists, other=0.0) * LOG2_E
    own_shift = tl.load(shift + to, mask=exists, other=0.0)
    last = tl.max(tl.where(exists, place, -1), 0)
    listed = lists[0]
    steps = tl.cdiv(last + 1, KEYS)
    if LISTED != 0:
        q_block = number * QUERIES // BLOCK
        listed, entries = list_of_tile(lists, sequence, head, q_block, LISTED)
        steps = tl.where(last >= 0, entries * (BLOCK // KEYS), 0)
    own = pages_of + sequence.to(tl.int64) * width
    facts = (own, last, tl.load(lengths + sequence), pages, width, blocks)
    sums = tl.zeros((QUERIES, PADDED), tl.float32)
    for at in range(steps):
        token, page, wanted = keys_at(at, listed, facts, SHAPE, LISTED)
        k = rows_of_pool(keys, key_steps, page, kv, token, wanted, SHAPE)
        v = rows_of_pool(values, value_steps, page, kv, token, wanted, SHAPE)
        scores = tl.dot(mine, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        seen = wanted[None, :] & (token[None, :] <= place[:, None])
        weights = tl.exp2(tl.where(seen, scores - own_lse[:, None], float("-inf")))
        of_weights = tl.dot(slope_out, tl.trans(v), input_precision="ieee")
        slope = weights * (of_weights - own_shift[:, None])
        sums = tl.dot(slope.to(k.dtype), k, sums, input_precision="ieee")
    store_rows(result, row, head, heads, exists, sums * scale, SHAPE)


@triton.jit  # type: ignore[untyped-decorator]
def _walk_of(transposed, sequence, head, skipped, count, SHAPE: tl.constexpr, LISTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the queries of a block of keys begin, and in how many tiles they lie."""
    first_query, _, sharers, lists, blocks, block = transposed
    BLOCK: tl.constexpr = SHAPE[3]
    QUERIES: tl.constexpr = SHAPE[4]
    if LISTED == 0:
        start = tl.maximum(skipped, 0) // QUERIES
        steps = tl.cdiv(count, QUERIES) - start
    else:
        slot = first_query + (sequence * lists + head // sharers) * blocks + block
        start = tl.load(slot)
        steps = (tl.load(slot + 1) - start) * (BLOCK // QUERIES)
    return start, steps


@triton.jit  # type: ignore[untyped-decorator]
def _slopes(pair, rows, place, wanted, scale, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries and gradients of a tile, and weights and ds [keys, queries] of both."""
    q, grad, lse, shift = rows
    k, v = pair
    row, head, heads, exists = place
    LOG2_E: tl.constexpr = 1.4426950408889634
    mine = rows_of_queries(q, row, head, heads, exists, SHAPE)
    slope_out = rows_of_queries(grad, row, head, heads, exists, SHAPE)
    at = row.to(tl.int64) * heads + head
    own_lse = tl.load(lse + at, mask=exists, other=0.0) * LOG2_E
    own_shift = tl.load(shift + at, mask=exists, other=0.0)
    scores = tl.dot(k, tl.trans(mine), input_precision="ieee") * (scale * LOG2_E)
    seen = wanted & exists[None, :]
    weights = tl.exp2(tl.where(seen, scores - own_lse[None, :], float("-inf")))
    of_weights = tl.dot(v, tl.trans(slope_out), input_precision="ieee")
    return mine, slope_out, weights, weights * (of_weights - own_shift[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _of_keys(  # type: ignore[no-untyped-def]
    rows,  # q, gradient of the output, LSE, shift
    pools,
    readers,  # where those of a page begin, entries of the table, lengths, starts, width
    transposed,  # where the queries of a block begin, blocks of queries, heads of a list, and sizes
    results,  # of keys, of values
    sizes,  # tokens, heads, heads of keys, scale
    SHAPE: tl.constexpr,
    LISTED: tl.constexpr,
):
    keys, values, key_steps, value_steps = pools
    first_reader, entry_of, lengths, starts, width = readers
    first_query, q_block_of, sharers, lists, blocks = transposed
    tokens, heads, kv_heads, scale = sizes
    PADDED: tl.constexpr = SHAPE[1]
    PAGE: tl.constexpr = SHAPE[2]
    BLOCK: tl.constexpr = SHAPE[3]
    QUERIES: tl.constexpr = SHAPE[4]
    KEYS: tl.constexpr = SHAPE[5]
    page = tl.program_id(0) // (PAGE // KEYS)
    inner = tl.program_id(0) % (PAGE // KEYS) * KEYS + tl.arange(0, KEYS)
    kv = tl.program_id(1)
    group = heads // kv_heads
    of_keys = tl.zeros((KEYS, PADDED), tl.float32)
    of_values = tl.zeros((KEYS, PADDED), tl.float32)
    for reader in range(tl.load(first_reader + page), tl.load(first_reader + page + 1)):
        entry = tl.load(entry_of + reader)
        sequence = entry // width
        token = entry % width * PAGE + inner
        length = tl.load(lengths + sequence)
        begin = tl.load(starts + sequence)
        count = tl.load(starts + sequence + 1) - begin
        wanted = token < length
        k = rows_of_pool(keys, key_steps, page, kv, inner, wanted, SHAPE)
        v = rows_of_pool(values, value_steps, page, kv, inner, wanted, SHAPE)
        # Queries before this one of the sequence see none of these tokens.
        skipped = tl.min(token, 0) - (length - count)
        block = entry % width * PAGE // BLOCK
        turned = (first_query, q_block_of, sharers, lists, blocks, block)
        for head in range(kv * group, kv * group + group):
            start, steps = _walk_of(turned, sequence, head, skipped, count, SHAPE, LISTED)
            for at in range(steps):
                first = (start + at) * QUERIES
                if LISTED != 0:
                    parts: tl.constexpr = BLOCK // QUERIES
                    first = tl.load(q_block_of + start + at // parts) * BLOCK + at % parts * QUERIES
                step = first + tl.arange(0, QUERIES)
                row = begin + step
                place = (row, head, heads, (step < count) & (row >= 0) & (row < tokens))
                sees = wanted[:, None] & (token[:, None] <= (length - count + step)[None, :])
                mine, slope_out, weights, slope = _slopes((k, v), rows, place, sees, scale, SHAPE)
                of_values = tl.dot(
                    weights.to(slope_out.dtype), slope_out, of_values, input_precision="ieee"
                )
                of_keys = tl.dot(slope.to(mine.dtype), mine, of_keys, input_precision="ieee")
    # Rows of pools [pages, heads, tokens, dim], as if their tokens were those of one head.
    to = (page.to(tl.int64) * kv_heads + kv) * PAGE + inner
    store_rows(results[0], to, 0, 1, inner < PAGE, of_keys * scale, SHAPE)
    store_rows(results[1], to, 0, 1, inner < PAGE, of_values, SHAPE)


@in_phase("sparse", "attend_prefill")
def run(
    given: tuple[Tensor, Tensor],
    kept: list[Tensor],
    starts: Tensor,
    cache: PagedKV,
    lists: Lists,
    block: int,
    scale: float,
    of_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, keys and values, of arguments that fit. Nothing waits for the GPU.

    Args:
        given: Gradients of the output and of the LSE.
        kept: q, the output and the LSE.
        starts: int32 [batch + 1].
        cache: The pages, without scales.
        lists: Indices and counts.
        block: Tokens of a block.
        scale: Of q.k.
        of_keys: Whether those of keys and values are wanted; they are empty otherwise.
    """
    q, starts = kept[0].contiguous(), starts.contiguous()
    out, lse, grad, grad_lse = (each.contiguous() for each in (*kept[1:], *given))
    rows = (q, grad, lse, torch.empty_like(lse))
    of_q = torch.empty_like(q)
    shape = shape_of(q, cache, lists, block, TILE)
    _shifts[(-(-lse.numel() // shape[4]),)](
        (out, grad, grad_lse), rows[3], lse.numel(), SHAPE=shape
    )
    tiles = (*tiles_of_queries(starts, q.shape[0], shape[4]), starts)
    _of_queries[(tiles[0].shape[0], q.shape[1])](
        (*rows, of_q),
        pools_of(cache),
        table_of(cache, block),
        tiles,
        lists_of(q, lists, starts),
        (*sizes_of(q, cache), float(scale)),
        SHAPE=shape,
        LISTED=listed_of(lists),
        num_warps=warps_of(shape[4], shape[1]),
    )
    if not of_keys:
        return of_q, cache.keys.new_empty(0), cache.values.new_empty(0)
    return of_q, *_run_of_keys(rows, starts, cache, lists, block, scale)


def _run_of_keys(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    starts: Tensor,
    cache: PagedKV,
    lists: Lists,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    q = rows[0]
    table, lengths, pages, width, blocks = table_of(cache, block)
    dim, padded, page, own, queries, keys = shape_of(q, cache, lists, block, TILE_OF_KEYS)
    shape = (dim, padded, page, own, queries, min(keys, page & -page))
    readers = readers_of_pages(table, lengths, page, pages)
    indices, counts = lists
    transposed, each = (starts, starts), 1
    if indices is not None:
        each = indices.shape[1]
        transposed = queries_of_blocks((indices, counts), starts, lengths, block, blocks)
    results = tuple(
        torch.empty(pool.shape, dtype=pool.dtype, device=pool.device)
        for pool in (cache.keys, cache.values)
    )
    _of_keys[(pages * (page // shape[5]), cache.kv_heads)](
        rows,
        pools_of(cache),
        (*readers, lengths, starts, width),
        (*transposed, q.shape[1] // each, each, blocks),
        results,
        (q.shape[0], q.shape[1], cache.kv_heads, float(scale)),
        SHAPE=shape,
        LISTED=min(1, listed_of(lists)),
        num_warps=warps_of(2 * shape[5], padded),
        # Without lists ptxas spills three stages.
        num_stages=2 if indices is None else 3,
    )
    return results[0], results[1]
