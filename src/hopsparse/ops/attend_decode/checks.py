"""What is verified of attend_decode: every query beside softmax in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...measure.softmax_error import attention_bounds, score_size
from ...verify import Check, Expected, Trial
from ...verify.pages import Sequences, in_pages, random_tokens
from .._paged import PagedKV
from .op import attend_decode

_OP = "attend_decode"
_DTYPES = (torch.bfloat16, torch.float16)
_KV_HEADS, _BLOCK = 2, 64
_LENGTHS = [0, 1, 333, 700]
# Dim, query heads for each of keys, page, dtype: the quick set of a GPU.
_FIRST = (
    (64, 4, 16, torch.bfloat16),
    (128, 7, 16, torch.bfloat16),
    (256, 4, 16, torch.bfloat16),
    (128, 4, 64, torch.float16),
)


def checks() -> Iterator[Check]:
    """Every dim, group of query heads, dtype and page, with lists of blocks and without."""
    for dim in (64, 128, 256):
        for group in (1, 3, 4, 7, 8, 16):
            for dtype in _DTYPES:
                for page in (16, 64) if group == 4 else (16,):
                    quick = group in (4, 7) and dtype == torch.bfloat16 and page == 16
                    trials = partial(_attended, dim, group, page, dtype)
                    name = str(dtype).removeprefix("torch.")
                    case, first = f"{dim}x{group}-page-{page}", (dim, group, page, dtype) in _FIRST
                    yield Check(_OP, case, name, "", trials, quick=quick, first=first)


def _attended(
    dim: int, group: int, page: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Trial]:
    heads, batch = _KV_HEADS * group, len(_LENGTHS)
    sequences = random_tokens(_LENGTHS, _KV_HEADS, dim, dtype)
    cache = _cache(in_pages(sequences, page), device)
    q = torch.randn(batch, heads, dim).to(dtype)
    blocks = -(-max(_LENGTHS) // _BLOCK)
    lists = torch.rand(batch, _KV_HEADS, blocks).argsort(-1)
    lists = lists.where(torch.rand(lists.shape) < 0.7, -1).int()
    for indices in (None, lists):
        on = None if indices is None else indices.to(device)
        run = partial(attend_decode, q.to(device), cache, on, block=_BLOCK)
        yield Trial(run, _expected(q, sequences, indices))


def _expected(q: Tensor, sequences: Sequences, lists: Tensor | None) -> list[Expected]:
    batch, heads, dim = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((batch, heads), -torch.inf, dtype=torch.float64)
    off = [torch.zeros_like(out), torch.zeros_like(lse)]
    for b, (keys, values) in enumerate(sequences):
        for head in range(heads):
            kv = head // (heads // _KV_HEADS)
            own = _listed(None if lists is None else lists[b, kv].tolist(), keys.shape[1])
            if not own:
                continue
            k, v, query = keys[kv, own].double(), values[kv, own].double(), q[b, head].double()
            scores = k @ query * dim**-0.5
            weights, lse[b, head] = scores.softmax(0), scores.logsumexp(0)
            out[b, head] = weights @ v
            size = score_size(q[b, head][None], keys[kv, own], dim**-0.5)[0]
            bounds = attention_bounds(size, weights, v, lse[b, head], q.dtype)
            off[0][b, head], off[1][b, head] = bounds
    return [Expected(out, q.dtype, off[0], "out"), Expected(lse, torch.float32, off[1], "lse")]


def _listed(blocks: list[int] | None, length: int) -> list[int]:
    """Token positions; negative blocks are none."""
    if blocks is None:
        return list(range(length))
    places = [b * _BLOCK + t for b in blocks if b >= 0 for t in range(_BLOCK)]
    return [place for place in places if place < length]


def _cache(parts: tuple[Tensor, Tensor, Tensor, Tensor], device: torch.device) -> PagedKV:
    keys, values, table, lengths = (each.to(device) for each in parts)
    return PagedKV(keys, values, table, lengths)
