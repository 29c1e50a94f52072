"""Attention of one query a sequence: checks, run."""

from __future__ import annotations

from functools import cache as once
from types import ModuleType

from torch import Tensor

from ...errors import ArgumentError
from .._attention import checked_scale, refuse_gradients
from .._paged import (
    QUERY_DTYPES,
    PagedKV,
    cache_of,
    check_block,
    check_cache,
    check_heads,
    check_listed,
    check_whole_numbers,
    looks_at_values,
    parts_of,
)
from .._product import is_dense, is_hopper, told
from .dispatch import register_on_gpu, run_reference, traced


def attend_decode(
    q: Tensor,
    cache: PagedKV,
    indices: Tensor | None = None,
    counts: Tensor | None = None,
    *,
    block: int = 64,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from one query a head of each sequence to the keys of chosen blocks.

    Each head of keys has its own list, for all of its query heads. A sequence without tokens, and a
    list without blocks, gives zeros and an LSE of -inf. A kernel on a Hopper GPU where keys are of
    16 bits, the head dimension is 64, 128 or 256, and there are up to 16 query heads for each of
    keys; else torch. The kernel rounds weights to the dtype of values before they meet them, and
    sums in float32. No gradient.

    Args:
        q: [batch, heads, dim], float32, bfloat16 or float16; heads a multiple of those of keys.
        cache: The pages.
        indices: int32 [batch, kv_heads, most]: blocks of `block` tokens, each once, in any order;
            negative ones are none. None: all tokens.
        counts: int32 [batch, kv_heads]: how many of `indices` count; None: all.
        block: Tokens of a block, a multiple of the page.
        scale: Of q.k; None: 1 / sqrt(dim).

    Returns:
        out: [batch, heads, dim], dtype of q.
        lse: float32 [batch, heads]: natural logarithm of the sum of exp(scale q.k).

    Raises:
        ArgumentError: Arguments do not fit each other. On the CPU values are looked at too: pages
            outside of the pool, lengths and blocks without room, blocks that are listed twice.
        UnsupportedError: A gradient would be needed; a CUDA graph is being captured, and the
            kernel is not loaded yet.

    Example:
        >>> import torch
        >>> pool = torch.ones(1, 1, 16, 8)
        >>> cache = PagedKV(pool, pool, torch.tensor([[0]]).int(), torch.tensor([3]).int())
        >>> out, lse = attend_decode(torch.zeros(1, 2, 8), cache, block=16)
        >>> out.unique().tolist(), round(lse[0, 0].exp().item(), 4)
        ([1.0], 3.0)
    """
    cache = _check_query(q, cache)
    block = check_block("attend_decode", block, cache.page)
    _check_lists(q, cache, indices, counts, block)
    refuse_gradients("attend_decode", q, cache)
    factor = checked_scale("attend_decode", scale, q.shape[2])
    tensors, scales = parts_of(cache, factor)
    return traced(q.detach(), tensors, indices, counts, block, scales)


def _check_query(q: Tensor, cache: PagedKV) -> PagedKV:
    if not is_dense(q) or q.dim() != 3 or q.dtype not in QUERY_DTYPES:
        raise ArgumentError(
            f"attend_decode: q {told(q)}",
            need="[batch, heads, dim] in float32, bfloat16 or float16",
            hint="q[:, :, 0], for one query of [batch, heads, tokens, dim]",
        )
    cache = check_cache("attend_decode", cache, q)
    check_heads("attend_decode", q, cache)
    if q.shape[0] != cache.table.shape[0]:
        raise ArgumentError(
            f"attend_decode: {q.shape[0]} queries for {cache.table.shape[0]} sequences",
            need="one a sequence",
            hint="hopsparse.ops.attend_prefill, for more",
        )
    return cache


def _check_lists(
    q: Tensor, cache: PagedKV, indices: Tensor | None, counts: Tensor | None, block: int
) -> None:
    if indices is None:
        if counts is not None:
            raise ArgumentError(
                "attend_decode: counts without indices", need="both or none", hint="counts=None"
            )
        return
    shape = (q.shape[0], cache.kv_heads)
    if not is_dense(indices) or indices.dim() != 3:
        raise ArgumentError(
            f"attend_decode: indices {told(indices)}",
            need=f"int32 [{shape[0]}, {shape[1]}, most]",
            hint="what select returned",
        )
    check_whole_numbers("attend_decode", "indices", indices, q, (*shape, indices.shape[2]))
    if counts is not None:
        check_whole_numbers("attend_decode", "counts", counts, q, shape)
    if looks_at_values(q):
        check_listed("attend_decode", indices, counts, -(-cache.capacity // block))


def _run_on_gpu(
    q: Tensor,
    tensors: list[Tensor],
    indices: Tensor | None,
    counts: Tensor | None,
    block: int,
    scales: list[float],
) -> tuple[Tensor, Tensor]:
    """The kernel where there is one for this GPU and these keys."""
    cache = cache_of(tensors, scales)
    lists = (indices, counts)
    if not is_hopper(q.get_device()) or not _device().fits(q, cache, lists, block):
        return run_reference(q, tensors, indices, counts, block, scales)
    found: tuple[Tensor, Tensor] = _device().run(q, cache, lists, block, scales[0])
    return found


register_on_gpu(_run_on_gpu)


@once
def _device() -> ModuleType:
    """The launch, imported late: a process on the CPU needs neither a compiler nor a driver."""
    from . import device

    return device
