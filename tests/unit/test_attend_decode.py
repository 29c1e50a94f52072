"""attend_decode on the CPU against float64, one key at a time; what is empty; what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.ops import PagedKV, attend_decode, contiguous_pages
from tests.helpers.attention import GROUPS, Shape, assert_attention, listed, paged, tokens_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(
    shape: Shape,
    q: Tensor,
    sequences: list[tuple[Tensor, Tensor]],
    lists: list[list[list[int]]] | None,
    block: int,
) -> None:
    """Every query head of every sequence, over lists[sequence][kv head]."""
    cache = paged(shape, sequences)
    indices = None if lists is None else torch.tensor(lists, dtype=torch.int32)
    out, lse = attend_decode(q, cache, indices, block=block)
    for b, (keys, values) in enumerate(sequences):
        for head in range(shape.heads):
            kv = head // (shape.heads // shape.kv_heads)
            own = list(range(keys.shape[1]))
            if lists is not None:
                own = listed(lists[b][kv], block, keys.shape[1])
            pair = (keys[kv, own], values[kv, own])
            assert_attention((out[b, head], lse[b, head]), q[b, head], *pair, shape.scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_each_head_of_keys_has_its_own_blocks(group: int, dtype: torch.dtype) -> None:
    shape = Shape(heads=2 * group, kv_heads=2, dim=64)
    sequences = tokens_of(shape, [200, 33], dtype)
    lists = [[[0, 3, 2, -1], [1, -1, 0, 2]], [[0, 1, -1, -1], [1, -1, -1, -1]]]
    check(shape, torch.randn(2, shape.heads, 64).to(dtype), sequences, lists, 64)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages_and_head_dimensions(page: int, dim: int) -> None:
    shape = Shape(dim=dim, page=page)
    sequences = tokens_of(shape, [300, 1, 128])
    check(shape, torch.randn(3, 4, dim), sequences, None, 128)
    check(shape, torch.randn(3, 4, dim), sequences, [[[2, 0], [1, -1]]] * 3, 128)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_lists_of_any_lengths(data: st.DataObject) -> None:
    shape = Shape(heads=6, kv_heads=3, dim=8)
    lengths = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=3))
    blocks = max(-(-max(lengths) // 32), 1)
    row = st.permutations([*range(blocks), -1, -1]).map(lambda order: list(order)[:blocks])
    lists = data.draw(
        st.lists(
            st.lists(row, min_size=3, max_size=3), min_size=len(lengths), max_size=len(lengths)
        )
    )
    check(shape, torch.randn(len(lengths), 6, 8), tokens_of(shape, lengths), lists, 32)


def test_sixteen_times_none_and_then_two_blocks() -> None:
    shape = Shape()
    sequences = tokens_of(shape, [160])
    lists = [[[-1] * 16 + [3, 7], [-1] * 18]]
    check(shape, torch.randn(1, 4, 16), sequences, lists, 16)
    out, lse = attend_decode(
        torch.randn(1, 4, 16), paged(shape, sequences), torch.tensor(lists).int(), block=16
    )
    assert (out[0, 2:] == 0).all()
    assert (lse[0, 2:] == -torch.inf).all()
    assert lse[0, :2].isfinite().all()


def test_empty_sequences_among_others() -> None:
    shape = Shape()
    check(shape, torch.randn(4, 4, 16), tokens_of(shape, [0, 40, 0, 7]), None, 64)


def test_counts_cut_lists() -> None:
    shape = Shape()
    cache = paged(shape, tokens_of(shape, [96]))
    q = torch.randn(1, 4, 16)
    indices = torch.tensor([[[4, 1, 0], [2, 5, 3]]]).int()
    cut = attend_decode(q, cache, indices, torch.tensor([[2, 0]]).int(), block=16)
    want = attend_decode(q, cache, torch.tensor([[[4, 1, -1], [-1, -1, -1]]]).int(), block=16)
    for mine, other in zip(cut, want, strict=True):
        assert torch.equal(mine, other)


def test_physical_pages_may_be_anywhere() -> None:
    shape = Shape()
    sequences, q = tokens_of(shape, [100, 60]), torch.randn(2, 4, 16)
    indices = torch.tensor([[[2, 0], [1, 3]], [[0, 1], [1, -1]]]).int()
    first, second = (
        attend_decode(q, paged(shape, sequences, order=order), indices, block=32)
        for order in (torch.arange(17), torch.arange(17).flip(0))
    )
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


def test_8_bit_keys_are_what_they_stand_for() -> None:
    shape = Shape()
    wide = paged(shape, tokens_of(shape, [50]))
    keys, values = (each.to(torch.float8_e4m3fn) for each in (wide.keys, wide.values))
    coded = replace(wide, keys=keys, values=values, key_scale=0.5, value_scale=2.0)
    plain = replace(wide, keys=keys.float() * 0.5, values=values.float() * 2.0)
    q = torch.randn(1, 4, 16)
    for mine, other in zip(attend_decode(q, coded), attend_decode(q, plain), strict=True):
        assert torch.equal(mine, other)


def test_tokens_before_heads_is_a_view() -> None:
    shape = Shape()
    cache = paged(shape, tokens_of(shape, [50]))
    turned = [
        each.transpose(1, 2).contiguous().transpose(1, 2) for each in (cache.keys, cache.values)
    ]
    q = torch.randn(1, 4, 16)
    other = attend_decode(q, replace(cache, keys=turned[0], values=turned[1]))
    for mine, same in zip(attend_decode(q, cache), other, strict=True):
        assert torch.equal(mine, same)


@pytest.mark.parametrize("tokens", [1, 15, 16, 40])
def test_contiguous_keys_as_pages(tokens: int) -> None:
    keys, values = torch.randn(2, 2, tokens, 16), torch.randn(2, 2, tokens, 16)
    q, lengths = torch.randn(2, 4, 16), torch.tensor([tokens, 1]).int()
    out, lse = attend_decode(q, contiguous_pages(keys, values, lengths, 16))
    for b, count in enumerate(lengths.tolist()):
        for head in range(4):
            pair = (keys[b, head // 2, :count], values[b, head // 2, :count])
            assert_attention((out[b, head], lse[b, head]), q[b, head], *pair, 0.25)


Q = torch.randn(1, 4, 16)
CACHE = paged(Shape(), tokens_of(Shape(), [40]))
INDICES = torch.tensor([[[0, 1], [2, -1]]]).int()


def without(**changes: Any) -> PagedKV:
    return replace(CACHE, **changes)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": Q[0]}, "q "),
    ({"q": Q.double()}, "float64"),
    ({"q": torch.randn(1, 3, 16)}, "3 query heads for 2"),
    ({"q": torch.randn(1, 4, 8)}, "queries of 8 for keys of 16"),
    ({"q": torch.randn(2, 4, 16)}, "2 queries for 1"),
    ({"q": Q.bfloat16()}, "keys of torch.float32 for queries of torch.bfloat16"),
    ({"cache": CACHE.keys}, "PagedKV"),
    ({"cache": without(table=CACHE.table.long())}, "table"),
    ({"cache": without(table=CACHE.table[0])}, "table"),
    ({"cache": without(table=CACHE.table.clone().fill_(6))}, "page 0 of sequence 0 is 6"),
    ({"cache": without(table=CACHE.table.clone().fill_(-1))}, "page 0 of sequence 0 is -1"),
    ({"cache": without(lengths=torch.tensor([49]).int())}, "49 tokens"),
    ({"cache": without(lengths=torch.tensor([-1]).int())}, "-1 tokens"),
    ({"cache": without(lengths=torch.tensor([40]))}, "lengths"),
    ({"cache": without(values=CACHE.values[:, :1])}, "one shape"),
    ({"cache": without(keys=CACHE.keys[:, :, :15], values=CACHE.values[:, :, :15])}, "15 tokens"),
    ({"indices": INDICES.long()}, "indices"),
    ({"indices": INDICES[0]}, "indices"),
    ({"indices": INDICES[:, :1]}, "indices"),
    ({"indices": torch.tensor([[[0, 3], [0, 1]]]).int()}, "block 3"),
    ({"indices": torch.tensor([[[0, 1], [2, 2]]]).int()}, "block 2 is listed twice"),
    ({"counts": torch.tensor([[3, 1]]).int()}, "a count of 3"),
    ({"counts": torch.tensor([[-1, 1]]).int()}, "a count of -1"),
    ({"counts": torch.tensor([1, 1]).int()}, "counts"),
    ({"indices": None, "counts": torch.tensor([[1, 1]]).int()}, "counts without indices"),
    ({"block": 24}, "block=24"),
    ({"block": 0}, "block=0"),
    ({"scale": float("nan")}, "scale=nan"),
]


@pytest.mark.parametrize(("changes", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_what_means_nothing_is_refused(changes: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "cache": CACHE, "indices": INDICES, "block": 16}
    with pytest.raises(ArgumentError, match=told):
        attend_decode(**arguments | changes)


def test_a_gradient_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="gradient"):
        attend_decode(Q.clone().requires_grad_(), CACHE)


def test_a_pool_beyond_2_to_the_31_elements_is_addressed_in_64_bits() -> None:
    # One page in memory, expanded: what is indexed lies far behind 2^31 elements by its strides.
    base = torch.randn(1, 1, 16, 16)
    pool = base.expand(2**24, 1, 16, 16)
    assert pool.numel() > 2**31
    table, lengths = torch.tensor([[2**24 - 1]]).int(), torch.tensor([5]).int()
    cache = PagedKV(pool, pool, table, lengths)
    q = torch.randn(1, 1, 16)
    out, lse = attend_decode(q, cache)
    assert_attention((out[0, 0], lse[0, 0]), q[0, 0], base[0, 0, :5], base[0, 0, :5], 0.25)


@pytest.mark.parametrize("layout", ["a cache", "tokens first", "a view", "one text for all"])
def test_pages_of_a_cache_of_a_fixed_size_lie_where_they_are(layout: str) -> None:
    batch, heads, tokens, dim = 3, 2, 64, 8
    keys, values = torch.randn(2, batch, heads, tokens, dim)
    if layout == "tokens first":
        keys, values = (
            each.transpose(1, 2).contiguous().transpose(1, 2) for each in (keys, values)
        )
    elif layout == "a view":
        keys, values = (torch.cat([each, each], 2)[:, :, :tokens] for each in (keys, values))
    elif layout == "one text for all":
        keys, values = (each[:1].expand(batch, -1, -1, -1) for each in (keys, values))
    lengths = torch.tensor([64, 17, 0], dtype=torch.int32)
    cache = contiguous_pages(keys, values, lengths, 16)
    assert cache.keys.data_ptr() == keys.data_ptr()
    assert cache.values.data_ptr() == values.data_ptr()
    assert cache.keys.untyped_storage().nbytes() == keys.untyped_storage().nbytes()
    for b in range(batch):
        found = torch.cat([cache.keys[page] for page in cache.table[b].tolist()], 1)
        assert torch.equal(found, keys[b])
    again = contiguous_pages(keys, values, lengths, 16, cache.table)
    assert again.table is cache.table
    q = torch.randn(batch, 2 * heads, dim)
    odd = contiguous_pages(keys[:, :, :63], values[:, :, :63], lengths.clamp(max=63), 16)
    assert odd.keys.data_ptr() != keys.data_ptr()
    out, _ = attend_decode(q[1:], replace(cache, table=cache.table[1:], lengths=lengths[1:]))
    right, _ = attend_decode(q[1:], replace(odd, table=odd.table[1:], lengths=lengths[1:]))
    assert torch.equal(out, right)
