"""A launch that takes in the newest key and scores: append_keys and that launch, bit for bit.

The kernels' texts are run by threads of the CPU; copies arrive when they are waited for.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.ops import KeyBlocks, append_keys
from hopsparse.ops.score_blocks.choose import Choice
from hopsparse.ops.score_blocks.layout import refused_newest
from tests.helpers.block_scores import INF, NAN, Problem, problem
from tests.helpers.score_on_cpu import BF16, VARIANTS, Compiled, Variant

F16 = torch.float16
BLOCK, ROOM = 16, 46
# Nothing, the first token, the last of a block, the first of the next, one of a far block, the last
# that there is room for, and what there is none for.
LENGTHS = [0, 1, 16, 17, 700, BLOCK * ROOM, BLOCK * ROOM + 1, 2**31 - 1]
CHOICE = Choice(None, [7, 7, 1, 2])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("newest"))


def grown(
    shape: tuple[int, int, int], lengths: list[int], dtype: torch.dtype
) -> tuple[Problem, Tensor]:
    """Blocks that know all tokens but the last of each sequence, and the keys of these."""
    before = [min(max(length - 1, 0), BLOCK * ROOM) for length in lengths]
    p = problem(shape, before, block=BLOCK, count=ROOM, dtype=dtype)
    p = replace(p, lengths=torch.tensor(lengths).int())
    return p, torch.randn(len(lengths), 1, shape[0], shape[2]).to(dtype)


def copied(p: Problem) -> Problem:
    kept = [each.clone() for each in p.kept]
    return replace(p, blocks=KeyBlocks(kept[0], kept[1], kept[2], p.blocks.block))


def starts_of(p: Problem) -> Tensor:
    return p.lengths - 1


def assert_bits(mine: Tensor, other: Tensor) -> None:
    kind = torch.int16 if mine.element_size() == 2 else torch.int32
    assert torch.equal(mine.view(kind), other.view(kind))


def assert_same_kept(mine: Problem, other: Problem) -> None:
    for ours, theirs in zip(mine.kept, other.kept, strict=True):
        assert_bits(ours, theirs)


def check(kernel: Compiled, tested: Variant, p: Problem, keys: Tensor, cluster: int) -> None:
    """Scores for each query head and for each of keys, lists, and what is kept."""
    behind = copied(p)
    if keys.dtype == F16:
        begin, some = (
            starts_of(p).clamp(0, BLOCK * ROOM),
            (p.lengths > 0) & (p.lengths <= BLOCK * ROOM),
        )
        append_keys(behind.blocks, keys, begin.where(some, 0), some.int())
    else:
        kernel.append(behind, keys, starts_of(p))
    for per_head in (True, False):
        ours = copied(p)
        mine = kernel.scores(tested, ours, cluster, per_head=per_head, keys=keys)
        assert_bits(mine, kernel.scores(tested, behind, cluster, per_head=per_head))
        assert_same_kept(ours, behind)
    if tested.dim < 256:  # whose pieces are whole fours of rows
        ours = copied(p)
        lists = kernel.chosen(tested, ours, cluster, CHOICE, keys=keys)
        want = kernel.chosen(tested, behind, cluster, CHOICE)
        assert all(torch.equal(*each) for each in zip(lists, want, strict=True))
        assert_same_kept(ours, behind)


@pytest.mark.parametrize(
    ("tested", "cluster"),
    [*((tested, 2) for tested in VARIANTS), (VARIANTS[0], 1), (VARIANTS[2], 3)],
    ids=str,
)
def test_it_is_both_launches_in_turn(kernel: Compiled, tested: Variant, cluster: int) -> None:
    group = 6 if tested.heads == 4 else tested.heads
    p, keys = grown((2, group, tested.dim), LENGTHS, tested.dtype)
    assert refused_newest(p.kept, keys, BLOCK) is None
    check(kernel, tested, p, keys, cluster)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("tested", [VARIANTS[7], VARIANTS[8]], ids=str)
def test_by_mean_keys_of_any_dtype(kernel: Compiled, tested: Variant, dtype: torch.dtype) -> None:
    """One kernel serves all of them: it scores by sums alone."""
    p, keys = grown((2, 1, tested.dim), LENGTHS, dtype)
    check(kernel, tested, p, keys, 2)


@pytest.mark.parametrize("tested", [VARIANTS[1], VARIANTS[5], VARIANTS[7]], ids=str)
def test_what_is_not_finite(kernel: Compiled, tested: Variant) -> None:
    p, keys = grown((2, 4, tested.dim), [9, 17, 30, 100], tested.dtype)
    keys[0, 0, 0, 5], keys[1, 0, 1, 7], keys[2, 0, 0, 0], keys[3, 0, 1, 3] = NAN, INF, -INF, -0.0
    p.blocks.low[2, 1, 1, 9] = p.blocks.high[2, 1, 1, 9] = NAN
    check(kernel, tested, p, keys, 2)


@pytest.mark.parametrize("tested", [VARIANTS[3], VARIANTS[6], VARIANTS[9]], ids=str)
def test_keys_and_blocks_of_any_strides(kernel: Compiled, tested: Variant) -> None:
    p, keys = grown((2, 1, tested.dim), [200, 90, 1, 0, 33], tested.dtype)
    laid = []
    for each in p.kept:
        frame = torch.full((5, ROOM + 1, 3, 2 * tested.dim), NAN, dtype=each.dtype)
        room = frame[:, 1:, :2, : tested.dim].transpose(1, 2)
        laid.append(room.copy_(each))
    other = replace(p, blocks=KeyBlocks(laid[0], laid[1], laid[2], BLOCK))
    frame = torch.full((5, 2, 9, 2 * tested.dim), NAN, dtype=keys.dtype)
    apart = frame[:, :, 3:4, tested.dim :].transpose(1, 2).copy_(keys)
    assert refused_newest(other.kept, apart, BLOCK) is None
    behind = copied(p)
    kernel.append(behind, keys, starts_of(p))
    mine = kernel.scores(tested, other, 2, per_head=False, keys=apart)
    assert_bits(mine, kernel.scores(tested, behind, 2, per_head=False))
    for ours, theirs in zip(other.kept, behind.kept, strict=True):
        assert_bits(ours.contiguous(), theirs)


@pytest.mark.parametrize("tested", [VARIANTS[2], VARIANTS[9]], ids=str)
def test_a_sequence_that_grows(kernel: Compiled, tested: Variant) -> None:
    """Token by token from none on: what is kept is that of all keys at once, by torch."""
    p, _ = grown((1, 2, tested.dim), [0, 30], tested.dtype)
    p.keys[1, :, :30] = p.keys[1, :, 100:130]
    append_keys(p.blocks, p.keys[:, :, :30].transpose(1, 2), torch.zeros(2).int(), p.lengths)
    for _ in range(40):
        p = replace(p, lengths=p.lengths + 1)
        at = (p.lengths - 1).long()
        newest = p.keys[torch.arange(2), :, at][:, None].contiguous()
        lists = kernel.chosen(tested, p, 2, CHOICE, keys=newest)
        want = copied(p)
        for each in want.kept:
            each.fill_(NAN)
        append_keys(want.blocks, p.keys.transpose(1, 2), torch.zeros(2).int(), p.lengths)
        assert_same_kept(*(with_one_nan(each) for each in (p, want)))
        again = kernel.chosen(tested, want, 2, CHOICE)
        assert all(torch.equal(*each) for each in zip(lists, again, strict=True))


def with_one_nan(p: Problem) -> Problem:
    """What no token is in may be any NaN."""
    q = copied(p)
    for each in q.kept:
        each.masked_fill_(each.isnan(), NAN)
    return q


def test_without_a_key_nothing_is_written(kernel: Compiled) -> None:
    p, _ = grown((2, 1, 64), LENGTHS, BF16)
    before = copied(p)
    kernel.scores(VARIANTS[0], p, 2, per_head=True)
    kernel.chosen(VARIANTS[0], p, 2, CHOICE)
    assert_same_kept(p, before)


def test_what_no_launch_takes_in_is_told() -> None:
    p, keys = grown((2, 1, 64), [5, 5], BF16)
    assert "2 new tokens" in str(refused_newest(p.kept, keys.expand(-1, 2, -1, -1), BLOCK))
    flat = torch.zeros(keys.numel() + 1, dtype=BF16)
    assert "16 bytes" in str(refused_newest(p.kept, flat[1:].view(keys.shape), BLOCK))
    shared = tuple(each[:1].expand(2, -1, -1, -1) for each in p.kept)
    assert "share" in str(refused_newest((shared[0], shared[1], shared[2]), keys, BLOCK))
