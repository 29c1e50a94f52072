"""The kernels of score_blocks and append_keys: bounds that hold, and what the CPU keeps of keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from hopsparse.compiler import KernelCache
from hopsparse.launch import capture
from hopsparse.ops import KeyBlocks, append_keys, score_blocks, select
from hopsparse.ops.score_blocks import explain_scores, plan
from hopsparse.ops.score_blocks.device import Wanted, enqueue
from hopsparse.ops.score_blocks.layout import refused_keys
from tests.helpers.block_scores import INF, NAN, Problem, assert_per_head, assert_shared, problem
from tests.helpers.waiting import nothing_waits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = pytest.mark.parametrize("kind", plan.KINDS)


@pytest.fixture(scope="module", autouse=True)
def _compiled(device: torch.device) -> None:
    """All kernels, side by side, before the first test."""
    failed = [built.error for built in KernelCache.default().compile_all(plan.every_spec())]
    assert not any(failed)


def moved(p: Problem, device: torch.device) -> Problem:
    """The problem on the device, keys left where they are."""
    kept = [each.to(device) for each in p.kept]
    blocks = KeyBlocks(kept[0], kept[1], kept[2], p.blocks.block)
    return replace(p, q=p.q.to(device), blocks=blocks, lengths=p.lengths.to(device))


def scored(
    p: Problem, kind: str, *, per_head: bool, cluster: int | None = None, fused: bool = False
) -> Tensor:
    """What the kernel writes, by a cluster of that size; what it does not, and beside it, is 7."""
    heads = p.q.shape[1] if per_head else p.blocks.low.shape[1]
    size, guard = (p.q.shape[0], heads, p.blocks.low.shape[2]), 64
    count = size[0] * size[1] * size[2]
    frame = torch.full((count + 2 * guard,), 7.0, device=p.q.device)
    scores = frame[guard : guard + count].view(size)
    wanted = Wanted(kind, p.scale, per_head, fused)
    enqueue(scores, p.q, p.kept, p.lengths, p.blocks.block, wanted, cluster)
    assert (frame[:guard] == 7).all()
    assert (frame[-guard:] == 7).all()
    return scores.cpu()


def check(p: Problem, kind: str, device: torch.device, *clusters: int) -> None:
    on = moved(p, device)
    assert explain_scores(on.q, on.blocks, kind).name == "kernel"
    per_head = score_blocks(on.q, on.blocks, on.lengths, kind=kind, per_head=True).cpu()
    assert_per_head(per_head, p, kind)
    kv_heads = p.blocks.low.shape[1]
    shared = score_blocks(on.q, on.blocks, on.lengths, kind=kind).cpu()
    assert_shared(shared, per_head, kv_heads)
    for cluster in clusters:
        assert torch.equal(scored(on, kind, per_head=True, cluster=cluster), per_head)
        assert_shared(scored(on, kind, per_head=False, cluster=cluster), per_head, kv_heads)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", plan.DIMS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 16])
def test_groups_dims_and_dtypes(
    group: int, dim: int, dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    p = problem((2, group, dim), [0, 1, 700, 333], dtype=dtype, count=46)
    check(p, kind, device, *plan.CLUSTERS)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("dim", plan.DIMS)
@pytest.mark.parametrize("group", [1, 4, 8, 9, 16])
def test_bounds_hold_though_tensor_cores_cut(
    group: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Blocks of one key, whose bound is its score, of terms of one sign and of sizes far apart; and
    the same by products in float32."""
    p = problem((2, group, dim), [3000, 777], block=1, dtype=dtype)
    keys = (p.keys.float() * 2.0 ** torch.randint(-12, 1, p.keys.shape)).to(dtype)
    keys[:, :, :500] = keys[:, :, :500].abs()
    append_keys(p.blocks, keys.transpose(1, 2), torch.zeros(2).int(), p.lengths)
    p = replace(p, q=torch.cat((p.q[:1].abs(), p.q[1:])), keys=keys)
    check(p, "bound", device, *plan.CLUSTERS)
    for cluster in plan.CLUSTERS:
        old = scored(moved(p, device), "bound", per_head=True, cluster=cluster, fused=True)
        assert_per_head(old, p, "bound", fused=True)


