"""A launch that takes in the newest keys: append_keys and that launch in turn, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.compiler import KernelCache
from hopsparse.launch import capture
from hopsparse.ops import (
    BlockBudget,
    KeyBlocks,
    append_keys,
    attend_decode,
    contiguous_pages,
    score_blocks,
    select_blocks,
)
from hopsparse.ops.score_blocks import explain_scores, plan
from hopsparse.ops.score_blocks.choose import Choice
from hopsparse.ops.score_blocks.choose import enqueue as enqueue_choice
from hopsparse.ops.score_blocks.device import Wanted, enqueue
from hopsparse.ops.select_blocks import explain_select_blocks
from tests.helpers.block_scores import INF, NAN, Problem, problem
from tests.helpers.waiting import nothing_waits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = pytest.mark.parametrize("kind", plan.KINDS)
BUDGET = BlockBudget(7, sink=1, recent=2)


@pytest.fixture(scope="module", autouse=True)
def _compiled(device: torch.device) -> None:
    """All kernels, side by side, before the first test."""
    failed = [built.error for built in KernelCache.default().compile_all(plan.every_spec())]
    assert not any(failed)


def edges(block: int, count: int) -> list[int]:
    """No token, the first one, the last of a block, the first of the next, one amid a far block,
    the last that there is room for, and ones that there is none for.
    """
    room = block * count
    far = room - block // 2
    return [0, 1, block, block + 1, far, room, room + 1, 2**31 - 1, -5]


def grown(
    shape: tuple[int, int, int],
    lengths: list[int],
    block: int,
    count: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Problem, Tensor]:
    """Blocks that know all tokens but the last of each sequence, and the keys of these."""
    before = [min(max(length - 1, 0), block * count) for length in lengths]
    p = problem(shape, before, block=block, count=count, dtype=dtype)
    kept = [each.to(device) for each in p.kept]
    blocks = KeyBlocks(kept[0], kept[1], kept[2], block)
    after = torch.tensor(lengths).int().to(device)
    p = replace(p, q=p.q.to(device), blocks=blocks, lengths=after)
    return p, torch.randn(len(lengths), 1, shape[0], shape[2]).to(dtype).to(device)


def copied(p: Problem) -> Problem:
    kept = [each.clone() for each in p.kept]
    return replace(p, blocks=KeyBlocks(kept[0], kept[1], kept[2], p.blocks.block))


def assert_bits(mine: Tensor, other: Tensor) -> None:
    kind = torch.int16 if mine.element_size() == 2 else torch.int32
    assert torch.equal(mine.contiguous().view(kind), other.contiguous().view(kind))


def assert_same_kept(mine: Problem, other: Problem) -> None:
    for ours, theirs in zip(mine.kept, other.kept, strict=True):
        assert_bits(ours, theirs)


def by_operators(p: Problem, keys: Tensor | None, kind: str) -> Iterator[tuple[Problem, Tensor]]:
    """What they give, with what is kept afterwards: a copy for each call."""
    for per_head in (True, False):
        on = copied(p)
        options = {"kind": kind, "per_head": per_head, "keys": keys}
        yield on, score_blocks(on.q, on.blocks, on.lengths, **options)  # type: ignore[arg-type]
    on = copied(p)
    for each in select_blocks(on.q, on.blocks, on.lengths, BUDGET, kind=kind, keys=keys):
        yield on, each


def by_clusters(p: Problem, keys: Tensor | None, kind: str) -> Iterator[tuple[Problem, Tensor]]:
    """The same by both kernels, in clusters of every size; what they do not write is 7."""
    batch, kv_heads, count = p.blocks.low.shape[:3]
    wanted = Wanted(kind, p.scale, False, keys=keys)
    for cluster in plan.CLUSTERS:
        on = copied(p)
        scores = torch.full((batch, kv_heads, count), 7.0, device=p.q.device)
        enqueue(scores, on.q, on.kept, on.lengths, on.blocks.block, wanted, cluster)
        yield on, scores
        on = copied(p)
        lists = [torch.full((batch, kv_heads, *w), 7, device=p.q.device).int() for w in ((5,), ())]
        asked = (on.lengths, on.blocks.block, wanted, Choice(None, [5, 5, 1, 1]))
        enqueue_choice(lists, on.q, on.kept, asked, cluster)
        for each in lists:
            yield on, each


def check(p: Problem, keys: Tensor, kind: str, *, clusters: bool = True) -> None:
    assert explain_scores(p.q, p.blocks, kind, keys).name == "kernel"
    assert explain_select_blocks(p.q, p.blocks, BUDGET, kind, keys).name == "kernel"
    behind = copied(p)
    append_keys(behind.blocks, keys, p.lengths - 1)
    for run in (by_operators, by_clusters) if clusters else (by_operators,):
        for (on, mine), (_, other) in zip(run(p, keys, kind), run(behind, None, kind), strict=True):
            assert_bits(mine, other)
            assert_same_kept(on, behind)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", plan.DIMS)
@pytest.mark.parametrize("group", [1, 2, 4, 7, 16])
def test_groups_dims_and_dtypes(
    group: int, dim: int, dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    p, keys = grown((2, group, dim), edges(16, 46), 16, 46, dtype, device)
    check(p, keys, kind)


@KINDS
@pytest.mark.parametrize("block", [1, 2, 16, 32, 64, 128])
def test_blocks_of_any_size(block: int, kind: str, device: torch.device) -> None:
    p, keys = grown((2, 4, 128), edges(block, 77), block, 77, torch.bfloat16, device)
    check(p, keys, kind)


@KINDS
@pytest.mark.parametrize("batch", [1, 3, 70])
def test_batches_of_any_size(batch: int, kind: str, device: torch.device) -> None:
    lengths = torch.randint(0, 2049, (batch,)).tolist()
    p, keys = grown((8, 4, 128), lengths, 32, 64, torch.bfloat16, device)
    check(p, keys, kind)


@KINDS
@pytest.mark.parametrize("length", [131_072, 131_009, 131_008, 70_000, 65])
def test_long_contexts(length: int, kind: str, device: torch.device) -> None:
    p, keys = grown((8, 4, 128), [length], 64, 2048, torch.bfloat16, device)
    check(p, keys, kind)


@KINDS
@pytest.mark.parametrize("length", [8000, 4097, 300])
def test_more_scores_than_memory_has_room_for(length: int, kind: str, device: torch.device) -> None:
    """512 rows of 16 query heads fit a block of threads: others are scored twice."""
    p, keys = grown((1, 16, 64), [length, 77], 1, 8100, torch.bfloat16, device)
    check(p, keys, kind)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite(dtype: torch.dtype, kind: str, device: torch.device) -> None:
    p, keys = grown((2, 4, 128), [9, 17, 30, 100], 16, 20, dtype, device)
    keys[0, 0, 0, 5], keys[1, 0, 1, 7], keys[2, 0, 0, 0], keys[3, 0, 1, 3] = NAN, INF, -INF, -0.0
    p.blocks.low[2, 1, 1, 9] = p.blocks.high[2, 1, 1, 9] = NAN
    check(p, keys, kind)


@KINDS
def test_keys_and_blocks_of_any_strides(kind: str, device: torch.device) -> None:
    p, keys = grown((2, 4, 128), [200, 90, 1, 0, 33], 16, 20, torch.bfloat16, device)
    laid = []
    for each in p.kept:
        frame = torch.full((5, 21, 3, 256), NAN, dtype=each.dtype, device=device)
        laid.append(frame[:, 1:, :2, :128].transpose(1, 2).copy_(each))
    other = replace(p, blocks=KeyBlocks(laid[0], laid[1], laid[2], 16))
    frame = torch.full((5, 2, 9, 256), NAN, dtype=keys.dtype, device=device)
    apart = frame[:, :, 3:4, 128:].transpose(1, 2).copy_(keys)
    assert explain_select_blocks(other.q, other.blocks, BUDGET, kind, apart).name == "kernel"
    behind = copied(p)
    append_keys(behind.blocks, keys, p.lengths - 1)
    mine = select_blocks(other.q, other.blocks, other.lengths, BUDGET, kind=kind, keys=apart)
    want = select_blocks(p.q, behind.blocks, p.lengths, BUDGET, kind=kind)
    assert all(torch.equal(*each) for each in zip(mine, want, strict=True))
    assert_same_kept(other, behind)


@pytest.mark.parametrize("why", ["tokens", "bytes", "blocks", "mass"])
def test_where_no_launch_does_all_they_run_in_turn(why: str, device: torch.device) -> None:
    block, count = (1, 9000) if why == "blocks" else (16, 46)
    lengths = [0, 1, 16, 17, block * count]
    p, keys = grown((2, 4, 64), lengths, block, count, torch.bfloat16, device)
    budget = BlockBudget(20, top_p=0.8) if why == "mass" else BUDGET
    if why == "tokens":
        keys = torch.randn(5, 2, 2, 64, device=device).bfloat16()
    behind = copied(p)
    append_keys(behind.blocks, keys, p.lengths - keys.shape[1])
    if why == "bytes":
        flat = torch.zeros(keys.numel() + 1, dtype=keys.dtype, device=device)
        keys = flat[1:].view(keys.shape).copy_(keys)
    assert explain_select_blocks(p.q, p.blocks, budget, keys=keys).name == "in turn"
    mine = select_blocks(p.q, p.blocks, p.lengths, budget, keys=keys)
    want = select_blocks(p.q, behind.blocks, p.lengths, budget)
    assert all(torch.equal(*each) for each in zip(mine, want, strict=True))
    assert_same_kept(p, behind)


@pytest.mark.parametrize("batch", [1, 16])
def test_runs_do_not_differ(batch: int, device: torch.device) -> None:
    lengths = [6000 - 300 * b for b in range(batch)]
    p, keys = grown((8, 4, 128), lengths, 16, 400, torch.bfloat16, device)
    first = copied(p)
    lists = select_blocks(first.q, first.blocks, first.lengths, 40, keys=keys)
    for _ in range(50):
        on = copied(p)
        again = select_blocks(on.q, on.blocks, on.lengths, 40, keys=keys)
        assert all(torch.equal(*each) for each in zip(again, lists, strict=True))
        assert_same_kept(on, first)


@pytest.mark.parametrize("early", [False, True], ids=["in turn", "early"])
@pytest.mark.parametrize(("dim", "kind"), [(64, "bound"), (128, "bound"), (128, "mass")])
def test_the_whole_step_of_growing_sequences_in_one_graph(
    dim: int, kind: str, early: bool, device: torch.device
) -> None:
    """Two launches a step, with nothing between the steps: against three of them, in turn."""
    start = torch.tensor([600, 0], device=device).int()
    p, _ = grown((2, 4, dim), [601, 1], 16, 64, torch.bfloat16, device)
    keys, values = (torch.randn(2, 2, 1024, dim, device=device).bfloat16() for _ in range(2))
    append_keys(p.blocks, keys.transpose(1, 2), torch.zeros_like(start), start)
    theirs = copied(p)
    cache = contiguous_pages(keys, values, start + 1, 16)
    budget = BlockBudget(8, sink=1, recent=1)
    newest = torch.empty(2, 1, 2, dim, device=device).bfloat16()

    def step() -> list[Tensor]:
        lists = select_blocks(p.q, p.blocks, cache.lengths, budget, kind=kind, keys=newest)
        return [*lists, *attend_decode(p.q, cache, *lists, block=16)]

    def put(turn: int) -> None:
        cache.lengths.copy_(start + turn + 1)
        at = (start + turn).long().view(2, 1, 1, 1).expand(2, 2, 1, dim)
        newest.copy_(keys.gather(2, at).transpose(1, 2))

    kept = [each.clone() for each in p.kept]
    put(0)
    graph = capture(step, early=early)
    assert graph.early == (2 if early else 0)
    for each, old in zip(p.kept, kept, strict=True):  # runs ahead of the capture took keys in
        each.copy_(old)
    for turn in range(40):
        put(turn)
        p.q.copy_(torch.randn(p.q.shape))
        with nothing_waits():
            graph.replay()
        found = [each.clone() for each in graph.outputs]
        append_keys(theirs.blocks, newest, start + turn)
        lists = select_blocks(p.q, theirs.blocks, cache.lengths, budget, kind=kind)
        want = [*lists, *attend_decode(p.q, cache, *lists, block=16)]
        assert all(torch.equal(*each) for each in zip(found, want, strict=True))
        assert_same_kept(p, theirs)


@pytest.mark.parametrize("early", [False, True], ids=["in turn", "early"])
def test_steps_of_one_graph_see_one_another(early: bool, device: torch.device) -> None:
    """Eight tokens of a block, one behind the other, in one graph; nothing is read too soon."""
    p, _ = grown((8, 4, 128), [2000], 64, 2048, torch.bfloat16, device)
    keys = torch.randn(8, 1, 1, 8, 128, device=device).bfloat16()
    lengths = [p.lengths + turn for turn in range(8)]
    theirs, kept = copied(p), [each.clone() for each in p.kept]

    def steps() -> list[Tensor]:
        found = []
        for at, newest in zip(lengths, keys, strict=True):
            found += select_blocks(p.q, p.blocks, at, BUDGET, keys=newest)
        return found

    graph = capture(steps, early=early)
    for each, old in zip(p.kept, kept, strict=True):
        each.copy_(old)
    graph.replay()
    found = [each.clone() for each in graph.outputs]
    want = []
    for at, newest in zip(lengths, keys, strict=True):
        append_keys(theirs.blocks, newest, at - 1)
        want += select_blocks(p.q, theirs.blocks, at, BUDGET)
    assert all(torch.equal(*each) for each in zip(found, want, strict=True))
    assert_same_kept(p, theirs)


def test_torch_compile_sees_what_changes(device: torch.device) -> None:
    torch.compiler.reset()
    p, keys = grown((2, 4, 64), [100, 16], 16, 10, torch.bfloat16, device)
    behind = copied(p)
    append_keys(behind.blocks, keys, p.lengths - 1)
    compiled = torch.compile(
        lambda q, newest: select_blocks(q, p.blocks, p.lengths, 3, keys=newest), fullgraph=True
    )
    found = compiled(p.q, keys)
    want = select_blocks(p.q, behind.blocks, p.lengths, 3)
    assert all(torch.equal(*each) for each in zip(found, want, strict=True))
    assert_same_kept(p, behind)


def test_a_change_is_counted(device: torch.device) -> None:
    p, keys = grown((2, 4, 64), [100, 16], 16, 10, torch.bfloat16, device)
    before = [each._version for each in p.kept]
    select_blocks(p.q, p.blocks, p.lengths, 3, keys=keys)
    score_blocks(p.q, p.blocks, p.lengths, keys=keys)
    assert [each._version for each in p.kept] == [each + 2 for each in before]
