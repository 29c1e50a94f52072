"""attend_prefill for any GPU that Triton compiles for: any head dimension, page and block.

A program is some queries of one head of a sequence, and walks their list in order, some keys at a
time: flash attention over blocks in pages. On a Hopper GPU `attend_prefill` runs kernel.cuh where
that fits, and this where it does not. What the kernels of the gradient share is here too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ranges import in_phase
from .._paged import PagedKV
from .transposed import tiles_of_queries

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_MOST = 2**30  # tokens, and lists times blocks: the kernels add a few of them in 32 bits
_MOST_DIM, _LEAST, _NO_BLOCK = 256, 16, 128
#: Most queries and keys of a tile of 16 bits and dim 128.
TILE = (128, 64)

#: Indices and counts.
Lists = tuple[Tensor | None, Tensor | None]


@triton.jit  # type: ignore[untyped-decorator]
def queries_of_tile(tile, tiles, lengths, tokens, batch, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sequence, number of the tile in it, rows of q, places, and which of them there are."""
    owner, firsts, starts = tiles
    sequence = tl.load(owner + tile)
    some = sequence < batch
    sequence = tl.minimum(sequence, batch - 1)
    number = tile - tl.load(firsts + sequence)
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    step = number * QUERIES + tl.arange(0, QUERIES)
    row = begin + step
    exists = some & (step < count) & (row >= 0) & (row < tokens)
    place = tl.load(lengths + sequence) - count + step
    return sequence, number, row, place, exists


