"""attend_decode on a GPU: one launch, whose work is cut by counts that are on the device."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...launch import (
    Bound,
    Kernel,
    KnownLaunches,
    Turn,
    current_stream,
    device_facts,
    kernel_for,
    starts_early,
)
from ...plan.spec import KernelSpec
from ...ranges import in_phase
from .._paged import PagedKV
from . import plan

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_MOST_BATCH = 65_535  # largest grid along y and z
_QUERY_BYTES = 4  # queries are loaded two at a time
_LOG2_E = math.log2(math.e)

_BOUND = KnownLaunches()

#: Indices and counts.
Lists = tuple[Tensor | None, Tensor | None]


def fits(q: Tensor, cache: PagedKV, lists: Lists = (None, None), block: int = 64) -> bool:
    """Whether there is a kernel: 16-bit keys whose rows start on 16 bytes, of a known dimension.

    Args:
        q: [batch, heads, dim].
        cache: The pages.
        lists: Indices and counts.
        block: Tokens of a block.
    """
    batch, heads, dim = q.shape
    if q.dtype not in _NAMES or cache.keys.dtype != q.dtype or dim not in plan.DIMS:
        return False
    group = plan.group_for(heads // cache.kv_heads)
    if group is None or not 0 < batch <= _MOST_BATCH or cache.kv_heads > _MOST_BATCH:
        return False
    if (cache.key_scale, cache.value_scale) != (1.0, 1.0):
        return False
    if block > plan.LARGEST_BLOCK or _tokens(cache, lists, block) > plan.MOST_TOKENS:
        return False
    pools = (cache.keys, cache.values)
    return all(
        pool.stride(3) == 1
        and pool.data_ptr() % 16 == 0
        and not any(stride % 8 for stride in pool.stride()[:3])
        for pool in pools
    )


def _tokens(cache: PagedKV, lists: Lists, block: int) -> int:
    """Most tokens of a list, by its shape."""
    return cache.capacity if lists[0] is None else lists[0].shape[2] * block


@in_phase("sparse", "attend_decode")
def run(q: Tensor, cache: PagedKV, lists: Lists, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """Output and LSE of arguments that were checked, and that fit.

    Args:
        q: [batch, heads, dim] on a Hopper GPU.
        cache: The pages.
        lists: Indices and counts.
        block: Tokens of a block.
        scale: Of q.k.

    Raises:
        UnsupportedError: No driver; or a graph is captured and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    if lists[0] is not None and lists[0].shape[2] == 0:  # it has no address to launch with
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    q = q.contiguous()
    if q.data_ptr() % _QUERY_BYTES:
        q = q.clone()
    # The kernel steps through the pages of a sequence one by one.
    table, lengths = cache.table.contiguous(), cache.lengths.contiguous()
    cache = replace(cache, table=table, lengths=lengths)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    contiguous = tuple(None if each is None else each.contiguous() for each in lists)
    enqueue((out, lse), q, cache, (contiguous[0], contiguous[1]), block, scale)
    return out, lse


def enqueue(
    results: tuple[Tensor, Tensor],
    q: Tensor,
    cache: PagedKV,
    lists: Lists,
    block: int,
    scale: float,
    splits: int | None = None,
) -> None:
    """Put the kernel on torch's current stream. Nothing waits for it, and nothing is checked.

    Args:
        results: What `run` returns, contiguous; all is written.
        q: As for `run`, contiguous and on 4 bytes; all the rest is contiguous too.
        cache: The pages.
        lists: Indices and counts.
        block: Tokens of a block.
        scale: Of q.k.
        splits: Blocks that share a list, one of `plan.SPLITS`; None: as planned.
    """
    device, batch = q.get_device(), q.shape[0]
    if splits is None:
        tokens, count = _tokens(cache, lists, block), device_facts(device).sm_count
        splits = plan.splits_for(batch * cache.kv_heads, tokens, count, q.shape[2])
    args = bytes(pack(results, q, cache, lists, block, scale, splits))
    turn = Turn(current_stream(device), starts_early())
    # The argument holds all that a launch depends on, but for its kernel, its grid and its stream.
    key = (args, q.shape, q.dtype, device, turn)
    bound = _BOUND.get(key)
    if bound is None:
        group = plan.group_for(q.shape[1] // cache.kv_heads)
        assert group is not None
        kernel = _kernel(plan.spec_for(_NAMES[q.dtype], q.shape[2], group, splits), device)
        grid = (splits, cache.kv_heads, batch)
        made: Bound = kernel.bind(grid, args, turn.stream, pdl=turn.early)
        bound = _BOUND.keep(key, made)
    bound()


def _kernel(spec: KernelSpec, device: int) -> Kernel:
    """The kernel, loaded for all numbers of blocks: a captured graph may want another."""
    image = functools.cache(lambda: KernelCache.default().get(spec).image)
    loaded = {each: kernel_for(each, device, lambda _: image()) for each in plan.splits_of(spec)}
    return loaded[spec]


def pack(
    results: tuple[Tensor, Tensor],
    q: Tensor,
    cache: PagedKV,
    lists: Lists,
    block: int,
    scale: float,
    splits: int,
) -> plan.Args:
    """The kernel's argument."""
    table, lengths = cache.table, cache.lengths
    tensors = (q, cache.keys, cache.values, table, lengths, *lists, *results)
    addresses = [0 if each is None else each.data_ptr() for each in tensors]
    strides = (*cache.keys.stride()[:3], *cache.values.stride()[:3])
    sizes = (cache.keys.shape[0], cache.page, block, table.shape[1])
    most = 0 if lists[0] is None else lists[0].shape[2]
    heads = (cache.kv_heads, q.shape[1] // cache.kv_heads)
    return plan.Args(*addresses, *strides, *sizes, most, *heads, scale * _LOG2_E, splits)
