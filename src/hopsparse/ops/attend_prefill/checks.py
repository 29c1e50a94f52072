"""What is verified of attend_prefill: one key each bit by bit, and softmax in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...measure.softmax_error import tensor_core_attention_bounds
from ...verify import Check, Expected, Trial
from ...verify.pages import Sequences, in_pages, random_tokens
from .._paged import PagedKV
from .op import attend_prefill

_OP = "attend_prefill"
_DTYPES = (torch.bfloat16, torch.float16)
_KV_HEADS = 2
# Queries and tokens: whole prompts, chunks behind earlier tokens, one query, none.
_SIZES = [(130, 130), (0, 40), (1, 77), (64, 200), (150, 500)]
# Tokens of a block and of a page, query heads for each of keys, a list for each query head.
_WAYS = ((64, 64, 3, False), (64, 16, 2, True), (128, 32, 2, False), (192, 64, 1, True))
# Dim, tokens of a block, dtype: the quick set of a GPU.
_FIRST = (
    (64, 192, torch.bfloat16),
    (128, 64, torch.bfloat16),
    (128, 128, torch.float16),
)


@dataclass(frozen=True)
class _Problem:
    q: Tensor
    starts: Tensor
    sequences: Sequences
    indices: Tensor | None
    counts: Tensor | None
    block: int
    page: int


def checks() -> Iterator[Check]:
    """Every dim, dtype, block, page and way of lists."""
    for dim in (64, 128):
        for dtype in _DTYPES:
            for way in _WAYS:
                name = str(dtype).removeprefix("torch.")
                quick = dtype == torch.bfloat16 and way[0] + dim in (64 + 128, 192 + 64)
                case = f"{dim}-block-{way[0]}-page-{way[1]}-group-{way[2]}"
                trials = partial(_attended, dim, dtype, way)
                first = (dim, way[0], dtype) in _FIRST
                yield Check(_OP, case, name, "", trials, quick=quick, first=first)


def _attended(
    dim: int, dtype: torch.dtype, way: tuple[int, int, int, bool], device: torch.device
) -> Iterator[Trial]:
    for is_listed in (True, False):
        p = _problem(dim, dtype, way, is_listed)
        single, right = _one_key_each(p)
        exact = Expected(right.double(), dtype, name="out")
        run = partial(_run, single, device)
        yield Trial(lambda run=run: run()[0], [exact])  # type: ignore[misc]
        yield Trial(partial(_run, p, device), _expected(p))


def _run(p: _Problem, device: torch.device) -> tuple[Tensor, Tensor]:
    cache = _cache(in_pages(p.sequences, p.page), device)
    lists = [None if each is None else each.to(device) for each in (p.indices, p.counts)]
    return attend_prefill(p.q.to(device), p.starts.to(device), cache, *lists, block=p.block)


def _problem(
    dim: int, dtype: torch.dtype, way: tuple[int, int, int, bool], is_listed: bool
) -> _Problem:
    block, page, group, each = way
    queries, lengths = [size[0] for size in _SIZES], [size[1] for size in _SIZES]
    heads = _KV_HEADS * group
    q = torch.randn(sum(queries), heads, dim).to(dtype)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()]).int()
    indices = counts = None
    if is_listed:
        q_blocks, blocks = (-(-max(count) // block) for count in (queries, lengths))
        size = (len(_SIZES), heads if each else _KV_HEADS, q_blocks, blocks)
        order = torch.rand(size).argsort(-1)
        indices = order.where(torch.rand(size) < 0.7, -1).int()
        counts = torch.randint(0, blocks + 1, size[:3]).int()
    sequences = random_tokens(lengths, _KV_HEADS, dim, dtype)
    return _Problem(q, starts, sequences, indices, counts, block, page)


def _seen(p: _Problem, b: int, head: int) -> Tensor:
    """Bool [queries, length]: the keys that each query of a sequence attends to."""
    count, length = _SIZES[b]
    place = length - count + torch.arange(count)
    seen = torch.arange(length) <= place[:, None]
    if p.indices is None or p.counts is None:
        return seen
    own = head // (p.q.shape[1] // p.indices.shape[1])
    listed = torch.zeros(count, -(-length // p.block), dtype=torch.bool)
    for number in range(-(-count // p.block)):
        blocks = p.indices[b, own, number][: int(p.counts[b, own, number])]
        blocks = blocks[(blocks >= 0) & (blocks < listed.shape[1])]
        listed[number * p.block : (number + 1) * p.block, blocks.long()] = True
    return seen & listed.repeat_interleave(p.block, 1)[:, :length]


def _expected(p: _Problem) -> list[Expected]:
    tokens, heads, dim = p.q.shape
    out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
    off = [torch.zeros_like(out), torch.zeros_like(lse)]
    for b, (keys, values) in enumerate(p.sequences):
        rows = slice(int(p.starts[b]), int(p.starts[b + 1]))
        for head in range(heads if rows.stop > rows.start else 0):
            kv = head // (heads // _KV_HEADS)
            q, k, v = p.q[rows, head].double(), keys[kv].double(), values[kv].double()
            seen = _seen(p, b, head)
            some = seen.any(-1)
            scores = (q @ k.T * dim**-0.5).masked_fill(~seen, -torch.inf)
            exact = scores.logsumexp(-1)
            weights = (scores - exact[:, None].where(some[:, None], 0.0)).exp()
            reach = (q.abs() @ k.T.abs() * dim**-0.5).where(seen, 0.0)
            bounds = tensor_core_attention_bounds(reach, weights, v, exact, dim, p.q.dtype)
            out[rows, head], lse[rows, head] = weights @ v, exact
            # A query without keys is zeros, and nothing else.
            off[0][rows, head] = bounds[0].where(some[:, None], 0.0)
            off[1][rows, head] = bounds[1].where(some, 0.0)
    return [Expected(out, p.q.dtype, off[0], "out"), Expected(lse, torch.float32, off[1], "lse")]


def _one_key_each(p: _Problem) -> tuple[_Problem, Tensor]:
    """Queries that see one key of theirs and nothing else, whatever the order of sums; its values.

    A key is a code of signs, and a query 64 times that of one key: all other powers are 0.
    """
    group = p.q.shape[1] // _KV_HEADS
    q, want = torch.zeros_like(p.q), torch.zeros_like(p.q)
    sequences = [(torch.randn(k.shape).sign().to(k.dtype), v) for k, v in p.sequences]
    for b, (keys, values) in enumerate(sequences):
        for head in range(p.q.shape[1]):
            seen = _seen(p, b, head)
            if not seen.numel():
                continue
            some, target = seen.any(-1), torch.rand(seen.shape).masked_fill(~seen, -1.0).argmax(-1)
            rows = torch.arange(int(p.starts[b]), int(p.starts[b + 1]))[some]
            q[rows, head] = 64 * keys[head // group][target[some]]
            want[rows, head] = values[head // group][target[some]]
    return replace(p, q=q, sequences=sequences), want


def _cache(parts: tuple[Tensor, Tensor, Tensor, Tensor], device: torch.device) -> PagedKV:
    keys, values, table, lengths = (each.to(device) for each in parts)
    return PagedKV(keys, values, table, lengths)
