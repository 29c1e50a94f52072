"""The best blocks of keys of each sequence: checks, plan, run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._call import is_plain
from .._product import Plan, is_hopper
from ..score_blocks.key_blocks import KeyBlocks, check_keys, count_change
from ..score_blocks.layout import refused_choice, refused_newest
from ..score_blocks.op import check_kind, checked_blocks, score_blocks
from ..select.op import check_count, limit_of, row_numbers, select, width_of
from .dispatch import (
    Lists,
    append_in_turn,
    register_on_gpu,
    row_lengths,
    run_in_turn,
    traced,
    traced_both,
)


@dataclass(frozen=True)
class BlockBudget:
    """How many blocks of a sequence are chosen, and which must be: the arguments of `select`.

    Attributes:
        k: At most so many; a number, or int32 [batch, kv_heads].
        top_p: Only until they hold that part of the mass; a number, or float32 [batch, kv_heads].
        threshold: Only scores that are not below it; a number, or float32 [batch, kv_heads].
        sink: First blocks that are chosen whatever their scores; they count against k.
        recent: Last ones, likewise.
        most: Columns of the result; None: those of the largest k that could be.

    Example:
        >>> BlockBudget(32, sink=1, recent=1).by_rank, BlockBudget(32, top_p=0.9).by_rank
        (True, False)
    """

    k: int | Tensor
    top_p: float | Tensor | None = None
    threshold: float | Tensor | None = None
    sink: int = 0
    recent: int = 0
    most: int | None = None

    @property
    def by_rank(self) -> bool:
        """Whether nothing but k ends a list."""
        return self.top_p is None and self.threshold is None


def select_blocks(
    q: Tensor,
    blocks: KeyBlocks,
    lengths: Tensor,
    budget: int | BlockBudget,
    *,
    kind: str = "bound",
    scale: float | None = None,
    keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the blocks of keys that one query a head of each sequence should attend to.

    What `select` chooses of the scores of `score_blocks`, bit for bit: of the blocks that each
    sequence has, by one score for each head of keys. A kernel on a Hopper GPU does both in one
    launch, for whatever `score_blocks` has a kernel for, up to 8,192 blocks a sequence and without
    `top_p` and `threshold`; else there are two. `explain_select_blocks` says which.

    Args:
        q: [batch, heads, dim], float32, bfloat16 or float16; heads a multiple of those of keys.
        blocks: Kept by `append_keys`.
        lengths: int32 [batch], tokens of each sequence.
        budget: How many blocks; a number alone is k.
        kind: "bound", "mean" or "mass", as for `score_blocks`.
        scale: Of q.k, positive; None: 1 / sqrt(dim).
        keys: [batch, new, kv_heads, dim], the last tokens of each sequence, counted by `lengths`:
            taken in first, in place, as for `score_blocks`; None: `blocks` know all tokens.

    Returns:
        indices: int32 [batch, kv_heads, most], ascending, -1 behind the chosen ones.
        counts: int32 [batch, kv_heads].

    Raises:
        ArgumentError: Arguments do not fit each other.
        UnsupportedError: A CUDA graph is being captured, and the kernel is not loaded yet.

    Example:
        >>> import torch
        >>> from hopsparse.ops import append_keys
        >>> blocks = KeyBlocks.empty((1, 1, 4, 1), block=2)
        >>> keys = torch.tensor([0.0, 1, 9, 3, 2, 2, 1]).view(1, 7, 1, 1)
        >>> append_keys(blocks, keys, torch.tensor([0]).int())
        >>> q, lengths = torch.ones(1, 1, 1), torch.tensor([7]).int()
        >>> select_blocks(q, blocks, lengths, BlockBudget(2, recent=1))[0].tolist()
        [[[1, 3]]]
        >>> newest = torch.full((1, 1, 1, 1), 5.0)
        >>> select_blocks(q, blocks, lengths + 1, 2, keys=newest)[0].tolist()
        [[[1, 3]]]
    """
    check_kind("select_blocks", kind)
    factor = checked_blocks("select_blocks", q, blocks, lengths, scale)
    if keys is not None:
        check_keys("select_blocks", blocks, keys)
    budget = budget if isinstance(budget, BlockBudget) else BlockBudget(budget)
    ks, sizes = _checked_budget(budget, blocks)
    if not budget.by_rank:
        scores = score_blocks(q, blocks, lengths, kind=kind, scale=scale, keys=keys)
        return _selected(scores, row_lengths(lengths, blocks.block, scores.shape[1]), budget)
    return _by_rank(q, blocks, keys, (lengths, ks, blocks.block, kind, factor, sizes))


