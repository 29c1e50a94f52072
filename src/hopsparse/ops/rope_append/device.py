"""rope_append on a GPU: one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...launch import (
    Bound,
    KnownLaunches,
    Turn,
    current_stream,
    device_facts,
    kernel_for,
    starts_early,
)
from . import plan
from .reference import Norms

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_WORD = 8  # bytes that a lane reads and writes at a time, at most

_BOUND = KnownLaunches()


def fits(
    qkv: Tensor, turns: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], norms: Norms
) -> bool:
    """Whether there is a kernel: 16 bits, a known dimension, heads that are contiguous.

    Args:
        qkv: [batch, tokens, all heads * dim].
        turns: Cosines and sines.
        cache: Keys and values.
        norms: Weights, or None.
    """
    batch, tokens, _ = qkv.shape
    if qkv.dtype not in _NAMES or cache[0].shape[3] not in plan.DIMS:
        return False
    if not 0 < batch * tokens <= plan.MOST_TOKENS or cache[0].numel() == 0:
        return False
    return all(map(_readable, (qkv, *turns, *cache, *(norms or ()))))


def _readable(each: Tensor) -> bool:
    """Whether rows are contiguous and start on whole words."""
    steps = [each.stride(i) for i in range(each.dim() - 1) if each.shape[i] > 1]
    aligned = not any(step * each.element_size() % _WORD for step in steps)
    return each.stride(-1) == 1 and each.data_ptr() % _WORD == 0 and aligned


def run(
    qkv: Tensor,
    turns: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    ends: Tensor,
    norms: Norms,
    eps: float,
    count: Tensor | None,
) -> Tensor:
    """Queries of arguments that were checked, and that fit.

    Args:
        qkv: [batch, tokens, all heads * dim] on a Hopper GPU.
        turns: Cosines and sines [batch or 1, tokens, dim].
        cache: Keys and values, changed in place.
        ends: int32 [batch].
        norms: Weights, or None.
        eps: Added to the mean square.
        count: int64, takes the tokens too; or None.

    Raises:
        UnsupportedError: No driver; or a graph is captured and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    batch, tokens, width = qkv.shape
    _, kv_heads, _, dim = cache[0].shape
    if batch > 1 and tokens > 1 and qkv.stride(0) != tokens * qkv.stride(1):
        qkv = qkv.contiguous()  # the kernel counts rows through
    q = qkv.new_empty((batch, tokens, width // dim - 2 * kv_heads, dim))
    args = bytes(pack(q, qkv, turns, cache, ends.contiguous(), norms, eps, count))
    device = qkv.get_device()
    turn = Turn(current_stream(device), starts_early())
    # The argument holds all that a launch depends on, but for its kernel, its grid and its stream.
    key = (args, qkv.shape, qkv.dtype, dim, device, turn)
    bound = _BOUND.get(key)
    if bound is None:
        spec = plan.spec_for(_NAMES[qkv.dtype], dim, norm=norms is not None)
        kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
        rows, count_of_sms = batch * tokens, device_facts(device).sm_count
        shares = plan.shares_for(rows, width // dim, dim, count_of_sms)
        made: Bound = kernel.bind((rows, shares, 1), args, turn.stream, pdl=turn.early)
        bound = _BOUND.keep(key, made)
    bound()
    return q


def pack(
    q: Tensor,
    qkv: Tensor,
    turns: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    ends: Tensor,
    norms: Norms,
    eps: float,
    count: Tensor | None,
) -> plan.Args:
    """The kernel's argument."""
    batch, tokens, width = qkv.shape
    _, kv_heads, room, dim = cache[0].shape
    tensors = (qkv, *turns, *(norms or (None, None)), ends, q, *cache, count)
    row = qkv.stride(1) if tokens > 1 else qkv.stride(0) if batch > 1 else width
    # One row of turns may serve all sequences.
    steps = [
        step for each in turns for step in (each.stride(0) * (each.shape[0] > 1), each.stride(1))
    ]
    strides = (row, *steps, *cache[0].stride()[:3], *cache[1].stride()[:3])
    sizes = (tokens, width // dim - 2 * kv_heads, kv_heads, room)
    return plan.Args(
        *(0 if each is None else each.data_ptr() for each in tensors), *strides, *sizes, eps
    )
