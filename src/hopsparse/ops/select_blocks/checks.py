"""What is verified of select_blocks: the blocks that a sort of the scores chooses, in one launch.

Scores are verified where they are made (`score_blocks`): here they are taken as they are. So is
what `append_keys` keeps of a key, which the same launch may take in.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...verify import Check, Expected, Trial
from ..score_blocks.key_blocks import KeyBlocks, append_keys
from ..score_blocks.op import score_blocks
from .op import BlockBudget, select_blocks

_OP = "select_blocks"
_LENGTHS = [0, 1, 700, 1024]
_BLOCK, _ROOM, _KV_HEADS = 16, 64, 2
# The quick set of a GPU: each dim and kind.
_FIRST = ("64x1-bound-k", "128x4-mass-ends", "256x4-mean-ends")
_BUDGETS = {"k": BlockBudget(9), "ends": BlockBudget(12, sink=2, recent=3)}


def checks() -> Iterator[Check]:
    """Every dim, group of query heads, kind of score and budget; and keys that are taken in."""
    for dim in (64, 128, 256):
        for group in (1, 4):
            for kind in ("bound", "mean", "mass"):
                for budget in _BUDGETS:
                    trials = partial(_chosen, dim, group, kind, budget)
                    quick = dim == 128 and group == 4
                    case = f"{dim}x{group}-{kind}-{budget}"
                    first = case in _FIRST
                    yield Check(_OP, case, "bfloat16", "", trials, quick=quick, first=first)
                case, quick = f"{dim}x{group}-{kind}-newest", group == 4
                trials = partial(_taken_in, dim, group, kind)
                first = quick and kind == "bound"
                yield Check(_OP, case, "bfloat16", "", trials, quick=quick, first=first)


def _chosen(dim: int, group: int, kind: str, budget: str, device: torch.device) -> Iterator[Trial]:
    blocks = _blocks(dim, device)
    q = torch.randn(len(_LENGTHS), _KV_HEADS * group, dim).bfloat16().to(device)
    lengths = torch.tensor(_LENGTHS).int().to(device)
    scores = score_blocks(q, blocks, lengths, kind=kind).cpu()
    indices, counts = _sorted(scores, _BUDGETS[budget])
    run = partial(select_blocks, q, blocks, lengths, _BUDGETS[budget], kind=kind)
    yield Trial(run, [Expected.bits(indices, "indices"), Expected.bits(counts, "counts")])


def _taken_in(dim: int, group: int, kind: str, device: torch.device) -> Iterator[Trial]:
    """The newest key of each sequence: lists, and what is kept."""
    before = _blocks(dim, torch.device("cpu"))
    after = _copied(before, torch.device("cpu"))
    lengths, new = torch.tensor(_LENGTHS).int(), len(_LENGTHS)
    keys = torch.randn(new, 1, _KV_HEADS, dim).bfloat16()
    append_keys(after, keys, (lengths - 1).clamp(min=0), (lengths > 0).int())
    kept = (after.low, after.high, after.total)
    q = torch.randn(new, _KV_HEADS * group, dim).bfloat16().to(device)
    there = lengths.to(device)
    scores = score_blocks(q, _copied(after, device), there, kind=kind)
    lists = _sorted(scores.cpu(), _BUDGETS["ends"])

    def run() -> list[Tensor]:
        blocks, newest = _copied(before, device), keys.to(device)
        found = select_blocks(q, blocks, there, _BUDGETS["ends"], kind=kind, keys=newest)
        return [*found, blocks.low, blocks.high, blocks.total]

    names = ("indices", "counts", "low", "high", "total")
    yield Trial(run, [Expected.bits(*each) for each in zip((*lists, *kept), names, strict=True)])


def _blocks(dim: int, device: torch.device) -> KeyBlocks:
    size = (len(_LENGTHS), _KV_HEADS, _ROOM, dim)
    low = torch.randn(size).bfloat16()
    high = low + torch.rand(size).bfloat16()
    total = (low.float() + high.float()) * (_BLOCK / 2)
    return KeyBlocks(low.to(device), high.to(device), total.to(device), _BLOCK)


def _copied(blocks: KeyBlocks, device: torch.device) -> KeyBlocks:
    kept = [each.to(device, copy=True) for each in (blocks.low, blocks.high, blocks.total)]
    return KeyBlocks(kept[0], kept[1], kept[2], blocks.block)


def _sorted(scores: Tensor, budget: BlockBudget) -> tuple[Tensor, Tensor]:
    """Last blocks, then first ones, then the others by their scores; the lowest of equal ones."""
    assert isinstance(budget.k, int)
    indices = torch.full((*scores.shape[:2], budget.k), -1, dtype=torch.int32)
    counts = torch.zeros(scores.shape[:2], dtype=torch.int32)
    for b, length in enumerate(_LENGTHS):
        there = -(-length // _BLOCK)
        ends = [*range(there - 1, -1, -1)][: budget.recent]
        ends += [each for each in range(min(budget.sink, there)) if each not in ends]
        for head in range(_KV_HEADS):
            row = scores[b, head].tolist()
            others = sorted((-row[i], i) for i in range(there) if i not in ends)
            chosen = [*ends, *(i for _, i in others)][: budget.k]
            counts[b, head] = len(chosen)
            indices[b, head, : len(chosen)] = torch.tensor(sorted(chosen)).int()
    return indices, counts
