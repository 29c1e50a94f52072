"""Scores and the best blocks in one launch on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...launch import KnownLaunches
from . import plan, starts
from .device import Wanted, in_pieces, kernel_of, pack, set_asks, shape_of, turn_of
from .layout import Kept

_BOUND = KnownLaunches()


class Choice(NamedTuple):
    """How many blocks of each head of keys.

    Attributes:
        k: int32 [batch, kv_heads], or None: that of `sizes`.
        sizes: k of all rows, width, sink, recent, as `select` has them.
    """

    k: Tensor | None
    sizes: list[int]


def run(
    q: Tensor, kept: Kept, lengths: Tensor, block: int, wanted: Wanted, choice: Choice
) -> list[Tensor]:
    """Indices and counts of arguments that were checked, and that the kernel takes.

    Args:
        q: [batch, heads, dim] on a Hopper GPU.
        kept: What is kept of keys.
        lengths: int32 [batch].
        block: Tokens of a block.
        wanted: By which scores; not per head.
        choice: How many.

    Raises:
        UnsupportedError: No driver; or a graph is captured and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    shape = (q.shape[0], kept[0].shape[1])
    indices = q.new_empty((*shape, choice.sizes[1]), dtype=torch.int32)
    results = [indices, q.new_empty(shape, dtype=torch.int32)]
    k = None if choice.k is None else choice.k.contiguous()
    asked = (lengths.contiguous(), block, wanted, Choice(k, choice.sizes))
    enqueue(results, in_pieces(q), kept, asked)
    return results


def enqueue(
    results: list[Tensor],
    q: Tensor,
    kept: Kept,
    asked: tuple[Tensor, int, Wanted, Choice],
    cluster: int | None = None,
    asks: starts.Asks | None = None,
) -> None:
    """Put the kernel on torch's current stream. Nothing waits for it, and nothing is checked.

    Args:
        results: What `run` returns, contiguous; all is written.
        q: As for `run`, contiguous, from 16 bytes on, like all the rest.
        kept: What is kept of keys.
        asked: lengths, block, wanted and choice of `run`.
        cluster: Blocks of threads for a head of keys, one of `plan.CLUSTERS`; None: what fits.
        asks: What it asks the L2 cache for; None: what pays.
    """
    wanted = asked[2]
    args = pack_choice(results, q, kept, asked)
    device = q.get_device()
    shape, sizes = shape_of(q, kept, wanted)
    turn = turn_of(shape, sizes, cluster, device)
    # The argument holds all that a launch depends on, but for its kernel, its grid and its stream.
    key = (bytes(args), q.shape, shape, cluster, asks, device, turn)
    bound = _BOUND.get(key)
    if bound is None:
        kernel = kernel_of(plan.choose_spec_for, shape, sizes, cluster, device)
        size = kernel.spec.cluster[0]
        work = starts.work_of(shape, *sizes, size)
        set_asks(args.of, work, asks, turn, device)
        grid = (size, kept[0].shape[1], q.shape[0])
        bound = _BOUND.keep(key, kernel.bind(grid, bytes(args), turn.stream, pdl=turn.early))
    bound()


def pack_choice(
    results: list[Tensor], q: Tensor, kept: Kept, asked: tuple[Tensor, int, Wanted, Choice]
) -> plan.ChooseArgs:
    """The kernel's argument."""
    lengths, block, wanted, choice = asked
    k_of_all, width, sink, recent = choice.sizes
    addresses = [0 if each is None else each.data_ptr() for each in (choice.k, *results)]
    args = pack(None, q, kept, lengths, block, wanted)
    # A k beyond 32 bits is any k that no row has so many columns for.
    return plan.ChooseArgs(args, *addresses, width, min(k_of_all, 2**31 - 1), sink, recent)
