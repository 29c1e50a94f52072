"""attend_prefill on a GPU: two launches, one that sorts the work and one that does it.

Neither waits, and nothing is planned on the host: sequences, lists and counts are on the device.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...launch import (
    Bound,
    Element,
    KnownLaunches,
    current_stream,
    encode,
    kernel_for,
    max_active_blocks,
)
from ...plan.spec import KernelSpec
from ...ranges import in_phase
from .._paged import PagedKV
from . import plan

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ELEMENTS = {torch.bfloat16: Element.BF16, torch.float16: Element.F16}
_MOST = 2**30  # tokens, entries and items: the kernel adds a few of them in 32 bits
_COLUMNS = 64  # of a box: 128 bytes, which are swizzled

_BOUND = KnownLaunches()

#: Indices and counts.
Lists = tuple[Tensor | None, Tensor | None]


def fits(q: Tensor, cache: PagedKV, lists: Lists, block: int, scale: float) -> bool:
    """Whether there is a kernel: keys of 16 bits that TMA can read, blocks of whole tiles.

    Args:
        q: [tokens, heads, dim].
        cache: The pages.
        lists: Indices and counts.
        block: Tokens of a block.
        scale: Of q.k.
    """
    tokens, _, dim = q.shape
    if q.dtype not in _NAMES or cache.keys.dtype != q.dtype or dim not in plan.DIMS:
        return False
    if cache.page not in plan.PAGES or 0 in (*cache.table.shape, cache.keys.shape[0], tokens):
        return False
    if (cache.key_scale, cache.value_scale) != (1.0, 1.0):
        return False
    # Maxima are taken of scores that are not scaled yet.
    if not torch.finfo(torch.float32).tiny <= scale * math.log2(math.e) < 2.0**64:
        return False
    indices = lists[0]
    listed = 0 if indices is None else indices.shape[3] * block
    if indices is not None and (block % plan.BLOCK or indices.numel() == 0):
        return False
    if max(tokens, cache.capacity, listed, _cut(q, cache, lists, block).bundles * 128) > _MOST:
        return False
    return all(
        pool.stride(3) == 1
        and pool.data_ptr() % 16 == 0
        and not any(stride % 8 for stride in pool.stride()[:3])
        for pool in (cache.keys, cache.values)
    )


@in_phase("sparse", "attend_prefill")
def run(
    q: Tensor, starts: Tensor, cache: PagedKV, lists: Lists, block: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and LSE of arguments that were checked, and that fit.

    Args:
        q: [tokens, heads, dim] on a Hopper GPU.
        starts: int32 [batch + 1].
        cache: The pages.
        lists: Indices and counts.
        block: Tokens of a block.
        scale: Of q.k.

    Raises:
        UnsupportedError: No driver; or a graph is captured and a kernel is not loaded yet.
        CompileError: A kernel does not compile.
    """
    q = q.contiguous()
    q = q.clone() if q.data_ptr() % 16 else q
    table, lengths = cache.table.contiguous(), cache.lengths.contiguous()
    cache = replace(cache, table=table, lengths=lengths)
    indices, counts = (None if each is None else each.contiguous() for each in lists)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    enqueue((out, lse), q, starts.contiguous(), cache, (indices, counts), block, scale)
    return out, lse


def enqueue(
    results: tuple[Tensor, Tensor],
    q: Tensor,
    starts: Tensor,
    cache: PagedKV,
    lists: Lists,
    block: int,
    scale: float,
    config: plan.Config | None = None,
) -> None:
    """Put both kernels on torch's current stream. Nothing waits for them; nothing is checked.

    Args:
        results: What `run` returns, contiguous; all rows that starts name are written.
        q: As for `run`, contiguous and on 16 bytes, like all the rest.
        starts: As for `run`.
        cache: The pages.
        lists: Indices and counts.
        block: Tokens of a block.
        scale: Of q.k.
        config: How a block works; None: as `plan.CHOSEN` says.
    """
    cut, device = _cut(q, cache, lists, block), q.get_device()
    # A table of items, which belongs to this call: calls on other streams have their own.
    work = torch.empty((1 + cut.bundles, 4), dtype=torch.int32, device=q.device)
    sizes = (q.shape[0], block, 0 if lists[0] is None else lists[0].shape[3])
    order = pack_order(cut, starts, cache, lists, work, sizes)
    _launch(plan.order_spec(), bytes(order), device, 1)
    args = pack(results, q, starts, cache, lists, work, (block, scale))
    spec = plan.spec_for(_NAMES[q.dtype], config or plan.CHOSEN[q.shape[2]])
    _launch(spec, maps(q, cache) + bytes(args), device, cut.bundles * cut.units)


