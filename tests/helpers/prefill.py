"""Problems of attend_prefill, and what its kernel may be off by."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hopsparse.measure.softmax_error import tensor_core_attention_bounds
from hopsparse.ops import PagedKV
from tests.helpers.attention import Shape, paged, tokens_of


@dataclass(frozen=True)
class Problem:
    """Queries that are the last tokens of sequences, and the lists of their blocks.

    Attributes:
        q: [tokens, heads, dim].
        starts: int32 [batch + 1].
        sequences: Keys and values [kv_heads, length, dim].
        cache: The same in pages.
        indices: int32 [batch, lists, q_blocks, most] or None.
        counts: int32 [batch, lists, q_blocks] or None.
        block: Tokens of a block.
    """

    q: Tensor
    starts: Tensor
    sequences: list[tuple[Tensor, Tensor]]
    cache: PagedKV
    indices: Tensor | None
    counts: Tensor | None
    block: int

    @property
    def lists(self) -> tuple[Tensor | None, Tensor | None]:
        return self.indices, self.counts


def problem(
    shape: Shape,
    sizes: list[tuple[int, int]],
    *,
    block: int,
    lists: int | None,
    dtype: torch.dtype = torch.bfloat16,
    kept: float = 0.7,
) -> Problem:
    """Random numbers for sequences of (queries, length); so many lists, or all tokens.

    Lists are in random order, some of their entries negative, some beyond their counts.
    """
    queries, lengths = [each[0] for each in sizes], [each[1] for each in sizes]
    sequences = tokens_of(shape, lengths, dtype)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()]).int()
    q = torch.randn(sum(queries), shape.heads, shape.dim).to(dtype)
    indices = counts = None
    if lists is not None:
        q_blocks, blocks = (max(1, -(-max(each) // block)) for each in (queries, lengths))
        size = (len(sizes), lists, q_blocks, blocks)
        order = torch.rand(size).argsort(-1)
        indices = order.where(torch.rand(size) < kept, -1).int()
        counts = torch.randint(0, blocks + 1, size[:3]).int()
    return Problem(q, starts, sequences, paged(shape, sequences), indices, counts, block)


def seen_by(p: Problem, b: int, head: int) -> Tensor:
    """bool [queries, length]: which keys each query of a sequence attends to."""
    length, kv_heads = p.sequences[b][0].shape[1], p.cache.kv_heads
    count = int(p.starts[b + 1] - p.starts[b])
    place = length - count + torch.arange(count)
    seen = torch.arange(length) <= place[:, None]
    if p.indices is None:
        return seen
    own = head // (p.q.shape[1] // p.indices.shape[1])
    assert p.indices.shape[1] in (kv_heads, p.q.shape[1])
    listed = torch.zeros(count, -(-length // p.block) + 1, dtype=torch.bool)
    for number in range(-(-count // p.block)):
        blocks = p.indices[b, own, number]
        if p.counts is not None:
            blocks = blocks[: int(p.counts[b, own, number])]
        blocks = blocks[(blocks >= 0) & (blocks < listed.shape[1] - 1)]
        listed[number * p.block : (number + 1) * p.block, blocks.long()] = True
    return seen & listed[:, :-1].repeat_interleave(p.block, 1)[:, :length]


def assert_prefill(p: Problem, out: Tensor, lse: Tensor) -> None:
    """Every query of every head is within its bound of float64, or empty."""
    heads, dim = p.q.shape[1:]
    scale = 1.0 / math.sqrt(dim)
    for b, (keys, values) in enumerate(p.sequences):
        rows = slice(int(p.starts[b]), int(p.starts[b + 1]))
        for head in range(heads if rows.stop > rows.start else 0):
            kv = head // (heads // p.cache.kv_heads)
            q, k, v = p.q[rows, head].double(), keys[kv].double(), values[kv].double()
            seen = seen_by(p, b, head)
            scores = (q @ k.T * scale).masked_fill(~seen, -math.inf)
            exact = scores.logsumexp(-1)
            weights = (scores - exact[:, None].where(seen.any(-1)[:, None], 0.0)).exp()
            reach = (q.abs() @ k.T.abs() * scale).where(seen, 0.0)
            bounds = tensor_core_attention_bounds(reach, weights, v, exact, dim, out.dtype)
            off = (out[rows, head].double() - weights @ v).abs()
            assert (off <= bounds[0]).all(), (b, head, (off / bounds[0]).max())
            empty = ~seen.any(-1)
            assert (out[rows, head][empty] == 0).all()
            assert (lse[rows, head][empty] == -math.inf).all()
            apart = (lse[rows, head].double() - exact).abs()[~empty]
            assert (apart <= bounds[1][~empty]).all(), (b, head)


def one_key_each(p: Problem) -> tuple[Problem, Tensor]:
    """Queries that see one key of theirs and nothing else, in any order of sums; and its values.

    A key is a code of signs, and a query 64 times that of one key that it sees: all other powers
    are 0. Queries without keys have zeros.
    """
    dim, group = p.q.shape[2], p.q.shape[1] // p.cache.kv_heads
    q, want = torch.zeros_like(p.q), torch.zeros_like(p.q)
    sequences = [(torch.randn(k.shape).sign().to(k.dtype), v) for k, v in p.sequences]
    for b, (keys, values) in enumerate(sequences):
        for head in range(p.q.shape[1]):
            seen = seen_by(p, b, head)
            chosen = torch.rand(seen.shape).masked_fill(~seen, -1.0)
            some, target = seen.any(-1), chosen.argmax(-1) if seen.numel() else seen.sum(-1)
            rows = torch.arange(int(p.starts[b]), int(p.starts[b + 1]))[some]
            q[rows, head] = 64 * keys[head // group][target[some]]
            want[rows, head] = values[head // group][target[some]]
    shape = Shape(p.q.shape[1], p.cache.kv_heads, dim, p.cache.page)
    return replace(p, q=q, sequences=sequences, cache=paged(shape, sequences)), want
