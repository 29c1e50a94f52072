"""score_blocks and append_keys on a GPU: one launch each, cut by lengths that are on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

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
    max_active_clusters,
    starts_early,
)
from ...plan import KernelSpec
from ...ranges import in_phase
from . import plan, reference, starts
from .layout import NAMES, Kept, by_tensor_cores

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

_BOUND = KnownLaunches()


class Wanted(NamedTuple):
    """What is asked of blocks.

    Attributes:
        kind: "bound", "mean" or "mass".
        scale: Of q.k.
        per_head: A score for each query head.
        keys: [batch, 1, kv_heads, dim], the newest ones, taken in before they are scored; or None.
        fused: By products in float32 also where the tensor cores would multiply; to compare.
    """

    kind: str
    scale: float
    per_head: bool
    fused: bool = False
    keys: Tensor | None = None


@in_phase("select", "score_blocks")
def run(q: Tensor, kept: Kept, lengths: Tensor, block: int, wanted: Wanted) -> Tensor:
    """Scores of arguments that were checked, and that a kernel takes.

    Args:
        q: [batch, heads, dim] on a Hopper GPU.
        kept: What is kept of keys; changed in place where a key is taken in.
        lengths: int32 [batch].
        block: Tokens of a block.
        wanted: Which scores.

    Raises:
        UnsupportedError: No driver; or a graph is captured and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    q = in_pieces(q)
    heads = q.shape[1] if wanted.per_head else kept[0].shape[1]
    scores = q.new_empty((q.shape[0], heads, kept[0].shape[2]), dtype=torch.float32)
    enqueue(scores, q, kept, lengths.contiguous(), block, wanted)
    return scores


def in_pieces(q: Tensor) -> Tensor:
    """Queries as kernels read them: contiguous, from 16 bytes on."""
    q = q.contiguous()
    return q.clone() if q.data_ptr() % 16 else q


def enqueue(
    scores: Tensor,
    q: Tensor,
    kept: Kept,
    lengths: Tensor,
    block: int,
    wanted: Wanted,
    cluster: int | None = None,
    asks: starts.Asks | None = None,
) -> None:
    """Put the kernel on torch's current stream. Nothing waits for it, and nothing is checked.

    Args:
        scores: float32 [batch, heads or kv_heads, blocks], contiguous; all is written.
        q: As for `run`, contiguous, from 16 bytes on, like all the rest.
        kept: What is kept of keys.
        lengths: int32 [batch], contiguous.
        block: Tokens of a block.
        wanted: Which scores.
        cluster: Blocks of threads for a head of keys, one of `plan.CLUSTERS`; None: what fits.
        asks: What it asks the L2 cache for; None: what pays.
    """
    args = pack(scores, q, kept, lengths, block, wanted)
    device = q.get_device()
    shape, sizes = shape_of(q, kept, wanted)
    turn = turn_of(shape, sizes, cluster, device)
    # The argument holds all that a launch depends on, but for its kernel, its grid and its stream.
    key = (bytes(args), q.shape, shape, cluster, asks, device, turn)
    bound = _BOUND.get(key)
    if bound is None:
        kernel = kernel_of(plan.spec_for, shape, sizes, cluster, device)
        size = kernel.spec.cluster[0]
        work = starts.work_of(shape, *sizes, size)
        set_asks(args, work, asks, turn, device)
        grid = (size, kept[0].shape[1], q.shape[0])
        bound = _BOUND.keep(key, kernel.bind(grid, bytes(args), turn.stream, pdl=turn.early))
    bound()