@KINDS
@pytest.mark.parametrize(("dtype", "q_dtype"), list(product(DTYPES, DTYPES)), ids=str)
def test_queries_may_have_another_dtype(
    dtype: torch.dtype, q_dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    check(problem((2, 4, 128), [100, 640], dtype=dtype, q_dtype=q_dtype), kind, device)


@KINDS
@pytest.mark.parametrize(("shape", "length"), [((8, 4, 128), 131_072), ((2, 1, 64), 40_000)])
def test_long_contexts(
    shape: tuple[int, int, int], length: int, kind: str, device: torch.device
) -> None:
    check(problem(shape, [length], block=64), kind, device, *plan.CLUSTERS)


@KINDS
def test_more_blocks_than_memory_has_room_for(kind: str, device: torch.device) -> None:
    """512 rows of 16 query heads fit a block of threads: others are scored twice."""
    check(problem((1, 16, 64), [9000, 77], block=1, count=9100), kind, device, *plan.CLUSTERS)


@KINDS
def test_a_batch_of_many_sequences(kind: str, device: torch.device) -> None:
    lengths = torch.randint(0, 2000, (70,)).tolist()
    check(problem((4, 4, 128), [*lengths, 2048], block=32), kind, device)


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
@KINDS
def test_what_is_not_finite_shows_in_its_block_alone(
    kind: str, odd: float, device: torch.device
) -> None:
    p = problem((2, 4, 128), [300, 300])
    keys = p.keys[:, :, :300].transpose(1, 2).contiguous()
    keys[1, 100, 0, 5] = odd
    append_keys(p.blocks, keys, torch.zeros(2).int())
    for per_head in (True, False):
        scores = scored(moved(p, device), kind, per_head=per_head)
        heads = 4 if per_head else 1
        wrong = ~scores.isfinite()
        assert wrong[1, :heads, 100 // 16].all()
        assert int(wrong.sum()) == heads
        if kind != "mean":
            assert (scores[wrong] != -INF).all()


@KINDS
def test_blocks_of_any_strides(kind: str, device: torch.device) -> None:
    p = moved(problem((2, 4, 128), [200, 90]), device)
    laid = []
    for each in p.kept:
        frame = torch.full((2, each.shape[2] + 1, 3, 256), NAN, dtype=each.dtype, device=device)
        laid.append(frame[:, 1:, :2, :128].transpose(1, 2).copy_(each))
    other = replace(p, blocks=KeyBlocks(laid[0], laid[1], laid[2], p.blocks.block))
    assert explain_scores(other.q, other.blocks, kind).name == "kernel"
    for per_head in (True, False):
        options = {"kind": kind, "per_head": per_head}
        mine = score_blocks(other.q, other.blocks, other.lengths, **options)  # type: ignore[arg-type]
        right = score_blocks(p.q, p.blocks, p.lengths, **options)  # type: ignore[arg-type]
        assert torch.equal(mine, right)
    # Rows that no kernel takes are scored by torch.
    cut = [each[..., :126] for each in laid]
    blocks = KeyBlocks(cut[0], cut[1], cut[2], p.blocks.block)
    assert explain_scores(p.q[..., :126], blocks, kind).name == "reference"
    assert score_blocks(p.q[..., :126], blocks, p.lengths, kind=kind).isfinite().any()


def test_queries_that_start_anywhere(device: torch.device) -> None:
    p = moved(problem((2, 4, 64), [200, 90]), device)
    flat = torch.zeros(p.q.numel() + 1, dtype=p.q.dtype, device=device)
    q = flat[1:].view(p.q.shape).copy_(p.q)
    mine = score_blocks(q, p.blocks, p.lengths)
    assert torch.equal(mine, score_blocks(p.q, p.blocks, p.lengths))


@KINDS
def test_lengths_out_of_range_are_taken_as_the_nearest(kind: str, device: torch.device) -> None:
    p = moved(problem((2, 2, 64), [160, 160, 160]), device)
    broken = replace(p, lengths=torch.tensor([-5, 2**31 - 1, 160]).int().to(device))
    scores = scored(broken, kind, per_head=False)
    assert (scores[0] == -INF).all()
    assert torch.equal(scores[1:], scored(p, kind, per_head=False)[1:])


@KINDS
@pytest.mark.parametrize("batch", [1, 16])
def test_runs_do_not_differ(batch: int, kind: str, device: torch.device) -> None:
    p = moved(problem((8, 4, 128), [6000 - 300 * b for b in range(batch)]), device)
    first = score_blocks(p.q, p.blocks, p.lengths, kind=kind)
    for _ in range(20):
        assert torch.equal(score_blocks(p.q, p.blocks, p.lengths, kind=kind), first)


# ---- append_keys ---------------------------------------------------------------------------


def assert_kept(ours: KeyBlocks, theirs: KeyBlocks) -> None:
    for name in ("low", "high", "total"):
        mine, other = getattr(ours, name).cpu(), getattr(theirs, name)
        assert torch.equal(mine.isnan(), other.isnan())
        assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0))


