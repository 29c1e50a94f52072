"""attend_prefill on the CPU against float64, a query at a time; and estimates of tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.ops import attend_decode, attend_prefill, score_tiles, select
from hopsparse.ops._paged import parts_of
from hopsparse.ops.attend_prefill.dispatch import traced
from tests.helpers.attention import GROUPS, Shape, assert_attention, listed, paged, tokens_of


def check(
    shape: Shape,
    counts: list[int],
    sequences: list[tuple[Tensor, Tensor]],
    indices: Tensor | None,
    block: int,
) -> None:
    """The last counts[b] tokens of every sequence attend to listed blocks, causally."""
    q = torch.randn(sum(counts), shape.heads, shape.dim).to(sequences[0][0].dtype)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int()
    out, lse = attend_prefill(q, starts, paged(shape, sequences), indices, block=block)
    for b, (keys, values) in enumerate(sequences):
        for step in range(counts[b]):
            row, place = int(starts[b]) + step, keys.shape[1] - counts[b] + step
            for head in range(shape.heads):
                kv = head // (shape.heads // shape.kv_heads)
                own = list(range(place + 1))
                if indices is not None:
                    mine = head if indices.shape[1] == shape.heads else kv
                    blocks = indices[b, mine, step // block].tolist()
                    own = [t for t in listed(blocks, block, keys.shape[1]) if t <= place]
                got = (out[row, head], lse[row, head])
                assert_attention(got, q[row, head], keys[kv, own], values[kv, own], shape.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_whole_prompts_chunks_and_empty_sequences(dtype: torch.dtype) -> None:
    shape = Shape()
    sequences = tokens_of(shape, [40, 70, 0, 33], dtype)
    check(shape, [40, 9, 0, 1], sequences, None, 16)


@pytest.mark.parametrize("group", GROUPS)
def test_lists_of_heads_of_keys_and_of_query_heads(group: int) -> None:
    shape = Shape(heads=2 * group, kv_heads=2)
    sequences = tokens_of(shape, [50])
    for lists in (2, 2 * group):
        order = torch.rand(1, lists, 2, 2).argsort(-1).int()
        check(shape, [50], sequences, torch.where(torch.rand(order.shape) < 0.2, -1, order), 32)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_lists_of_any_lengths(data: st.DataObject) -> None:
    shape = Shape(dim=8)
    lengths = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=3))
    counts = [data.draw(st.integers(0, length)) for length in lengths]
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    order = torch.rand(len(lengths), 2, 4, 4).argsort(-1)
    order = order.where((torch.rand(order.shape) < 0.6) & (order < -(-max(lengths) // 16)), -1)
    check(shape, counts, tokens_of(shape, lengths), order.int(), 16)


def test_a_budget_of_one_block_is_the_diagonal() -> None:
    q, keys = torch.randn(1, 4, 64, 16), torch.randn(1, 2, 64, 16)
    scores = score_tiles(q, keys, block=16)
    seen = torch.arange(1, 5).expand(1, 4, 4).contiguous().int()
    indices, _ = select(scores, 1, lengths=seen, sink=1, recent=1)
    assert indices[..., 0].tolist() == [[[0, 1, 2, 3]] * 4]
    shape = Shape()
    check(shape, [64], tokens_of(shape, [64]), indices, 16)


#: Blocks of 32 of two sequences and two heads of keys.
ONE_QUERY = torch.tensor([[[2, 0], [1, -1]], [[0, -1], [0, -1]]]).int()


def test_one_query_is_decode() -> None:
    """Both are as near to float64 as float32 allows, so to each other within both bounds.

    Not bit for bit: here a query head meets values alone, there with its group, and BLAS sums over
    keys in another order for one row than for two, on CPUs where it uses AVX2 or AVX-512.
    """
    shape = Shape()
    sequences = tokens_of(shape, [100, 30])
    q, starts = torch.randn(2, 4, 16), torch.tensor([0, 1, 2]).int()
    cache = paged(shape, sequences)
    ours = attend_prefill(q, starts, cache, ONE_QUERY[:, :, None], block=32)
    other = attend_decode(q, cache, ONE_QUERY, block=32)
    for b, (keys, values) in enumerate(sequences):
        for head in range(shape.heads):
            kv = head // (shape.heads // shape.kv_heads)
            own = listed(ONE_QUERY[b, kv].tolist(), 32, keys.shape[1])
            for out, lse in (ours, other):
                got = (out[b, head], lse[b, head])
                assert_attention(got, q[b, head], keys[kv, own], values[kv, own], shape.scale)


def test_one_query_has_the_bits_of_decode_where_sums_are_exact() -> None:
    """Equal scores and small whole values: no order of sums changes them, a token more would."""
    shape = Shape()
    pairs = [(keys, (8 * values).round()) for keys, values in tokens_of(shape, [100, 30])]
    q, starts = torch.zeros(2, 4, 16), torch.tensor([0, 1, 2]).int()
    cache = paged(shape, pairs)
    ours, _ = attend_prefill(q, starts, cache, ONE_QUERY[:, :, None], block=32)
    assert torch.equal(ours, attend_decode(q, cache, ONE_QUERY, block=32)[0])


@pytest.mark.parametrize("stride", [1, 4, 16])
def test_antidiagonals_of_keys_that_are_alike_are_exact(stride: int) -> None:
    """Where all keys of a strip are one key, the sum along its antidiagonal is that of its rows."""
    q = torch.randn(1, 2, 4, 8).repeat_interleave(16, 2)
    keys = torch.randn(1, 1, 4, 8).repeat_interleave(16, 2)
    found = score_tiles(q, keys, block=16, stride=stride).exp()
    scores = q[:, :, ::16] @ keys[:, :, ::16].transpose(-1, -2) / 8**0.5
    seen = torch.ones(4, 4).tril().bool()
    if stride == 16:
        want = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        assert (found - want).abs().max() < 1e-5
    assert (found.sum(-1) - 1).abs().max() < 1e-5
    assert (found[..., ~seen] == 0).all()


def test_estimates_find_the_tile_that_matters() -> None:
    q, keys = torch.randn(1, 2, 32, 16) * 0.1, torch.randn(1, 2, 128, 16) * 0.1
    keys[:, :, 40:48] += 3.0
    q += 3.0
    for kind in ("mean", "antidiagonal"):
        score = score_tiles(q, keys, block=16, kind=kind)
        assert score.shape == (1, 2, 2, 8)
        assert (score.argmax(-1) == 2).all()
        # 96 tokens come before these queries: the first 16 see 7 tiles, the others all.
        assert (score[:, :, 0] == -torch.inf).sum(-1).tolist() == [[1, 1]]
        assert (score[:, :, 1] > -torch.inf).all()


SHAPE = Shape()
CACHE = paged(SHAPE, tokens_of(SHAPE, [40]))
Q, STARTS = torch.randn(20, 4, 16), torch.tensor([0, 20]).int()
INDICES = torch.zeros(1, 2, 2, 1).int()
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": Q[0]}, "q "),
    ({"q": torch.randn(20, 3, 16)}, "3 query heads"),
    ({"starts": torch.tensor([0, 19]).int()}, "for 20 queries"),
    ({"starts": torch.tensor([1, 20]).int()}, "starts from 1"),
    ({"starts": torch.tensor([0, 10, 20]).int()}, "starts"),
    ({"starts": STARTS.long()}, "starts"),
    ({"q": torch.randn(41, 4, 16), "starts": torch.tensor([0, 41]).int()}, "41 queries"),
    ({"indices": INDICES[:, :, :1]}, "at least 2"),
    ({"indices": torch.zeros(1, 3, 2, 1).int()}, "2 or 4"),
    ({"indices": INDICES + 3}, "block 3"),
    ({"indices": torch.zeros(1, 2, 2, 2).int()}, "listed twice"),
    ({"counts": torch.ones(1, 2, 2).int()}, "counts without indices"),
    ({"block": 8}, "block=8"),
]


@pytest.mark.parametrize(("changes", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_what_means_nothing_is_refused(changes: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "starts": STARTS, "cache": CACHE, "block": 16}
    with pytest.raises(ArgumentError, match=told):
        attend_prefill(**arguments | changes)


def test_estimates_that_mean_nothing_are_refused() -> None:
    q, keys = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    for arguments, options, told in (
        ((q, keys), {"kind": "max"}, "kind"),
        ((q, keys), {"block": 24}, "block=24"),
        ((q, keys[:, :, :4]), {}, "keys"),
        ((q[:, :3], keys), {}, "keys"),
        ((q[0], keys), {}, "q "),
    ):
        with pytest.raises(ArgumentError, match=told):
            score_tiles(*arguments, **options)  # type: ignore[arg-type]


def test_torch_compile_sees_one_operator() -> None:
    apart = torch.randn(4, 20, 16).transpose(0, 1)

    def attend(q: Tensor) -> tuple[Tensor, Tensor]:
        return attend_prefill(q, STARTS, CACHE, INDICES, block=16)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for q in (Q, apart):
        for mine, other in zip(compiled(q), attend(q), strict=True):
            assert torch.equal(mine, other)
        tensors, scales = parts_of(CACHE, 0.25)
        arguments = (q, STARTS, tensors, INDICES, None, 16, scales)
        torch.library.opcheck(traced, arguments)
