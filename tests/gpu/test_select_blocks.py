"""One launch gives the lists of score_blocks and select, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

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
    select,
    select_blocks,
)
from hopsparse.ops.score_blocks import plan
from hopsparse.ops.score_blocks.choose import Choice
from hopsparse.ops.score_blocks.choose import enqueue as enqueue_choice
from hopsparse.ops.score_blocks.device import Wanted, enqueue
from hopsparse.ops.select_blocks import explain_select_blocks
from hopsparse.ops.select_blocks.dispatch import row_lengths
from tests.helpers.block_scores import INF, NAN, Problem, problem
from tests.helpers.waiting import nothing_waits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = pytest.mark.parametrize("kind", plan.KINDS)


@pytest.fixture(scope="module", autouse=True)
def _compiled(device: torch.device) -> None:
    """All kernels, side by side, before the first test."""
    failed = [built.error for built in KernelCache.default().compile_all(plan.every_spec())]
    assert not any(failed)


def moved(p: Problem, device: torch.device) -> Problem:
    kept = [each.to(device) for each in p.kept]
    blocks = KeyBlocks(kept[0], kept[1], kept[2], p.blocks.block)
    return replace(p, q=p.q.to(device), blocks=blocks, lengths=p.lengths.to(device))


def in_turn(p: Problem, kind: str, **budget: Any) -> tuple[Tensor, Tensor]:
    """What both operators give one after the other."""
    scores = score_blocks(p.q, p.blocks, p.lengths, kind=kind)
    there = row_lengths(p.lengths, p.blocks.block, scores.shape[1])
    return select(scores, lengths=there, **budget)


def check(p: Problem, kind: str, device: torch.device, **budget: Any) -> None:
    on, asked = moved(p, device), BlockBudget(**budget)
    assert explain_select_blocks(on.q, on.blocks, asked, kind).name == "kernel"
    got = select_blocks(on.q, on.blocks, on.lengths, asked, kind=kind)
    for mine, other in zip(got, in_turn(on, kind, **budget), strict=True):
        assert torch.equal(mine, other)


def check_clusters(p: Problem, kind: str, device: torch.device, sizes: list[int]) -> None:
    """Each size of clusters gives what select makes of the scores by the same size."""
    on, guard = moved(p, device), 64
    batch, kv_heads, count = p.blocks.low.shape[:3]
    wanted = Wanted(kind, p.scale, False)
    for cluster in plan.CLUSTERS:
        scores = torch.empty(batch, kv_heads, count, device=device)
        enqueue(scores, on.q, on.kept, on.lengths, p.blocks.block, wanted, cluster)
        there = row_lengths(on.lengths, p.blocks.block, kv_heads)
        k, width, sink, recent = sizes
        want = select(scores, k, lengths=there, sink=sink, recent=recent, most=width)
        frames, results = [], []
        for each in want:
            frame = torch.full((each.numel() + 2 * guard,), -7, dtype=torch.int32, device=device)
            frames.append(frame)
            results.append(frame[guard : guard + each.numel()].view(each.shape))
        # Lists are as long as select made them: no longer than a row has blocks.
        asked = (
            on.lengths,
            p.blocks.block,
            wanted,
            Choice(None, [k, *want[0].shape[2:], *sizes[2:]]),
        )
        enqueue_choice(results, on.q, on.kept, asked, cluster)
        for frame, mine, other in zip(frames, results, want, strict=True):
            assert torch.equal(mine, other)
            assert (frame[:guard] == -7).all()
            assert (frame[-guard:] == -7).all()


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", plan.DIMS)
@pytest.mark.parametrize("group", [1, 2, 4, 7, 16])
def test_groups_dims_and_dtypes(
    group: int, dim: int, dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    p = problem((2, group, dim), [0, 1, 700, 333], dtype=dtype, count=46)
    check(p, kind, device, k=7, sink=1, recent=2)
    check_clusters(p, kind, device, [5, 5, 0, 0])


@KINDS
@pytest.mark.parametrize(("dtype", "q_dtype"), list(product(DTYPES, DTYPES)), ids=str)
def test_queries_may_have_another_dtype(
    dtype: torch.dtype, q_dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    check(problem((2, 4, 128), [100, 640], dtype=dtype, q_dtype=q_dtype), kind, device, k=3)


@KINDS
@pytest.mark.parametrize(
    ("shape", "length", "block"),
    [((8, 4, 128), 131_072, 64), ((2, 1, 64), 40_000, 64), ((2, 4, 64), 131_072, 16)],
)
def test_long_contexts(
    shape: tuple[int, int, int], length: int, block: int, kind: str, device: torch.device
) -> None:
    p = problem(shape, [length], block=block)
    check(p, kind, device, k=32, sink=1, recent=1)
    check_clusters(p, kind, device, [700, 700, 2, 3])


@KINDS
def test_more_scores_than_memory_has_room_for(kind: str, device: torch.device) -> None:
    """512 rows of 16 query heads fit a block of threads: others are scored twice."""
    p = problem((1, 16, 64), [8000, 77], block=1, count=8100)
    check_clusters(p, kind, device, [100, 100, 1, 1])


def test_more_blocks_than_one_block_of_threads_chooses_from(device: torch.device) -> None:
    p = moved(problem((1, 4, 64), [9000, 77], block=1), device)
    assert explain_select_blocks(p.q, p.blocks, 9).name == "in turn"
    got = select_blocks(p.q, p.blocks, p.lengths, 9)
    for mine, other in zip(got, in_turn(p, "bound", k=9), strict=True):
        assert torch.equal(mine, other)


@KINDS
def test_a_batch_of_many_sequences(kind: str, device: torch.device) -> None:
    lengths = torch.randint(0, 2000, (70,)).tolist()
    p = problem((4, 4, 128), [*lengths, 2048], block=32)
    check(p, kind, device, k=8, sink=1, recent=1)


@pytest.mark.parametrize("k", [1, 30, 33, 66, 67])
@pytest.mark.parametrize("kind_of_keys", ["equal", "few", "near", "odd"])
@KINDS
def test_blocks_that_are_hard_to_tell_apart(
    kind: str, kind_of_keys: str, k: int, device: torch.device
) -> None:
    blocks = 67
    p = problem((2, 4, 64), [16 * blocks - 5, 16 * 20], count=blocks)
    few = torch.randn(1 if kind_of_keys == "equal" else 3, 64).bfloat16()
    which = torch.randint(0, len(few), (2, 2, blocks))
    keys = few[which][:, :, :, None].expand(-1, -1, -1, 16, -1).reshape(p.keys.shape).clone()
    if kind_of_keys == "near":
        keys = (1 + torch.randint(0, 3, keys.shape) * 2.0**-7).bfloat16()
    if kind_of_keys == "odd":
        for row, odd in zip(
            torch.randint(0, keys.shape[2], (3, 12)), (NAN, INF, -INF), strict=True
        ):
            keys[:, :, row, 3] = odd
    append_keys(p.blocks, keys.transpose(1, 2), torch.zeros(2).int(), p.lengths)
    check(p, kind, device, k=k)
    check(p, kind, device, k=k, sink=2, recent=3)


@KINDS
def test_rows_have_numbers_of_their_own(kind: str, device: torch.device) -> None:
    p = moved(problem((2, 4, 128), [960] * 7, count=60), device)
    lengths = torch.tensor([0, 500, 1, 160, 900, 2**31 - 1, -7]).int().to(device)
    k = torch.tensor([5, 0, 3, 60, 1, 1000, -2, 31, 32, 4, 59, 6, 7, 8]).int().view(7, 2)
    p, k = replace(p, lengths=lengths), k.to(device)
    for budget in ({"k": k}, {"k": k, "most": 12, "sink": 2, "recent": 3}):
        got = select_blocks(p.q, p.blocks, p.lengths, BlockBudget(**budget), kind=kind)
        for mine, other in zip(got, in_turn(p, kind, **budget), strict=True):
            assert torch.equal(mine, other)


def test_by_mass_there_are_two_launches(device: torch.device) -> None:
    p = moved(problem((2, 4, 128), [960, 90], count=60), device)
    for budget in ({"k": 20, "top_p": 0.8, "recent": 1}, {"k": 20, "threshold": -2.0}):
        asked = BlockBudget(**budget)
        assert explain_select_blocks(p.q, p.blocks, asked, "mass").name == "in turn"
        got = select_blocks(p.q, p.blocks, p.lengths, asked, kind="mass")
        for mine, other in zip(got, in_turn(p, "mass", **budget), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("batch", [1, 16])
def test_runs_do_not_differ(batch: int, device: torch.device) -> None:
    p = moved(problem((8, 4, 128), [6000 - 300 * b for b in range(batch)]), device)
    first = select_blocks(p.q, p.blocks, p.lengths, 40)
    for _ in range(50):
        for mine, other in zip(select_blocks(p.q, p.blocks, p.lengths, 40), first, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("early", [False, True], ids=["in turn", "early"])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_whole_step_of_growing_sequences_in_one_graph(
    dim: int, early: bool, device: torch.device
) -> None:
    """Keys are taken in, blocks chosen and attended by one captured graph, for all lengths."""
    p = moved(problem((2, 4, dim), [600, 90], block=16, count=64), device)
    keys, values = (torch.randn(2, 2, 1024, dim, device=device).bfloat16() for _ in range(2))
    start = p.lengths.clone()
    cache = contiguous_pages(keys, values, start + 1, 16)
    budget = BlockBudget(8, sink=1, recent=1)
    append_keys(p.blocks, keys[:, :, :600].transpose(1, 2), torch.zeros_like(start), start)

    def step() -> list[Tensor]:
        newest = keys.gather(2, start.long().view(2, 1, 1, 1).expand(2, 2, 1, dim))
        cache.lengths.copy_(start + 1)
        append_keys(p.blocks, newest.transpose(1, 2), start)
        lists = select_blocks(p.q, p.blocks, cache.lengths, budget)
        return [*lists, *attend_decode(p.q, cache, *lists, block=16)]

    graph = capture(step, early=early)
    for turn in range(40):
        start.copy_(torch.tensor([600 + turn, 90 + turn]))
        p.q.copy_(torch.randn(p.q.shape))
        with nothing_waits():
            graph.replay()
        found = [each.clone() for each in graph.outputs]
        now = replace(p, lengths=start + 1)
        lists = in_turn(now, "bound", k=8, sink=1, recent=1)
        want = [*lists, *attend_decode(p.q, cache, *lists, block=16)]
        for mine, other in zip(found, want, strict=True):
            assert torch.equal(mine, other)


def test_torch_compile_sees_one_operator(device: torch.device) -> None:
    torch.compiler.reset()
    p = moved(problem((2, 4, 64), [100]), device)
    compiled = torch.compile(lambda q: select_blocks(q, p.blocks, p.lengths, 3), fullgraph=True)
    want = select_blocks(p.q, p.blocks, p.lengths, 3)
    for mine, other in zip(compiled(p.q), want, strict=True):
        assert torch.equal(mine, other)