def _launch(spec: KernelSpec, args: bytes, device: int, items: int) -> None:
    key = (spec, args, items, device, current_stream(device))
    bound = _BOUND.get(key)
    if bound is None:
        kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
        grid = min(items, max_active_blocks(kernel))
        made: Bound = kernel.bind(grid, args, current_stream(device))
        bound = _BOUND.keep(key, made)
    bound()


def _cut(q: Tensor, cache: PagedKV, lists: Lists, block: int) -> plan.Division:
    tokens, heads, dim = q.shape
    batch, indices = cache.table.shape[0], lists[0]
    each = cache.kv_heads if indices is None else indices.shape[1]
    key_bytes = cache.capacity * 4 * dim
    own = 0 if indices is None else block
    return plan.divide(tokens, batch, (heads, cache.kv_heads, each), own, key_bytes)


def maps(q: Tensor, cache: PagedKV) -> bytes:
    """The tensor maps of queries, keys and values."""
    tokens, heads, dim = q.shape
    pages, kv_heads, page, _ = cache.keys.shape
    element = _ELEMENTS[q.dtype]
    strides = (2 * dim, 2 * heads * dim)
    box = (_COLUMNS, 1, plan.ROWS)
    made = encode(q.data_ptr(), element, (dim, heads, tokens), strides, box, swizzle=128)
    for pool in (cache.keys, cache.values):
        sizes, box4 = (dim, page, kv_heads, pages), (_COLUMNS, page, 1, 1)
        steps = tuple(2 * pool.stride(i) for i in (2, 1, 0))
        made += encode(pool.data_ptr(), element, sizes, steps, box4, swizzle=128)
    return made


def pack(
    results: tuple[Tensor, Tensor],
    q: Tensor,
    starts: Tensor,
    cache: PagedKV,
    lists: Lists,
    work: Tensor,
    meaning: tuple[int, float],
) -> plan.Args:
    """What follows the maps in the argument; `meaning` is the block and the scale."""
    block, scale = meaning
    cut, indices = _cut(q, cache, lists, block), lists[0]
    tensors = (starts, cache.lengths, cache.table, *lists, work, *results)
    q_blocks, most = (1, 0) if indices is None else indices.shape[2:]
    return plan.Args(
        *(0 if each is None else each.data_ptr() for each in tensors),
        *(q.shape[1], cache.kv_heads, cut.lists, q.shape[0], cut.rows, cut.units),
        *(block, q_blocks, most, cache.keys.shape[0], cache.page, cache.table.shape[1]),
        scale * math.log2(math.e),
    )


def pack_order(
    cut: plan.Division,
    starts: Tensor,
    cache: PagedKV,
    lists: Lists,
    work: Tensor,
    sizes: tuple[int, int, int],
) -> plan.OrderArgs:
    """The argument of the kernel that sorts; `sizes` are tokens, the block, and entries of a list.

    Args:
        cut: What the call is cut into.
        starts: As for `run`.
        cache: The pages.
        lists: Indices and counts.
        work: int32 [1 + bundles, 4].
        sizes: Three numbers.
    """
    tokens, block, most = sizes
    indices, counts = lists
    tensors = (starts, cache.lengths, counts, work)
    return plan.OrderArgs(
        *(0 if each is None else each.data_ptr() for each in tensors),
        *(cache.table.shape[0], cut.lists, cut.per_section, tokens, cut.rows),
        *((0, 1) if indices is None else (block, indices.shape[2])),
        *(most, cache.capacity),
    )