@triton.jit  # type: ignore[untyped-decorator]
def list_of_tile(lists, sequence, head, q_block, LISTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the list of a block of queries begins, and how many entries it has."""
    indices, counts, sharers, of_batch, q_blocks, most = lists
    own = head // sharers
    there = q_block < q_blocks
    place = (sequence * of_batch + own).to(tl.int64) * q_blocks + tl.minimum(q_block, q_blocks - 1)
    entries = tl.where(there, most, 0)
    if LISTED == 2:
        entries = tl.minimum(tl.maximum(tl.load(counts + place), 0), entries)
    return indices + place * most, entries


@triton.jit  # type: ignore[untyped-decorator]
def keys_at(at, listed, facts, SHAPE: tl.constexpr, LISTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens of step `at` of a walk, their pages, and which of them are there."""
    table, last, length, pages, width, blocks = facts
    PAGE: tl.constexpr = SHAPE[2]
    BLOCK: tl.constexpr = SHAPE[3]
    KEYS: tl.constexpr = SHAPE[5]
    if LISTED == 0:
        first = at * KEYS
        some = first <= last
    else:
        parts: tl.constexpr = BLOCK // KEYS
        block = tl.load(listed + at // parts)
        some = (block >= 0) & (block < blocks)
        first = tl.where(some, block, 0) * BLOCK + at % parts * KEYS
    token = first + tl.arange(0, KEYS)
    wanted = some & (token <= last) & (token < length) & (token < width * PAGE)
    page = tl.load(table + token // PAGE, mask=wanted, other=-1)
    return token, page, wanted & (page >= 0) & (page < pages)


@triton.jit  # type: ignore[untyped-decorator]
def rows_of_pool(pool, steps, page, head, token, wanted, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of keys or values [tokens, dim]; zeros where not wanted, whatever lies there."""
    DIM: tl.constexpr = SHAPE[0]
    PADDED: tl.constexpr = SHAPE[1]
    PAGE: tl.constexpr = SHAPE[2]
    column = tl.arange(0, PADDED)
    row = page.to(tl.int64) * steps[0] + head.to(tl.int64) * steps[1] + (token % PAGE) * steps[2]
    mask = wanted[:, None] & (column < DIM)[None, :]
    return tl.load(pool + row[:, None] + (column * steps[3])[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def rows_of_queries(x, row, head, heads, exists, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows [queries, dim] of a contiguous [tokens, heads, dim]; zeros where there is none."""
    DIM: tl.constexpr = SHAPE[0]
    column = tl.arange(0, SHAPE[1])
    place = (row.to(tl.int64) * heads + head) * DIM
    mask = exists[:, None] & (column < DIM)[None, :]
    return tl.load(x + place[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(x, row, head, heads, exists, sums, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The way back: sums [queries, dim] rounded to rows of [tokens, heads, dim]."""
    DIM: tl.constexpr = SHAPE[0]
    column = tl.arange(0, SHAPE[1])
    place = (row.to(tl.int64) * heads + head) * DIM
    mask = exists[:, None] & (column < DIM)[None, :]
    tl.store(x + place[:, None] + column[None, :], sums.to(x.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    rows,  # q, output, LSE
    pools,  # keys, values, and their strides
    table,  # pages of sequences, lengths, pages, width, blocks of a sequence
    tiles,  # sequence of each tile, first tile of each sequence, starts
    lists,  # indices, counts, query heads of a list, lists, q_blocks, most
    sizes,  # tokens, batch, heads, heads of keys; scale of scores in base 2, of values
    SHAPE: tl.constexpr,  # dim, its power of two, page, block, queries and keys of a tile
    LISTED: tl.constexpr,  # 0: all tokens; 1: indices; 2: and counts
):
    q, out, lse = rows
    keys, values, key_steps, value_steps = pools
    pages_of, lengths, pages, width, blocks = table
    tokens, batch, heads, kv_heads, power, value_scale = sizes
    PADDED: tl.constexpr = SHAPE[1]
    BLOCK: tl.constexpr = SHAPE[3]
    QUERIES: tl.constexpr = SHAPE[4]
    KEYS: tl.constexpr = SHAPE[5]
    # The last queries of a prompt have most keys: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv = head // (heads // kv_heads)
    sequence, number, row, place, exists = queries_of_tile(
        tile, tiles, lengths, tokens, batch, QUERIES
    )
    mine = rows_of_queries(q, row, head, heads, exists, SHAPE)
    last = tl.max(tl.where(exists, place, -1), 0)
    listed = lists[0]
    steps = tl.cdiv(last + 1, KEYS)
    if LISTED != 0:
        q_block = number * QUERIES // BLOCK
        listed, entries = list_of_tile(lists, sequence, head, q_block, LISTED)
        steps = tl.where(last >= 0, entries * (BLOCK // KEYS), 0)
    own = pages_of + sequence.to(tl.int64) * width
    facts = (own, last, tl.load(lengths + sequence), pages, width, blocks)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    mass = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, PADDED), tl.float32)
    for at in range(steps):
        token, page, wanted = keys_at(at, listed, facts, SHAPE, LISTED)
        k = rows_of_pool(keys, key_steps, page, kv, token, wanted, SHAPE).to(mine.dtype)
        v = rows_of_pool(values, value_steps, page, kv, token, wanted, SHAPE).to(mine.dtype)
        scores = tl.dot(mine, tl.trans(k), input_precision="ieee") * power
        seen = wanted[None, :] & (token[None, :] <= place[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        above = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        mass = mass * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None], input_precision="ieee")
        top = above
    empty = mass == 0.0
    sums = sums * value_scale / tl.where(empty, 1.0, mass)[:, None]
    natural = tl.where(empty, float("-inf"), (top + tl.log2(mass)) * 0.6931471805599453)
    store_rows(out, row, head, heads, exists, sums, SHAPE)
    tl.store(lse + row.to(tl.int64) * heads + head, natural, mask=exists)


def fits(q: Tensor, cache: PagedKV, indices: Tensor | None, block: int, eight_bits: bool) -> bool:
    """Whether there is a kernel.

    Args:
        q: [tokens, heads, dim].
        cache: The pages.
        indices: Of the lists.
        block: Tokens of a block.
        eight_bits: Whether the GPU reads float8_e4m3fn.
    """
    keys, table = cache.keys, cache.table
    if q.dtype not in _DTYPES or q.shape[2] > _MOST_DIM or 0 in (*q.shape, *keys.shape):
        return False
    if keys.dtype != q.dtype and not eight_bits:
        return False
    if 0 in table.shape or (indices is not None and indices.numel() == 0):
        return False
    sizes = [q.shape[0] * q.shape[1], table.numel() * cache.page]
    if indices is not None:
        blocks = indices.shape[0] * indices.shape[1] * -(-cache.capacity // block)
        sizes += [indices.shape[3] * block, indices.numel(), blocks]
    return max(sizes) < _MOST


@in_phase("sparse", "attend_prefill")
def run(
    q: Tensor, starts: Tensor, cache: PagedKV, lists: Lists, block: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and LSE of arguments that were checked, and that fit. Nothing waits for the GPU.

    Args:
        q: [tokens, heads, dim].
        starts: int32 [batch + 1].
        cache: The pages; its scales are applied.
        lists: Indices and counts.
        block: Tokens of a block.
        scale: Of q.k.
    """
    q, starts = q.contiguous(), starts.contiguous()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    shape = shape_of(q, cache, lists, block, TILE)
    tiles = (*tiles_of_queries(starts, q.shape[0], shape[4]), starts)
    _attend[(tiles[0].shape[0], q.shape[1])](
        (q, out, lse),
        pools_of(cache),
        table_of(cache, block),
        tiles,
        lists_of(q, lists, starts),
        (
            *sizes_of(q, cache),
            scale * cache.key_scale * math.log2(math.e),
            float(cache.value_scale),
        ),
        SHAPE=shape,
        LISTED=listed_of(lists),
        num_warps=warps_of(shape[4], shape[1]),
    )
    return out, lse


Shape = tuple[int, int, int, int, int, int]


def shape_of(q: Tensor, cache: PagedKV, lists: Lists, block: int, most: tuple[int, int]) -> Shape:
    """Dim, its power of two, page, block, and queries and keys that are multiplied at a time.

    Args:
        q: [tokens, heads, dim].
        cache: The pages.
        lists: Without them tiles need not divide blocks.
        block: Tokens of a block.
        most: Queries and keys of a tile, of 16 bits and dim 128.
    """
    own = _NO_BLOCK if lists[0] is None else block
    return shape_for(q.dtype, q.shape[2], cache.page, own, most)


def shape_for(dtype: torch.dtype, dim: int, page: int, block: int, most: tuple[int, int]) -> Shape:
    """`shape_of`, of sizes. Products of 32 bits are not of tensor cores, and keep both sides.

    Example:
        >>> shape_for(torch.bfloat16, 80, 16, 192, (128, 64))
        (80, 128, 16, 192, 64, 64)
        >>> shape_for(torch.float32, 8, 16, 128, (128, 64))
        (8, 16, 16, 128, 32, 16)
    """
    padded = max(_LEAST, 1 << (dim - 1).bit_length())
    part = (4 if dtype == torch.float32 else 1) * (2 if padded > 128 else 1)
    queries, keys = (min(max(each // part, _LEAST), block & -block) for each in most)
    return dim, padded, page, block, queries, keys


def pools_of(cache: PagedKV) -> tuple[Any, ...]:
    """Keys, values and their strides."""
    return cache.keys, cache.values, tuple(cache.keys.stride()), tuple(cache.values.stride())


def table_of(cache: PagedKV, block: int) -> tuple[Any, ...]:
    """The table, lengths, pages of the pool, entries of a row, and blocks of a sequence."""
    table, lengths = cache.table.contiguous(), cache.lengths.contiguous()
    return table, lengths, cache.keys.shape[0], table.shape[1], -(-cache.capacity // block)


def lists_of(q: Tensor, lists: Lists, none: Tensor) -> tuple[Any, ...]:
    """Indices and counts, or what is not read in their place; query heads of a list, and sizes."""
    found = [none if each is None else each.contiguous() for each in lists]
    _, each, q_blocks, most = (1, 1, 1, 0) if lists[0] is None else lists[0].shape
    return (*found, q.shape[1] // each, each, q_blocks, most)


def listed_of(lists: Lists) -> int:
    """0: all tokens; 1: indices; 2: and counts."""
    return sum(each is not None for each in lists)


def sizes_of(q: Tensor, cache: PagedKV) -> tuple[int, int, int, int]:
    """Queries, sequences, query heads and heads of keys."""
    return q.shape[0], cache.table.shape[0], q.shape[1], cache.kv_heads


def warps_of(rows: int, padded: int) -> int:
    """Warps of a program that sums so many rows: four, unless registers would not hold them.

    Example:
        >>> warps_of(128, 128), warps_of(16, 256)
        (8, 4)
    """
    return 8 if rows * padded >= 128 * 128 else 4
