"""Blocks of keys: what is kept is that of all keys, and every bound holds in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.ops import (
    KeyBlocks,
    append_keys,
    attend_decode,
    block_masses,
    contiguous_pages,
    missed_mass,
    score_blocks,
    select,
    select_certified,
)

BLOCK = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kept(keys: Tensor, lengths: Tensor, block: int = BLOCK) -> KeyBlocks:
    """Blocks of keys [batch, kv_heads, tokens, dim], taken in at once."""
    batch, heads, tokens, dim = keys.shape
    shape = (batch, heads, -(-tokens // block), dim)
    blocks = KeyBlocks.empty(shape, block=block, dtype=keys.dtype)
    append_keys(blocks, keys.transpose(1, 2), torch.zeros(batch).int(), lengths)
    return blocks


def exact_scores(q: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
    """float64 [batch, heads, blocks, BLOCK], -inf where there is no key."""
    batch, heads, dim = q.shape
    grouped = q.double().view(batch, keys.shape[1], -1, dim)
    scores = (grouped @ keys.double().transpose(-1, -2)).view(batch, heads, -1) * dim**-0.5
    seen = torch.arange(keys.shape[2]) < lengths[:, None]
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, -keys.shape[2] % BLOCK), value=-torch.inf)
    return scores.view(batch, heads, -1, BLOCK)


def drawn_keys(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Keys of several kinds: alike, far apart, one large, tiny, rounded."""
    torch.manual_seed(data.draw(st.integers(0, 2**20)))
    keys = torch.randn(shape) * data.draw(st.sampled_from([1e-6, 0.1, 1.0, 8.0]))
    kind = data.draw(st.sampled_from(["spread", "alike", "outlier", "whole", "drifting"]))
    if kind == "alike":
        keys = keys[..., :1, :].expand(shape) + 1e-4 * keys
    if kind == "outlier":
        keys[..., ::7, 0] += 30.0
    if kind == "whole":
        keys = keys.round()
    if kind == "drifting":
        keys = keys + torch.linspace(-3, 3, shape[-2])[:, None]
    return keys.to(dtype)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_keys_that_come_in_any_portions_are_kept_alike(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    keys = drawn_keys(data, (2, 2, 70, 8), dtype)
    blocks = KeyBlocks.empty((2, 2, 5, 8), block=BLOCK, dtype=dtype)
    # What an earlier sequence left there must not be seen.
    for each in (blocks.low, blocks.high, blocks.total):
        each.fill_(float("nan"))
    cuts = st.lists(st.integers(0, 70), min_size=3, max_size=3).map(sorted)
    ends = torch.tensor([[*data.draw(cuts), 70], [*data.draw(cuts), 70]]).T.int()
    done = torch.zeros(2).int()
    for each in ends:
        counts = each - done
        part = torch.full((2, int(counts.max()) + 1, 2, 8), float("inf"), dtype=dtype)
        for b, (start, count) in enumerate(zip(done.tolist(), counts.tolist(), strict=True)):
            part[b, :count] = keys[b, :, start : start + count].transpose(0, 1)
        append_keys(blocks, part, done, counts)
        done = each
    for number in range(5):
        own = keys[:, :, number * BLOCK : min((number + 1) * BLOCK, 70)]
        assert torch.equal(blocks.low[:, :, number], own.amin(2))
        assert torch.equal(blocks.high[:, :, number], own.amax(2))
        exact = own.double().sum(2)
        bound = BLOCK * 2**-24 * own.double().abs().sum(2)
        assert ((blocks.total[:, :, number].double() - exact).abs() <= bound).all()


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_no_score_is_above_its_bound_and_no_mass_outside_of_its_bounds(
    data: st.DataObject,
) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    keys = drawn_keys(data, (2, 2, 75, 16), dtype)
    q = (torch.randn(2, 6, 16) * data.draw(st.sampled_from([0.1, 1.0, 6.0]))).to(dtype)
    lengths = torch.tensor(data.draw(st.tuples(st.integers(0, 75), st.integers(0, 75)))).int()
    blocks, exact = kept(keys, lengths), exact_scores(q, keys, lengths)
    bound = score_blocks(q, blocks, lengths, per_head=True)
    assert (bound.double() >= exact.amax(-1)).all()
    assert ((bound == -torch.inf) == (exact.amax(-1) == -torch.inf)).all()
    masses, true = block_masses(q, blocks, lengths), exact.logsumexp(-1)
    assert (masses.upper >= true).all()
    assert (masses.lower <= true).all()
    # No looser than the largest score for every key.
    count = (exact > -torch.inf).sum(-1).double().log()
    assert (masses.upper <= bound.double() + count + 1e-9).all()


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_certificate_holds(data: st.DataObject) -> None:
    """Whatever is chosen, and however: by score, by mass, or until the bound is small."""
    keys = drawn_keys(data, (2, 2, 150, 16), torch.float32)
    q = torch.randn(2, 6, 16) * data.draw(st.sampled_from([0.1, 1.0, 6.0]))
    lengths = torch.tensor(data.draw(st.tuples(st.integers(0, 150), st.integers(1, 150)))).int()
    blocks, exact = kept(keys, lengths), exact_scores(q, keys, lengths)
    masses = block_masses(q, blocks, lengths)
    mode = data.draw(st.sampled_from(["top-k", "top-p", "certified"]))
    epsilon = data.draw(st.sampled_from([0.0, 1e-3, 0.05, 0.3, 1.0]))
    most = data.draw(st.integers(1, 10))
    if mode == "certified":
        indices, counts, bound = select_certified(
            masses, epsilon, kv_heads=2, most=most, sink=1, recent=1
        )
        full = counts.repeat_interleave(3, 1) >= min(most, 10)
        assert ((bound <= epsilon) | full).all()
    else:
        part = {"top_p": 0.9} if mode == "top-p" else {}
        scores = score_blocks(q, blocks, lengths, kind="mass")
        indices, counts = select(scores, most, **part)
        bound = missed_mass(masses, indices, counts)
    weights = exact.flatten(2).softmax(-1).nan_to_num().view(exact.shape)
    inside = torch.zeros(2, 2, 11, dtype=torch.bool)
    inside.scatter_(2, indices.long().where(indices >= 0, 10), True)
    missed = weights.sum(-1).masked_fill(inside[..., :10].repeat_interleave(3, 1), 0.0).sum(-1)
    assert (bound.double() >= missed * (1 - 1e-12)).all()
    assert (bound <= 1).all()
    cache = contiguous_pages(keys, torch.randn_like(keys), lengths, 16)
    _, lse = attend_decode(q, cache, indices, counts, block=BLOCK)
    tighter = missed_mass(masses, indices, counts, lse=lse)
    assert (tighter.double() >= missed * (1 - 1e-12)).all()


def test_the_bound_with_the_lse_is_tighter_where_keys_differ() -> None:
    keys, q, lengths = torch.randn(1, 1, 640, 16), torch.randn(1, 2, 16), torch.tensor([640]).int()
    blocks = kept(keys, lengths)
    masses = block_masses(q, blocks, lengths)
    indices, counts = select(score_blocks(q, blocks, lengths), 20)
    _, lse = attend_decode(q, contiguous_pages(keys, keys, lengths, 16), indices, counts, block=16)
    with_lse = missed_mass(masses, indices, counts, lse=lse)
    assert (with_lse < missed_mass(masses, indices, counts)).all()
    assert (with_lse < 1).all()


def test_all_blocks_leave_nothing_out_and_none_leave_all() -> None:
    keys, q, lengths = torch.randn(1, 1, 64, 16), torch.randn(1, 2, 16), torch.tensor([64]).int()
    masses = block_masses(q, kept(keys, lengths), lengths)
    every = torch.arange(4).view(1, 1, 4).int()
    assert missed_mass(masses, every, torch.tensor([[4]]).int()).tolist() == [[0.0, 0.0]]
    assert missed_mass(masses, every, torch.tensor([[0]]).int()).tolist() == [[1.0, 1.0]]
    indices, counts, bound = select_certified(masses, 0.0, kv_heads=1)
    assert (indices.tolist(), counts.tolist(), bound.tolist()) == (
        [[[0, 1, 2, 3]]],
        [[4]],
        [[0, 0]],
    )


def test_a_key_that_is_nan_shows_in_the_block_that_holds_it() -> None:
    keys, lengths = torch.randn(1, 1, 64, 16), torch.tensor([64]).int()
    keys[0, 0, 20, 3] = float("nan")
    scores = score_blocks(torch.randn(1, 2, 16), kept(keys, lengths), lengths)
    indices, _ = select(scores, 1)
    assert indices.tolist() == [[[1]]]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_certified_to_be_nothing(odd: float) -> None:
    """Outside it may be all; a certified choice takes it first, and the newest block as well."""
    torch.manual_seed(0)
    keys, lengths = torch.randn(1, 1, 256, 16), torch.tensor([256]).int()
    keys[0, 0, 100, 3] = odd
    masses = block_masses(torch.randn(1, 2, 16), kept(keys, lengths), lengths)
    some = torch.tensor([[[0, 1, 15]]]).int()
    assert missed_mass(masses, some, torch.tensor([[3]]).int()).tolist() == [[1.0, 1.0]]
    indices, counts, bound = select_certified(masses, 0.05, kv_heads=1, sink=1, recent=1, most=4)
    chosen = indices[0, 0, : int(counts[0, 0])].tolist()
    assert {0, 6, 15} <= set(chosen)
    assert (bound > 0.05).all()


def test_heads_share_the_block_that_any_of_them_needs() -> None:
    keys = torch.zeros(1, 1, 64, 2)
    keys[0, 0, 5, 0], keys[0, 0, 40, 1] = 9.0, 9.0
    q = torch.tensor([[[8.0, 0.0], [0.0, 8.0]]])
    scores = score_blocks(q, kept(keys, torch.tensor([64]).int()), torch.tensor([64]).int())
    assert scores.shape == (1, 1, 4)
    assert sorted(scores[0, 0].topk(2).indices.tolist()) == [0, 2]


BLOCKS = kept(torch.randn(1, 2, 32, 8), torch.tensor([32]).int())
LENGTHS = torch.tensor([32]).int()
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.randn(1, 3, 8)}, "3 query heads for 2"),
    ({"q": torch.randn(2, 4, 8)}, "q "),
    ({"q": torch.randn(1, 4, 9)}, "q "),
    ({"q": torch.randn(1, 4, 8).double()}, "float64"),
    ({"lengths": torch.tensor([33]).int()}, "33 tokens"),
    ({"lengths": torch.tensor([-1]).int()}, "-1 tokens"),
    ({"lengths": torch.tensor([32])}, "lengths"),
    ({"kind": "max"}, "kind='max'"),
    ({"scale": 0.0}, "scale=0.0"),
    ({"blocks": BLOCKS.low}, "KeyBlocks"),
]