def shape_of(q: Tensor, kept: Kept, wanted: Wanted) -> tuple[plan.Shape, tuple[int, int]]:
    """The shape of the kernel; heads of keys of all sequences, and blocks that each may have."""
    batch, heads, dim = q.shape
    kv_heads, count = kept[0].shape[1:3]
    tensor = by_tensor_cores(q, kept, wanted.kind) and not wanted.fused
    shape = plan.shape_for(wanted.kind, NAMES[kept[0].dtype], dim, heads // kv_heads, tensor)
    assert shape is not None
    return shape, (batch * kv_heads, count)


def turn_of(shape: plan.Shape, sizes: tuple[int, int], cluster: int | None, device: int) -> Turn:
    """Where the launch stands in line: it starts early where it may, and where that pays."""
    early = _early_pays(shape, sizes, cluster, device_facts(device).sm_count) and starts_early()
    return Turn(current_stream(device), early)


@lru_cache(maxsize=1024)
def _early_pays(
    shape: plan.Shape, sizes: tuple[int, int], cluster: int | None, sm_count: int
) -> bool:
    size = plan.clusters_for(*sizes, sm_count)[0] if cluster is None else cluster
    return starts.early_pays(starts.work_of(shape, *sizes, size), sm_count)


def set_asks(
    args: plan.Args, work: starts.Work, asks: starts.Asks | None, turn: Turn, device: int
) -> None:
    """Write into a kernel's argument what it asks the L2 cache for; None: what pays."""
    if asks is None:
        asks = starts.asks_of(work, device_facts(device).sm_count, early=turn.early)
    args.ask_first, args.ask_later = asks


def kernel_of(
    spec_for: Callable[[plan.Shape, int], KernelSpec],
    shape: plan.Shape,
    sizes: tuple[int, int],
    cluster: int | None,
    device: int,
) -> Kernel:
    """The kernel with the largest clusters that are of use, and of which all run at once.

    Args:
        spec_for: The kernel for a shape and a cluster.
        shape: As `plan.shape_for` gives it.
        sizes: Heads of keys of all sequences, and blocks of keys that each has room for.
        cluster: Blocks of threads for a head of keys; None: what fits.
        device: Number of the GPU.
    """
    pairs, rows = sizes
    clusters = plan.clusters_for(pairs, rows, device_facts(device).sm_count)
    *large, last = clusters if cluster is None else (cluster,)
    for size in large:
        kernel = _loaded(spec_for(shape, size), device)
        if max_active_clusters(kernel) >= pairs:
            return kernel
    return _loaded(spec_for(shape, last), device)


def _loaded(spec: KernelSpec, device: int) -> Kernel:
    return kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)


def pack(
    scores: Tensor | None, q: Tensor, kept: Kept, lengths: Tensor, block: int, wanted: Wanted
) -> plan.Args:
    """The kernel's argument, which asks for nothing; no scores where the kernel chooses by them."""
    kv_heads, count = kept[0].shape[1:3]
    keys = wanted.keys
    tensors = (q, *kept, lengths, scores, keys)
    addresses = [0 if each is None else each.data_ptr() for each in tensors]
    strides = [stride for each in kept for stride in each.stride()[:3]]
    strides += [0, 0] if keys is None else [keys.stride(0), keys.stride(2)]
    sizes = (count, block, kv_heads, q.shape[1] // kv_heads)
    slack = reference.slack_factor(q.shape[2], block)
    types = (_TYPES[q.dtype], wanted.per_head, False, False, _TYPES[kept[0].dtype])
    return plan.Args(*addresses, *strides, *sizes, *types, wanted.scale, slack)


def append(kept: Kept, keys: Tensor, starts: Tensor, counts: Tensor | None, block: int) -> None:
    """Take in keys, of arguments that were checked, and that a kernel takes.

    Args:
        kept: What is kept of keys, changed in place.
        keys: [batch, new, kv_heads, dim] on a Hopper GPU.
        starts: int32 [batch].
        counts: int32 [batch] or None.
        block: Tokens of a block.

    Raises:
        UnsupportedError: No driver; or a graph is captured and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    starts = starts.contiguous()
    counts = None if counts is None else counts.contiguous()
    args = bytes(pack_append(kept, keys, starts, counts, block))
    device = keys.get_device()
    turn = Turn(current_stream(device), starts_early())
    key = (args, keys.shape, keys.dtype, device, turn)
    bound = _BOUND.get(key)
    if bound is None:
        bound = _BOUND.keep(key, _bind_append(args, keys, kept[0].shape[2], block, turn))
    bound()


def _bind_append(args: bytes, keys: Tensor, count: int, block: int, turn: Turn) -> Bound:
    batch, new, kv_heads, dim = keys.shape
    kernel = _loaded(plan.append_spec_for(NAMES[keys.dtype], dim), keys.get_device())
    grid = (plan.append_grid(count, block, kv_heads, new), batch, 1)
    return kernel.bind(grid, args, turn.stream, pdl=turn.early)


def pack_append(
    kept: Kept, keys: Tensor, starts: Tensor, counts: Tensor | None, block: int
) -> plan.AppendArgs:
    """The argument of the kernel that takes in keys."""
    tensors = (*kept, keys, starts, counts)
    addresses = [0 if each is None else each.data_ptr() for each in tensors]
    strides = [stride for each in kept for stride in each.stride()[:3]]
    strides += keys.stride()[:3]
    sizes = (kept[0].shape[2], block, keys.shape[2], keys.shape[1])
    return plan.AppendArgs(*addresses, *strides, *sizes)
