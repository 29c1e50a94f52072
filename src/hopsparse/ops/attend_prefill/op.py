"""Causal attention of many queries over blocks of keys: checks, run."""

from __future__ import annotations

from functools import cache as once
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from .._attention import checked_scale
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
from .dispatch import both_of, register_on_gpu, run_gradient_reference, run_reference, traced

_OP = "attend_prefill"

#: Whether calls take the kernels in Triton. They were compiled and interpreted, and have not run on
#: a GPU yet: until tests/gpu/test_attend_prefill_triton.py has passed on one, torch runs instead.
TRITON = False


def attend_prefill(
    q: Tensor,
    starts: Tensor,
    cache: PagedKV,
    indices: Tensor | None = None,
    counts: Tensor | None = None,
    *,
    block: int = 64,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from the last tokens of each sequence to chosen blocks of its keys, causally.

    The queries of a sequence are its last tokens, whose keys are in the cache already: a whole
    prompt, or a chunk of it. Every `block` queries from the first of the chunk on have a list of
    blocks of keys. A query without a key gives zeros and an LSE of -inf. A kernel on a Hopper GPU
    where keys are of 16 bits, the head dimension is 64 or 128, pages have 16, 32, 64 or 128 tokens
    and blocks a multiple of 64; else torch, which waits for the GPU.

    Differentiable in q, `cache.keys` and `cache.values`, by the output and by the LSE; pages that
    several sequences or heads read get the sum. By torch on every device.

    Args:
        q: [tokens, heads, dim], all sequences behind each other; float32, bfloat16 or float16.
        starts: int32 [batch + 1]: sequence b has queries starts[b] to starts[b + 1].
        cache: The pages.
        indices: int32 [batch, kv_heads or heads, q_blocks, most]: blocks of `block` tokens, each
            once, in any order; negative ones are none. None: all tokens.
        counts: int32 [batch, kv_heads or heads, q_blocks]: how many count; None: all.
        block: Tokens of a block, a multiple of the page.
        scale: Of q.k; None: 1 / sqrt(dim).

    Returns:
        out: [tokens, heads, dim], dtype of q.
        lse: float32 [tokens, heads], natural logarithm.

    Raises:
        ArgumentError: Arguments do not fit each other. On the CPU values are looked at too.
        UnsupportedError: A gradient is needed with keys of 8 bits, or scales of keys or values; a
            CUDA graph is being captured, and the kernels are not loaded yet.

    Example:
        >>> import torch
        >>> pool = torch.arange(16.0).view(1, 1, 16, 1)
        >>> cache = PagedKV(0 * pool, pool, torch.tensor([[0]]).int(), torch.tensor([3]).int())
        >>> out, _ = attend_prefill(torch.zeros(3, 1, 1), torch.tensor([0, 3]).int(), cache)
        >>> out.flatten().tolist()
        [0.0, 0.5, 1.0]
    """
    cache = _check_query(q, cache)
    block = check_block(_OP, block, cache.page)
    check_whole_numbers(_OP, "starts", starts, q, (cache.table.shape[0] + 1,))
    longest = _check_starts(q, starts, cache)
    _check_lists(q, cache, indices, counts, -(-longest // block))
    if indices is not None and looks_at_values(q):
        check_listed(_OP, indices, counts, -(-cache.capacity // block))
    _check_gradient(q, cache)
    tensors, scales = parts_of(cache, checked_scale(_OP, scale, q.shape[2]))
    return traced(q, starts, tensors, indices, counts, block, scales)


def _check_gradient(q: Tensor, cache: PagedKV) -> None:
    if cache.keys.dtype == q.dtype and (cache.key_scale, cache.value_scale) == (1.0, 1.0):
        return
    if torch.is_grad_enabled() and any(
        each.requires_grad for each in (q, cache.keys, cache.values)
    ):
        raise UnsupportedError(
            f"{_OP}: a gradient, with keys of {cache.keys.dtype} that have scales",
            need=f"keys and values of {q.dtype}, without scales",
            hint="torch.no_grad(), or a cache that is not quantized, to train",
        )


def _check_query(q: Tensor, cache: PagedKV) -> PagedKV:
    if not is_dense(q) or q.dim() != 3 or q.dtype not in QUERY_DTYPES:
        raise ArgumentError(
            f"{_OP}: q {told(q)}",
            need="[tokens, heads, dim] in float32, bfloat16 or float16",
            hint="q.transpose(1, 2).flatten(0, 1), for [batch, heads, tokens, dim]",
        )
    cache = check_cache(_OP, cache, q)
    check_heads(_OP, q, cache)
    return cache


def _check_starts(q: Tensor, starts: Tensor, cache: PagedKV) -> int:
    """The most queries of a sequence; 0 where values are not looked at."""
    if not looks_at_values(q):
        return 0
    ends = starts.tolist()
    counts = [last - first for first, last in pairwise(ends)]
    if ends[0] != 0 or ends[-1] != q.shape[0] or min(counts, default=0) < 0:
        raise ArgumentError(
            f"{_OP}: starts from {ends[0]} to {ends[-1]} for {q.shape[0]} queries",
            need=f"0, ... {q.shape[0]}, none below the one before it",
            hint="cumulative counts, with a 0 in front",
        )
    for sequence, (count, length) in enumerate(zip(counts, cache.lengths.tolist(), strict=True)):
        if count > length:
            raise ArgumentError(
                f"{_OP}: {count} queries of sequence {sequence}, which has {length} tokens",
                need="queries that are its last tokens",
                hint="lengths that count the tokens of this chunk too",
            )
    return max(counts, default=0)


def _check_lists(
    q: Tensor, cache: PagedKV, indices: Tensor | None, counts: Tensor | None, q_blocks: int
) -> None:
    if indices is None:
        if counts is not None:
            raise ArgumentError(
                f"{_OP}: counts without indices", need="both or none", hint="counts=None"
            )
        return
    batch, heads = cache.table.shape[0], q.shape[1]
    fits = is_dense(indices) and indices.dim() == 4 and indices.shape[0] == batch
    if not fits or indices.shape[1] not in (cache.kv_heads, heads) or indices.shape[2] < q_blocks:
        raise ArgumentError(
            f"{_OP}: indices {told(indices)}",
            need=f"int32 [{batch}, {cache.kv_heads} or {heads}, at least {q_blocks}, most]",
            hint="what select returned for score_tiles",
        )
    check_whole_numbers(_OP, "indices", indices, q, indices.shape)
    if counts is not None:
        check_whole_numbers(_OP, "counts", counts, q, indices.shape[:3])


def _run_on_gpu(
    q: Tensor,
    starts: Tensor,
    tensors: list[Tensor],
    indices: Tensor | None,
    counts: Tensor | None,
    block: int,
    scales: list[float],
) -> tuple[Tensor, Tensor]:
    """The kernel where there is one for this GPU, these keys and these blocks."""
    cache, lists = cache_of(tensors, scales), (indices, counts)
    hopper = is_hopper(q.get_device())
    if hopper and _device().fits(q, cache, lists, block, scales[0]):
        found: tuple[Tensor, Tensor] = _device().run(q, starts, cache, lists, block, scales[0])
    elif has_triton() and _triton().fits(q, cache, indices, block, hopper):
        found = _triton().run(q, starts, cache, lists, block, scales[0])
    else:
        found = run_reference(q, starts, tensors, indices, counts, block, scales)
    return found


def _gradient_on_gpu(
    given: list[Tensor],
    kept: list[Tensor],
    starts: Tensor,
    tensors: list[Tensor],
    lists: list[Tensor],
    block: int,
    scales: list[float],
    of_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """By torch, or by Triton where calls take it."""
    cache, both = cache_of(tensors, scales), both_of(lists)
    if not has_triton() or not _triton().fits(kept[0], cache, both[0], block, False):
        return run_gradient_reference(given, kept, starts, tensors, lists, block, scales, of_keys)
    found: tuple[Tensor, Tensor, Tensor] = _triton_gradient().run(
        (given[0], given[1]), kept, starts, cache, both, block, scales[0], of_keys
    )
    return found


register_on_gpu(_run_on_gpu, _gradient_on_gpu)


def has_triton() -> bool:
    """Whether calls take it, and it is installed; it is not imported."""
    return TRITON and _is_installed("triton")


@once
def _is_installed(name: str) -> bool:
    return find_spec(name) is not None


@once
def _device() -> ModuleType:
    """The launch, imported late: a process on the CPU needs neither a compiler nor a driver."""
    from . import device

    return device


@once
def _triton() -> ModuleType:
    from . import triton  # Half a second, which nobody pays whom the other kernel serves.

    return triton


@once
def _triton_gradient() -> ModuleType:
    from . import triton_gradient

    return triton_gradient
