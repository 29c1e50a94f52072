"""Scores and masses of blocks of keys: checks, run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from numbers import Real
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._call import is_plain
from .._paged import QUERY_DTYPES, check_whole_numbers, looks_at_values
from .._product import Plan, is_dense, is_hopper, told
from . import reference
from .dispatch import append_and_score, register_on_gpu, run_reference, traced, traced_both
from .key_blocks import KeyBlocks, check_keys, count_change
from .layout import refused_newest, refused_scores
from .plan import KINDS


@dataclass(frozen=True)
class Masses:
    """What attention can have in each block, before any key is read.

    Attributes:
        upper: float64 [batch, heads, blocks]: log of the most that exp(score) can sum to.
        lower: log of the least.
        slack: float64 [batch, heads]: how far a score in float32 may be off.
        block: Tokens of a block.
    """

    upper: Tensor
    lower: Tensor
    slack: Tensor
    block: int


def score_blocks(
    q: Tensor,
    blocks: KeyBlocks,
    lengths: Tensor,
    *,
    kind: str = "bound",
    scale: float | None = None,
    per_head: bool = False,
    keys: Tensor | None = None,
) -> Tensor:
    """Score the blocks of keys of each sequence for one query a head.

    A kernel on a Hopper GPU, in one launch, for heads of 64, 128 or 256 and up to 16 query heads
    for each of keys, where rows of what is kept start on 16 bytes; else torch. `explain_scores`
    says which. Sums of the kernel are of float32: its bounds hold like those of torch, and no score
    differs by more than `hopsparse.measure.block_error` says. Runs do not differ.

    Args:
        q: [batch, heads, dim], float32, bfloat16 or float16; heads a multiple of those of keys.
        blocks: Kept by `append_keys`.
        lengths: int32 [batch], tokens of each sequence.
        kind: "bound": no score of the block is larger, in real numbers; "mean": the score of the
            mean key; "mass": log of the most that exp(score) of the block can sum to.
        scale: Of q.k, positive; None: 1 / sqrt(dim).
        per_head: A score for each query head; else one for each head of keys: the largest part
            of its mass that a query head may have there, as a logarithm.
        keys: [batch, new, kv_heads, dim] in the dtype of `blocks.low`: the last tokens of each
            sequence, which `lengths` count. They are taken in first, in place and bit for bit as
            `append_keys(blocks, keys, lengths - new)` does, by the same launch where it is one
            token and rows start on 16 bytes. A sequence of fewer tokens has the last of them. None:
            `blocks` know all tokens.

    Returns:
        float32 [batch, kv_heads or heads, blocks]; -inf behind the end of a sequence.

    Raises:
        ArgumentError: Arguments do not fit each other.
        UnsupportedError: A CUDA graph is being captured, and the kernel is not loaded yet.

    Example:
        >>> blocks = KeyBlocks.empty((1, 1, 2, 1), block=1)
        >>> blocks.high.copy_(torch.tensor([[[[3.0], [5.0]]]])) is blocks.high
        True
        >>> q, lengths = torch.ones(1, 1, 1), torch.tensor([1]).int()
        >>> score = score_blocks(q, blocks, lengths, per_head=True)
        >>> score[0, 0, 1].item()
        -inf
    """
    check_kind("score_blocks", kind)
    factor = checked_blocks("score_blocks", q, blocks, lengths, scale)
    kept = [blocks.low, blocks.high, blocks.total]
    asked = (lengths, blocks.block, kind, factor, per_head)
    on_gpu = q.is_cuda and is_plain(q, keys)
    if keys is None:
        return (_run_on_gpu if on_gpu else traced)(q.detach(), kept, *asked)
    check_keys("score_blocks", blocks, keys)
    run = _run_both_on_gpu if on_gpu else traced_both
    return run(q.detach(), kept, keys.detach(), *asked)


def explain_scores(
    q: Tensor, blocks: KeyBlocks, kind: str = "bound", keys: Tensor | None = None
) -> Plan:
    """What `score_blocks` runs for these arguments, and why.

    Args:
        q: As there; only its shape, dtype and device are looked at.
        blocks: As there.
        kind: As there.
        keys: As there.

    Returns:
        A plan named "kernel" where one launch does all, "in turn" where `append_keys` is another,
        else "reference".

    Raises:
        ArgumentError: There is no such kind.

    Example:
        >>> blocks = KeyBlocks.empty((1, 2, 4, 128), block=64)
        >>> explain_scores(torch.ones(1, 8, 128), blocks).name
        'reference'
    """
    check_kind("score_blocks", kind)
    if not q.is_cuda or not is_hopper(q.get_device()):
        return Plan("score_blocks", "reference", f"{q.device} is no Hopper GPU")
    kept = (blocks.low, blocks.high, blocks.total)
    why = refused_scores(q, kept, blocks.block, kind)
    if why:
        return Plan("score_blocks", "reference", why)
    why = None if keys is None else refused_newest(kept, keys, blocks.block)
    if why:
        return Plan("score_blocks", "in turn", f"keys are taken in by append_keys: {why}")
    return Plan("score_blocks", "kernel", "one launch reads what is kept of each block once")


def _run_on_gpu(
    q: Tensor,
    kept: list[Tensor],
    lengths: Tensor,
    block: int,
    kind: str,
    scale: float,
    per_head: bool,
) -> Tensor:
    """The kernel where there is one for this GPU and these blocks."""
    low, high, total = kept
    if not is_hopper(q.get_device()) or refused_scores(q, (low, high, total), block, kind):
        return run_reference(q, kept, lengths, block, kind, scale, per_head)
    device = _device()
    wanted = device.Wanted(kind, scale, per_head)
    found: Tensor = device.run(q, (low, high, total), lengths, block, wanted)
    return found


def _run_both_on_gpu(q: Tensor, kept: list[Tensor], keys: Tensor, *asked: Any) -> Tensor:
    """One launch where a kernel takes these keys; `asked` is what `_run_on_gpu` takes then."""
    lengths, block, kind, scale, per_head = asked
    low, high, total = kept
    refused = refused_scores(q, (low, high, total), block, kind) or refused_newest(
        (low, high, total), keys, block
    )
    if refused or not is_hopper(q.get_device()):
        return append_and_score(q, kept, keys, *asked)
    device = _device()
    wanted = device.Wanted(kind, scale, per_head, keys=keys)
    found: Tensor = device.run(q, (low, high, total), lengths, block, wanted)
    count_change((low, high, total))
    return found


register_on_gpu("score_blocks", _run_on_gpu)
register_on_gpu("append_score_blocks", _run_both_on_gpu)


@cache
def _device() -> ModuleType:
    """The launch, imported late: a process on the CPU needs neither a compiler nor a driver."""
    from . import device

    return device


def block_masses(
    q: Tensor, blocks: KeyBlocks, lengths: Tensor, *, scale: float | None = None
) -> Masses:
    """Bound the mass of attention in each block, for `missed_mass` and `select_certified`.

    Torch on any device: in float64, for which there is no kernel.

    Args:
        q: [batch, heads, dim].
        blocks: Kept by `append_keys`.
        lengths: int32 [batch].
        scale: Of q.k, positive; None: 1 / sqrt(dim).

    Raises:
        ArgumentError: Arguments do not fit each other.

    Example:
        >>> blocks = KeyBlocks.empty((1, 1, 2, 1), block=4)
        >>> masses = block_masses(torch.ones(1, 1, 1), blocks, torch.tensor([8]).int())
        >>> masses.upper.exp().round(decimals=3).flatten().tolist()
        [4.0, 4.0]
    """
    factor = checked_blocks("block_masses", q, blocks, lengths, scale)
    kept = (blocks.low, blocks.high, blocks.total)
    found = reference.ranges(q.detach(), kept, blocks.block, lengths, factor)
    upper, lower = reference.log_masses(found)
    slack = found.slack.where(found.counts > 0, 0.0)
    slack = slack.amax(-1) if slack.shape[-1] else slack.new_zeros(slack.shape[:-1])
    return Masses(upper, lower, slack.double(), blocks.block)


def check_kind(op: str, kind: str) -> None:
    """Refuse a kind of scores that there is not.

    Raises:
        ArgumentError: It is none of `KINDS`.
    """
    if kind not in KINDS:
        raise ArgumentError(f"{op}: kind={kind!r}", need="one of " + ", ".join(KINDS), hint="bound")


def checked_blocks(
    op: str, q: Tensor, blocks: KeyBlocks, lengths: Tensor, scale: float | None
) -> float:
    """The scale, of arguments that fit each other.

    Raises:
        ArgumentError: They do not.
    """
    if not isinstance(blocks, KeyBlocks):
        raise ArgumentError(
            f"{op}: blocks {told(blocks)}", need="KeyBlocks", hint="KeyBlocks.empty(...)"
        )
    batch, kv_heads, count, dim = blocks.low.shape
    fits = is_dense(q) and q.dim() == 3 and q.dtype in QUERY_DTYPES
    if not fits or q.shape[0] != batch or q.shape[2] != dim or q.device != blocks.low.device:
        raise ArgumentError(
            f"{op}: q {told(q)}",
            need=f"[{batch}, heads, {dim}] in float32, bfloat16 or float16 on {blocks.low.device}",
            hint="q[:, :, 0], for one query of [batch, heads, tokens, dim]",
        )
    if kv_heads == 0 or q.shape[1] == 0 or q.shape[1] % kv_heads:
        raise ArgumentError(
            f"{op}: {q.shape[1]} query heads for {kv_heads} of keys",
            need=f"a multiple of {kv_heads}",
            hint=f"{max(1, q.shape[1] // max(1, kv_heads)) * kv_heads} query heads",
        )
    check_whole_numbers(op, "lengths", lengths, q, (batch,))
    if looks_at_values(q):
        wrong = (lengths < 0) | (lengths > count * blocks.block)
        if bool(wrong.any()):
            raise ArgumentError(
                f"{op}: a sequence of {int(lengths[wrong][0])} tokens",
                need=f"0 to {count * blocks.block}, which the blocks have room for",
                hint="the lengths after append_keys",
            )
    return _checked_scale(op, scale, dim)


def _checked_scale(op: str, scale: float | None, dim: int) -> float:
    if scale is None:
        return reference.default_scale(dim)
    if not isinstance(scale, Real) or not 0 < scale < torch.inf:
        raise ArgumentError(
            f"{op}: scale={scale!r}", need="a positive number", hint="None: 1 / sqrt(dim)"
        )
    return float(scale)
