"""What is verified of rope_append: quarter turns of integers, and the bits of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...verify import Check, Expected, Trial
from .op import rope_append

_OP = "rope_append"
_DTYPES = (torch.bfloat16, torch.float16)
_HEADS, _KV_HEADS, _ROOM = 4, 2, 40
# New tokens, and tokens of each sequence with them; the last has no room for all of its own.
_ENDS = {1: [1, 7, 40], 5: [5, 33, 42]}


def checks() -> Iterator[Check]:
    """Every dim, dtype and count of new tokens."""
    for dim in (64, 128, 256):
        for dtype in _DTYPES:
            for tokens in _ENDS:
                name = str(dtype).removeprefix("torch.")
                trials = partial(_turned, dim, tokens, dtype)
                quick = dtype == torch.bfloat16
                first = tokens == 5 and (quick or dim == 128)
                yield Check(_OP, f"{dim}x{tokens}", name, "", trials, quick=quick, first=first)


def _turned(dim: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    ends = torch.tensor(_ENDS[tokens])
    width = (_HEADS + 2 * _KV_HEADS) * dim
    qkv = torch.randint(-9, 10, (len(ends), tokens, width))
    quarter = torch.randint(0, 4, (1, tokens, dim))
    cos, sin = torch.tensor([1, 0, -1, 0])[quarter], torch.tensor([0, 1, 0, -1])[quarter]
    given = [each.to(device, dtype) for each in (qkv, cos, sin)]
    expected = _exact(qkv, cos, sin, ends, dim)
    names = ("queries", "keys", "values")
    yield Trial(
        partial(_appended, given, ends.int().to(device), dim),
        [Expected(value, dtype, name=name) for value, name in zip(expected, names, strict=True)],
    )
    if device.type == "cuda":
        angle = torch.rand(1, tokens, dim) * 6
        random = [each.to(dtype) for each in (torch.randn(qkv.shape), angle.cos(), angle.sin())]
        wanted = _appended(random, ends.int(), dim)
        yield Trial(
            partial(_appended, [each.to(device) for each in random], ends.int().to(device), dim),
            [
                Expected(value.double(), dtype, name=n)
                for value, n in zip(wanted, names, strict=True)
            ],
        )


def _appended(given: list[Tensor], ends: Tensor, dim: int) -> list[Tensor]:
    qkv, cos, sin = given
    size = (len(qkv), _KV_HEADS, _ROOM, dim)
    cache = (torch.full(size, 77.0).to(qkv), torch.full(size, 77.0).to(qkv))
    return [rope_append(qkv, (cos, sin), cache, ends), *cache]


def _exact(qkv: Tensor, cos: Tensor, sin: Tensor, ends: Tensor, dim: int) -> list[Tensor]:
    """Head by head and token by token, in float64."""
    batch, tokens, _ = qkv.shape
    heads = qkv.double().view(batch, tokens, -1, dim)
    half = torch.cat((-heads[..., dim // 2 :], heads[..., : dim // 2]), -1)
    turned = heads * cos.double()[:, :, None] + half * sin.double()[:, :, None]
    keys = torch.full((batch, _KV_HEADS, _ROOM, dim), 77.0, dtype=torch.float64)
    values = keys.clone()
    for b in range(batch):
        for token in range(tokens):
            place = int(ends[b]) - tokens + token
            if place < _ROOM:
                keys[b, :, place] = turned[b, token, _HEADS : _HEADS + _KV_HEADS]
                values[b, :, place] = heads[b, token, _HEADS + _KV_HEADS :]
    return [turned[:, :, :_HEADS], keys, values]