@pytest.mark.parametrize(("changes", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_what_means_nothing_is_refused(changes: dict[str, Any], told: str) -> None:
    arguments = {"q": torch.randn(1, 4, 8), "blocks": BLOCKS, "lengths": LENGTHS}
    with pytest.raises(ArgumentError, match=told):
        score_blocks(**arguments | changes)


def test_keys_that_do_not_fit_are_refused() -> None:
    start = torch.tensor([0]).int()
    for keys, told in (
        (torch.randn(1, 2, 2, 9), "keys"),
        (torch.randn(1, 2, 2, 8).half(), "float16"),
        (torch.randn(1, 33, 2, 8), "tokens from 0 to 33"),
    ):
        with pytest.raises(ArgumentError, match=told):
            append_keys(BLOCKS, keys, start)
    with pytest.raises(ArgumentError, match="tokens from -1"):
        append_keys(BLOCKS, torch.randn(1, 1, 2, 8), start - 1)


def test_certificates_that_mean_nothing_are_refused() -> None:
    masses = block_masses(torch.randn(1, 4, 8), BLOCKS, LENGTHS)
    indices, counts = torch.tensor([[[0], [1]]]).int(), torch.tensor([[1, 1]]).int()
    for changes, told in (
        ({"indices": indices.long()}, "indices"),
        ({"indices": indices + 2}, "block 3"),
        ({"counts": counts[0]}, "counts"),
        ({"lse": torch.zeros(4)}, "lse"),
    ):
        with pytest.raises(ArgumentError, match=told):
            missed_mass(masses, **{"indices": indices, "counts": counts} | changes)
    for options, told in (
        ({"epsilon": -0.1, "kv_heads": 2}, "epsilon"),
        ({"epsilon": 0.1, "kv_heads": 3}, "kv_heads=3"),
        ({"epsilon": 0.1, "kv_heads": 2, "most": 0}, "most=0"),
    ):
        with pytest.raises(ArgumentError, match=told):
            select_certified(masses, **options)  # type: ignore[arg-type]