def _by_rank(
    q: Tensor, blocks: KeyBlocks, keys: Tensor | None, asked: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """By one operator; `asked` is what it takes behind what is kept, and behind keys."""
    kept = [blocks.low, blocks.high, blocks.total]
    on_gpu = q.is_cuda and is_plain(q, keys)
    if keys is not None:
        run = _run_both_on_gpu if on_gpu else traced_both
        return run(q.detach(), kept, keys.detach(), *asked)
    indices, counts = (_run_on_gpu if on_gpu else traced)(q.detach(), kept, *asked)
    return indices, counts


def _selected(scores: Tensor, there: Tensor, budget: BlockBudget) -> tuple[Tensor, Tensor]:
    given = {each.name: getattr(budget, each.name) for each in fields(budget)}
    return select(scores, lengths=there, **given)


def _checked_budget(budget: BlockBudget, blocks: KeyBlocks) -> tuple[Tensor | None, list[int]]:
    """K of each row or none; k of all rows, width, sink and recent, as `select` has them."""
    for name in ("sink", "recent"):
        check_count(name, getattr(budget, name))
    rows, count = blocks.low[..., 0], blocks.low.shape[2]
    limit_of(budget.top_p, budget.threshold, rows)  # before a key is taken in
    width = width_of(budget.k, budget.most, count)
    ks, k_of_all = row_numbers("k", budget.k, rows, torch.int32)
    sizes = [int(k_of_all), width, min(budget.sink, count), min(budget.recent, count)]
    return None if ks is None else ks.view(rows.shape[:2]), sizes


def explain_select_blocks(
    q: Tensor,
    blocks: KeyBlocks,
    budget: int | BlockBudget,
    kind: str = "bound",
    keys: Tensor | None = None,
) -> Plan:
    """What `select_blocks` runs for these arguments, and why.

    Args:
        q: As there; only its shape, dtype and device are looked at.
        blocks: As there.
        budget: As there.
        kind: As there.
        keys: As there.

    Returns:
        A plan named "kernel" where one launch does all, else "in turn".

    Raises:
        ArgumentError: There is no such kind.

    Example:
        >>> blocks = KeyBlocks.empty((1, 2, 4, 64), block=64)
        >>> explain_select_blocks(torch.ones(1, 8, 64), blocks, 2).name
        'in turn'
    """
    check_kind("select_blocks", kind)
    by_rank = not isinstance(budget, BlockBudget) or budget.by_rank
    why = None if by_rank else "top_p and threshold have no kernel that scores too"
    if not q.is_cuda or not is_hopper(q.get_device()):
        why = f"{q.device} is no Hopper GPU"
    kept = (blocks.low, blocks.high, blocks.total)
    why = why or refused_choice(q, kept, blocks.block, kind)
    apart = None if keys is None else refused_newest(kept, keys, blocks.block)
    if apart:
        why = why or f"keys are taken in by append_keys: {apart}"
    if why:
        return Plan("select_blocks", "in turn", why)
    takes = "" if keys is None else "takes in a key, "
    return Plan("select_blocks", "kernel", f"one launch {takes}scores the blocks and chooses")


def _run_on_gpu(
    q: Tensor,
    kept: list[Tensor],
    lengths: Tensor,
    k: Tensor | None,
    block: int,
    kind: str,
    scale: float,
    sizes: list[int],
) -> list[Tensor]:
    """The kernel where there is one for this GPU and these blocks, and something to choose."""
    low, high, total = kept
    refused = refused_choice(q, (low, high, total), block, kind) or sizes[1] == 0
    if refused or not is_hopper(q.get_device()):
        return run_in_turn(q, kept, lengths, k, block, kind, scale, sizes)
    device = _device()
    wanted, choice = device.Wanted(kind, scale, False), device.Choice(k, sizes)
    found: list[Tensor] = device.run(q, (low, high, total), lengths, block, wanted, choice)
    return found


def _run_both_on_gpu(q: Tensor, kept: list[Tensor], keys: Tensor, *asked: Any) -> Lists:
    """One launch where a kernel takes these keys; `asked` is what `_run_on_gpu` takes then."""
    lengths, k, block, kind, scale, sizes = asked
    low, high, total = kept
    refused = (
        refused_choice(q, (low, high, total), block, kind)
        or refused_newest((low, high, total), keys, block)
        or sizes[1] == 0
    )
    if refused or not is_hopper(q.get_device()):
        return append_in_turn(q, kept, keys, *asked)
    device = _device()
    wanted, choice = device.Wanted(kind, scale, False, keys=keys), device.Choice(k, sizes)
    indices, counts = device.run(q, (low, high, total), lengths, block, wanted, choice)
    count_change((low, high, total))
    return indices, counts


register_on_gpu("select_blocks", _run_on_gpu)
register_on_gpu("append_select_blocks", _run_both_on_gpu)


@cache
def _device() -> ModuleType:
    """The launch, imported late: a process on the CPU needs neither a compiler nor a driver."""
    from ..score_blocks import choose

    return choose
