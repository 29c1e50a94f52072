"""Gradients of attend_prefill on the CPU: differences in float64, dense attention, and bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.errors import UnsupportedError
from hopsparse.measure.gradient_error import Scored, attention_gradient
from hopsparse.ops import PagedKV, attend_prefill, contiguous_pages
from hopsparse.ops._paged import parts_of
from hopsparse.ops.attend_prefill.dispatch import traced, traced_gradient
from hopsparse.ops.attend_prefill.transposed import (
    queries_of_blocks,
    readers_of_pages,
    tiles_of_queries,
)
from tests.helpers.attention import Shape
from tests.helpers.prefill import Problem, problem
from tests.helpers.prefill_gradients import assert_gradients, gradients, random_given

# Whole prompts, chunks behind earlier tokens, one query, none.
SIZES = [(40, 40), (0, 5), (1, 37), (20, 70)]


@pytest.mark.parametrize("lists", [None, 2, 4])
def test_differences_in_float64(lists: int | None) -> None:
    """Empty rows, sequences without queries, groups, and a gradient of the LSE."""
    shape = Shape(heads=4, kv_heads=2, dim=2)
    p = problem(shape, [(17, 20), (0, 5)], block=16, lists=lists, dtype=torch.float64)
    leaves = [each.nan_to_num(0.5).requires_grad_() for each in (p.q, p.cache.keys, p.cache.values)]

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        tensors, scales = parts_of(replace(p.cache, keys=keys, values=values), 0.5)
        out, lse = traced(q, p.starts, tensors, p.indices, p.counts, 16, scales)
        return out, lse.where(lse > -torch.inf, 0.0)

    assert torch.autograd.gradcheck(attend, leaves)


def test_the_bound_has_the_gradient_of_dense_attention() -> None:
    """What `attention_gradient` calls exact is what autograd finds for a masked softmax."""
    q, keys, values = (torch.randn(n, 8, dtype=torch.float64) for n in (12, 20, 20))
    seen = torch.rand(12, 20) < 0.5
    grad, grad_lse = torch.randn(12, 8).double(), torch.randn(12).double()
    exact, _ = attention_gradient(
        Scored(q, keys, values, seen, 0.3), grad, grad_lse, torch.bfloat16, 20
    )
    leaves = [each.clone().requires_grad_() for each in (q, keys, values)]
    scores = (leaves[0] @ leaves[1].T * 0.3).masked_fill(~seen, -torch.inf)
    results = (scores.softmax(-1) @ leaves[2], scores.logsumexp(-1))
    assert seen.any(-1).all()
    for mine, other in zip(
        exact, torch.autograd.grad(results, leaves, (grad, grad_lse)), strict=True
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("group", "lists", "block", "page"),
    [(1, None, 16, 16), (3, 2, 32, 16), (2, 4, 96, 48), (4, 2, 16, 16)],
)
def test_all_entries_are_within_their_bounds(
    group: int, lists: int | None, block: int, page: int, dtype: torch.dtype
) -> None:
    shape = Shape(heads=2 * group, kv_heads=2, dim=24, page=page)
    p = problem(shape, SIZES, block=block, lists=lists, dtype=dtype)
    given = random_given(p)
    assert_gradients(*gradients_of(p, given))


def gradients_of(
    p: Problem, given: tuple[Tensor, Tensor]
) -> tuple[Problem, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    _, found = gradients(p, given)
    return p, given, found


def test_pages_that_sequences_share_get_the_sum() -> None:
    p = shared_prefix(torch.float32)
    assert_gradients(*gradients_of(p, random_given(p)))


def shared_prefix(dtype: torch.dtype) -> Problem:
    """Three sequences whose first 32 tokens are the same two pages; one ends within them."""
    p = problem(Shape(), [(10, 64), (30, 64), (20, 20)], block=16, lists=2, dtype=dtype)
    table = p.cache.table.clone()
    table[1, :2] = table[0, :2]
    table[2, :2] = table[0, :2]
    first = p.sequences[0]
    sequences = [
        first,
        tuple(
            torch.cat([a[:, :32], b[:, 32:]], 1) for a, b in zip(first, p.sequences[1], strict=True)
        ),
        tuple(each[:, :20] for each in first),
    ]
    return replace(p, cache=replace(p.cache, table=table), sequences=sequences)


def test_only_what_is_asked_for() -> None:
    p = problem(Shape(), SIZES, block=16, lists=2)
    q = p.q.clone().requires_grad_()
    attend_prefill(q, p.starts, p.cache, *p.lists, block=16)[0].sum().backward()
    values = p.cache.values.clone().requires_grad_()
    cache = replace(p.cache, values=values)
    attend_prefill(p.q, p.starts, cache, *p.lists, block=16)[0].sum().backward()
    given = (torch.ones_like(p.q), torch.zeros(p.q.shape[:2]))
    _, found = gradients(p, given)
    assert q.grad is not None
    assert values.grad is not None
    assert torch.equal(q.grad, found[0])
    assert torch.equal(values.grad, found[2])
    assert not attend_prefill(p.q, p.starts, p.cache, *p.lists, block=16)[0].requires_grad


@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_reach_keys_behind_pages(batch: int) -> None:
    keys = torch.randn(batch, 2, 32, 8, requires_grad=True)
    lengths = torch.full((batch,), 32).int()
    cache = contiguous_pages(keys, keys, lengths, 16)
    assert cache.keys.shape == (2 * batch, 2, 16, 8)
    given = torch.randn(cache.keys.shape)
    cache.keys.backward(given)
    assert keys.grad is not None
    apart = given[cache.table.long()].transpose(1, 2)  # [batch, heads, pages, page, dim]
    assert torch.equal(keys.grad, apart.flatten(2, 3))


def test_what_has_no_gradient_is_refused() -> None:
    p = problem(Shape(), [(5, 20)], block=16, lists=None)
    eight = [pool.nan_to_num().to(torch.float8_e4m3fn) for pool in (p.cache.keys, p.cache.values)]
    cache = PagedKV(eight[0], eight[1], p.cache.table, p.cache.lengths, 0.5, 2.0)
    q = p.q.clone().requires_grad_()
    with pytest.raises(UnsupportedError, match="gradient"):
        attend_prefill(q, p.starts, cache, block=16)
    with torch.no_grad():
        attend_prefill(q, p.starts, cache, block=16)
    out, _ = attend_prefill(q, p.starts, p.cache, block=16)
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_torch_compile_sees_operators_and_their_gradient() -> None:
    p = problem(Shape(), SIZES, block=16, lists=2)
    given = random_given(p)
    _, want = gradients(p, given)

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        cache = replace(p.cache, keys=keys, values=values)
        return attend_prefill(q, p.starts, cache, *p.lists, block=16)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    leaves = [each.clone().requires_grad_() for each in (p.q, p.cache.keys, p.cache.values)]
    for mine, other in zip(
        torch.autograd.grad(compiled(*leaves), leaves, given), want, strict=True
    ):
        assert torch.equal(mine, other)
    tensors, scales = parts_of(p.cache, 0.25)
    kept = [p.q, *attend(*[each.detach() for each in leaves])]
    lists = [each for each in p.lists if each is not None]
    for of_keys in (True, False):
        arguments = (list(given), kept, p.starts, tensors, lists, 16, scales, of_keys)
        torch.library.opcheck(traced_gradient, arguments)


def test_lists_the_other_way_round() -> None:
    p = problem(Shape(), SIZES, block=16, lists=4)
    assert p.indices is not None
    assert p.counts is not None
    blocks = -(-p.cache.capacity // 16)
    first, rows = queries_of_blocks((p.indices, p.counts), p.starts, p.cache.lengths, 16, blocks)
    assert first.shape == (len(SIZES) * 4 * blocks + 1,)
    for b, (count, length) in enumerate(SIZES):
        for own in range(4):
            for block in range(blocks):
                at = (b * 4 + own) * blocks + block
                want = [
                    q_block
                    for q_block in range(-(-count // 16))
                    if block in p.indices[b, own, q_block, : p.counts[b, own, q_block]].tolist()
                    and block * 16 < length - count + min(16 * q_block + 16, count)
                ]
                assert rows[first[at] : first[at + 1]].tolist() == want


def test_readers_of_pages_and_tiles_of_queries() -> None:
    p = shared_prefix(torch.float32)
    table, lengths, pages = p.cache.table, p.cache.lengths, p.cache.keys.shape[0]
    first, entry = readers_of_pages(table, lengths, 16, pages)
    for page in range(pages):
        want = [
            b * table.shape[1] + column
            for b, length in enumerate(lengths.tolist())
            for column in range(-(-length // 16))
            if table[b, column] == page
        ]
        assert entry[first[page] : first[page + 1]].tolist() == want
    owner, firsts = tiles_of_queries(p.starts, 60, 16)
    assert owner.tolist() == [0, 1, 1, 2, 2, 3]
    assert firsts.tolist() == [0, 1, 3]