def twice(
    device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> list[KeyBlocks]:
    """Room there and here, where an earlier sequence left NaN."""
    made = []
    for where in (device, torch.device("cpu")):
        blocks = KeyBlocks.empty(shape, block=16, dtype=dtype, device=where)
        for each in (blocks.low, blocks.high, blocks.total):
            each.fill_(NAN)
        made.append(blocks)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", plan.DIMS)
def test_keys_in_portions_give_the_bits_of_the_cpu(
    dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    ours, theirs = twice(device, (2, 3, 80, dim), dtype)
    done = torch.tensor([0, 7]).int()
    portions = ((1, None), (40, [40, 3]), (1, None), (1, [0, 1]), (1000, [1000, 999]), (3, None))
    for new, counts in portions:
        keys = torch.randn(2, new, 3, dim).to(dtype)
        given = None if counts is None else torch.tensor(counts).int()
        there = None if given is None else given.to(device)
        assert refused_keys((ours.low, ours.high, ours.total), keys.to(device), 16) is None
        append_keys(ours, keys.to(device), done.to(device), there)
        append_keys(theirs, keys, done, given)
        assert_kept(ours, theirs)
        done = done + (new if given is None else given)


def test_keys_of_any_strides_that_are_not_finite(device: torch.device) -> None:
    ours, theirs = twice(device, (2, 2, 8, 128), torch.bfloat16)
    keys = torch.randn(2, 2, 100, 256).bfloat16()[..., 128:].transpose(1, 2)
    keys[0, 5, 0, 0], keys[0, 6, 0, 1], keys[1, 20, 1, 2] = NAN, INF, -INF
    frame = torch.full((2, 2, 100, 256), NAN, dtype=keys.dtype, device=device)
    there = frame[..., 128:].transpose(1, 2).copy_(keys)
    append_keys(ours, there, torch.zeros(2).int().to(device))
    append_keys(theirs, keys, torch.zeros(2).int())
    assert_kept(ours, theirs)


def test_keys_that_there_is_no_room_for_are_none(device: torch.device) -> None:
    ours, theirs = twice(device, (2, 2, 4, 64), torch.bfloat16)
    keys = torch.randn(2, 20, 2, 64).bfloat16()
    append_keys(ours, keys.to(device), torch.tensor([-3, 50]).int().to(device))
    begin, one = torch.tensor([0, 50]).int(), torch.tensor([0, 14]).int()
    append_keys(theirs, keys[:, :14], begin, one)
    append_keys(theirs, keys[:, 3:], torch.zeros(2).int(), torch.tensor([17, 0]).int())
    assert_kept(ours, theirs)


def test_a_change_is_counted(device: torch.device) -> None:
    ours, _ = twice(device, (1, 1, 4, 64), torch.bfloat16)
    before = ours.low._version
    append_keys(
        ours, torch.zeros(1, 1, 1, 64).bfloat16().to(device), torch.zeros(1).int().to(device)
    )
    assert ours.low._version > before


# ---- graphs --------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True], ids=["in turn", "early"])
@KINDS
def test_a_growing_sequence_in_one_graph(kind: str, early: bool, device: torch.device) -> None:
    """Keys are taken in, scored and chosen by one captured graph, for all lengths."""
    p = moved(problem((2, 4, 128), [600, 90], block=16, count=64), device)
    start = p.lengths.clone()
    key = torch.randn(2, 1, 2, 128, device=device).bfloat16()

    def step() -> list[Tensor]:
        append_keys(p.blocks, key, start)
        scores = score_blocks(p.q, p.blocks, start + 1, kind=kind)
        return [scores, *select(scores, 8, sink=1, recent=1)]

    kept = [each.clone() for each in p.kept]
    graph = capture(step, early=early)
    assert graph.early == (3 if early else 0)
    for turn in range(40):
        start.copy_(torch.tensor([600 + turn, 90 + turn]))
        key.copy_(torch.randn(2, 1, 2, 128))
        for each, old in zip(p.kept, kept, strict=True):
            each.copy_(old)
        with nothing_waits():
            graph.replay()
        found = [each.clone() for each in graph.outputs]
        after = [each.clone() for each in p.kept]
        for each, old in zip(p.kept, kept, strict=True):
            each.copy_(old)
        for mine, other in zip(found, step(), strict=True):
            assert torch.equal(mine, other)
        for mine, other in zip(after, p.kept, strict=True):
            assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0))
        kept = [each.clone() for each in p.kept]


def test_torch_compile_sees_one_operator(device: torch.device) -> None:
    torch.compiler.reset()
    p = moved(problem((2, 4, 64), [100]), device)
    compiled = torch.compile(lambda q: score_blocks(q, p.blocks, p.lengths), fullgraph=True)
    assert torch.equal(compiled(p.q), score_blocks(p.q, p.blocks, p.lengths))
