"""What is verified of score_blocks and append_keys: bounds of the keys themselves, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...measure.block_error import mass_error, score_error, shared_error
from ...verify import Check, Expected, Trial
from .key_blocks import KeyBlocks, append_keys
from .op import score_blocks
from .reference import slack_factor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KINDS = ("bound", "mean", "mass")
_INF = torch.inf
# Heads of keys, query heads for each; tokens of each sequence; tokens of a block.
_SHAPES = {
    "one-head": ((1, 1), [333], 16),
    "groups-of-4": ((2, 4), [0, 1, 700, 64], 64),
    "groups-of-7": ((1, 7), [129, 40], 16),
    "groups-of-16": ((1, 16), [1000], 32),
}


# The quick set of a GPU: each kind, dim and dtype, and the largest groups.
_FIRST = (
    ("groups-of-4", 128, torch.bfloat16, "bound"),
    ("groups-of-4", 128, torch.bfloat16, "mean"),
    ("groups-of-4", 128, torch.bfloat16, "mass"),
    ("groups-of-16", 64, torch.float16, "bound"),
    ("groups-of-7", 256, torch.float32, "mass"),
)


@dataclass(frozen=True)
class _Problem:
    q: Tensor
    keys: Tensor  # [batch, kv_heads, tokens, dim], NaN behind the end of a sequence
    lengths: Tensor
    block: int


def checks() -> Iterator[Check]:
    """Every shape, dim, dtype and kind of score; and keys that are taken in, in two parts."""
    for name in _SHAPES:
        for dim in (64, 128, 256):
            for dtype in _DTYPES:
                of = str(dtype).removeprefix("torch.")
                quick = dim == 128 and dtype != torch.float16
                case = f"{name}-{dim}"
                for kind in _KINDS:
                    trials = partial(_scores, name, dim, dtype, kind)
                    first = (name, dim, dtype, kind) in _FIRST
                    scored = f"{case}-{kind}"
                    yield Check("score_blocks", scored, of, "", trials, quick=quick, first=first)
                trials = partial(_appended, name, dim, dtype)
                first = name == "groups-of-7" and (dim == 128 or dtype == torch.bfloat16)
                yield Check("append_keys", case, of, "", trials, quick=quick, first=first)


def _problem(name: str, dim: int, dtype: torch.dtype) -> _Problem:
    (kv_heads, group), lengths, block = _SHAPES[name]
    tokens = -(-max(lengths) // block) * block
    # Small integers over 8: their sums are exact, whoever adds them.
    keys = (torch.randint(-16, 17, (len(lengths), kv_heads, tokens, dim)) / 8).to(dtype)
    behind = torch.arange(tokens) >= torch.tensor(lengths)[:, None]
    keys = keys.masked_fill(behind[:, None, :, None], torch.nan)
    q = torch.randn(len(lengths), kv_heads * group, dim).to(dtype)
    return _Problem(q, keys, torch.tensor(lengths).int(), block)


def _kept(p: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Least, largest and sum of each block by loops' arithmetic in float64; 0 where no key is."""
    batch, kv_heads, tokens, dim = p.keys.shape
    parts = p.keys.double().view(batch, kv_heads, tokens // p.block, p.block, dim)
    low = parts.nan_to_num(_INF).amin(3)
    high = parts.nan_to_num(-_INF).amax(3)
    some = ~low.isinf()
    total = parts.nan_to_num(0.0).sum(3)
    return low.where(some, 0.0), high.where(some, 0.0), total


def _blocks(p: _Problem, device: torch.device) -> KeyBlocks:
    low, high, total = _kept(p)
    dtype = p.keys.dtype
    of_low, of_high = low.to(device, dtype), high.to(device, dtype)
    return KeyBlocks(of_low, of_high, total.to(device, torch.float32), p.block)


def _scores(
    name: str, dim: int, dtype: torch.dtype, kind: str, device: torch.device
) -> Iterator[Trial]:
    p = _problem(name, dim, dtype)
    blocks, q, lengths = _blocks(p, device), p.q.to(device), p.lengths.to(device)
    run = partial(score_blocks, q, blocks, lengths, kind=kind)
    least, most = _range(p, kind)
    yield Trial(partial(run, per_head=True), [Expected.within(least, most, torch.float32)])
    if kind == "bound":
        yield Trial(run, [_shared(least, most, p.keys.shape[1])])


def _range(p: _Problem, kind: str) -> tuple[Tensor, Tensor]:
    """What a score of a query head [batch, heads, blocks] may be, with its roundings."""
    batch, heads, dim = p.q.shape
    kv_heads, group = p.keys.shape[1], heads // p.keys.shape[1]
    # The operator takes scale q in float32, half a unit off.
    q = (p.q.float() * dim**-0.5).double()
    parts = [each.repeat_interleave(group, 1) for each in _kept(p)]
    low, high, total = parts
    count = p.keys.isfinite().all(-1).view(batch, kv_heads, -1, p.block).sum(-1).double()
    count = count.repeat_interleave(group, 1)
    ends = torch.stack((q[:, :, None] * low, q[:, :, None] * high))
    top, bottom = ends.amax(0).sum(-1), ends.amin(0).sum(-1)
    size = (q.abs()[:, :, None] * torch.maximum(low.abs(), high.abs())).sum(-1)
    cut = kind == "bound" and p.keys.dtype != torch.float32  # by the tensor cores
    # A bound holds for real numbers, so that what float32 may lose is on top of it.
    off, lost = score_error(size, dim if cut else 0), slack_factor(dim, p.block) * size + 2.0**-126
    if kind == "bound":
        least, most = top + lost - off, top + lost + off
    elif kind == "mean":
        mean = (q[:, :, None] * total).sum(-1) / count.clamp(min=1)
        least, most = mean - off, mean + off
    else:
        keys = p.keys.double().repeat_interleave(group, 1)
        scores = (keys @ q[..., None])[..., 0].nan_to_num(-_INF)
        least = scores.view(batch, heads, -1, p.block).logsumexp(-1)
        most = top + lost + count.clamp(min=1).log() + off + mass_error(bottom, top, count)
    nothing = count == 0
    return least.masked_fill(nothing, -_INF), most.masked_fill(nothing, -_INF)


def _shared(least: Tensor, most: Tensor, kv_heads: int) -> Expected:
    """The largest part of any query head's mass, as a logarithm."""
    batch, heads, count = least.shape
    scores = (least + most) / 2
    off = ((most - least) / 2).nan_to_num(0.0)
    whole = scores.logsumexp(-1, keepdim=True)
    whole = whole.where(whole.isfinite(), 0.0)
    there = scores > -_INF
    error = off + off.amax(-1, keepdim=True)
    error = error + shared_error(scores.where(there, 0.0), whole)
    groups = (batch, kv_heads, heads // kv_heads, count)
    value = (scores - whole).view(groups).amax(2)
    return Expected(value, torch.float32, error.view(groups).amax(2))


def _appended(name: str, dim: int, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    """All keys of each sequence in two calls, the second one behind the first."""
    p = _problem(name, dim, dtype)
    low, high, total = _kept(p)
    keys = p.keys.nan_to_num(0.0).transpose(1, 2).contiguous().to(device)
    shape = (low.shape[0], low.shape[1], low.shape[2], dim)
    first = (p.lengths // 2).to(device)
    rest = p.lengths.to(device) - first

    def run() -> list[Tensor]:
        blocks = KeyBlocks.empty(shape, block=p.block, dtype=dtype, device=device)
        append_keys(blocks, keys, torch.zeros_like(first), first)
        most = keys.shape[1]
        places = (first[:, None] + torch.arange(most, device=device)).clamp(max=most - 1)
        behind = keys.gather(1, places[..., None, None].expand_as(keys).long())
        append_keys(blocks, behind, first, rest)
        return [blocks.low, blocks.high, blocks.total]

    yield Trial(
        run,
        [
            Expected(low, dtype, name="low"),
            Expected(high, dtype, name="high"),
            Expected(total, torch.float32, name="total"),
        ],
    )
