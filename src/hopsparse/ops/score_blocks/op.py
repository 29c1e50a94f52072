"""Scores and masses of blocks of keys: checks, run."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._paged import QUERY_DTYPES, check_whole_numbers, looks_at_values
from .._product import is_dense, told
from . import reference
from .key_blocks import KeyBlocks

_KINDS = ("bound", "mean", "mass")


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
) -> Tensor:
    """Score the blocks of keys of each sequence for one query a head.

    There is no kernel yet: torch on any device.

    Args:
        q: [batch, heads, dim], float32, bfloat16 or float16; heads a multiple of those of keys.
        blocks: Kept by `append_keys`.
        lengths: int32 [batch], tokens of each sequence.
        kind: "bound": no score of the block is larger, in real numbers; "mean": the score of the
            mean key; "mass": log of the most that exp(score) of the block can sum to.
        scale: Of q.k, positive; None: 1 / sqrt(dim).
        per_head: A score for each query head; else one for each head of keys: the largest part
            of its mass that a query head may have there, as a logarithm.

    Returns:
        float32 [batch, kv_heads or heads, blocks]; -inf behind the end of a sequence.

    Raises:
        ArgumentError: Arguments do not fit each other.

    Example:
        >>> blocks = KeyBlocks.empty((1, 1, 2, 1), block=1)
        >>> blocks.high.copy_(torch.tensor([[[[3.0], [5.0]]]])) is blocks.high
        True
        >>> q, lengths = torch.ones(1, 1, 1), torch.tensor([1]).int()
        >>> score = score_blocks(q, blocks, lengths, per_head=True)
        >>> score[0, 0, 1].item()
        -inf
    """
    if kind not in _KINDS:
        raise ArgumentError(
            f"score_blocks: kind={kind!r}", need="one of " + ", ".join(_KINDS), hint="bound"
        )
    found = _ranges("score_blocks", q, blocks, lengths, scale)
    scores = reference.score(found, kind)
    return scores if per_head else reference.shared(scores, blocks.low.shape[1])


def block_masses(
    q: Tensor, blocks: KeyBlocks, lengths: Tensor, *, scale: float | None = None
) -> Masses:
    """Bound the mass of attention in each block, for `missed_mass` and `select_certified`.

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
    found = _ranges("block_masses", q, blocks, lengths, scale)
    upper, lower = reference.log_masses(found)
    slack = found.slack.where(found.counts > 0, 0.0)
    slack = slack.amax(-1) if slack.shape[-1] else slack.new_zeros(slack.shape[:-1])
    return Masses(upper, lower, slack.double(), blocks.block)


def _ranges(
    op: str, q: Tensor, blocks: KeyBlocks, lengths: Tensor, scale: float | None
) -> reference.Ranges:
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
    return reference.ranges(q.detach(), blocks, lengths, _checked_scale(op, scale, dim))


def _checked_scale(op: str, scale: float | None, dim: int) -> float:
    if scale is None:
        return reference.default_scale(dim)
    if not isinstance(scale, Real) or not 0 < scale < torch.inf:
        raise ArgumentError(
            f"{op}: scale={scale!r}", need="a positive number", hint="None: 1 / sqrt(dim)"
        )
    return float(scale)
