"""The kernel of attend_prefill: exact where numbers allow, and within its bound of float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.compiler import KernelCache
from hopsparse.launch import capture
from hopsparse.ops import PagedKV, attend_prefill
from hopsparse.ops.attend_prefill import plan
from hopsparse.ops.attend_prefill.device import enqueue, fits
from tests.helpers.attention import Shape, paged
from tests.helpers.prefill import Problem, assert_prefill, one_key_each, problem
from tests.helpers.waiting import nothing_waits

DTYPES = (torch.bfloat16, torch.float16)
# Whole prompts, chunks behind earlier tokens, one query, none, and lengths on no edge.
SIZES = [(130, 130), (0, 40), (1, 77), (64, 200), (300, 1000)]


@pytest.fixture(scope="module", autouse=True)
def _compiled(device: torch.device) -> None:
    """All kernels, side by side, before the first test."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(KernelCache.default().get, plan.every_spec()))


def moved(p: Problem, device: torch.device) -> Problem:
    cache = p.cache
    names = ("keys", "values", "table", "lengths")
    there = replace(cache, **{name: getattr(cache, name).to(device) for name in names})
    lists = [None if each is None else each.to(device) for each in p.lists]
    return replace(
        p,
        q=p.q.to(device),
        starts=p.starts.to(device),
        cache=there,
        indices=lists[0],
        counts=lists[1],
    )


def attend(p: Problem) -> tuple[Tensor, Tensor]:
    """Of a problem on the GPU, by the kernel and nothing else."""
    assert fits(p.q, p.cache, p.lists, p.block, p.q.shape[2] ** -0.5)
    with nothing_waits():
        return attend_prefill(p.q, p.starts, p.cache, *p.lists, block=p.block)


def check(p: Problem, device: torch.device) -> None:
    out, lse = attend(moved(p, device))
    assert_prefill(p, out.cpu(), lse.cpu())


def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> None:
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dim", plan.DIMS)
@pytest.mark.parametrize(
    ("block", "page", "group", "each"),
    [(64, 64, 3, False), (64, 16, 2, True), (128, 32, 2, False), (192, 64, 1, True)],
)
def test_one_key_each_is_exact(
    block: int, page: int, group: int, each: bool, dim: int, device: torch.device
) -> None:
    """Every query finds the values of one key, bit for bit: no address and no mask is wrong."""
    shape = Shape(heads=2 * group, kv_heads=2, dim=dim, page=page)
    lists = shape.heads if each else 2
    for count in (lists, None):
        p, want = one_key_each(problem(shape, SIZES, block=block, lists=count))
        assert torch.equal(attend(moved(p, device))[0].cpu(), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", plan.DIMS)
@pytest.mark.parametrize(
    ("block", "group", "each"),
    [(64, 1, False), (64, 3, False), (64, 4, True), (128, 4, False), (256, 2, True)],
)
def test_lists_of_heads_of_keys_and_of_query_heads(
    block: int, group: int, each: bool, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    shape = Shape(heads=2 * group, kv_heads=2, dim=dim, page=64)
    lists = shape.heads if each else 2
    check(problem(shape, SIZES, block=block, lists=lists, dtype=dtype), device)


@pytest.mark.parametrize("page", plan.PAGES)
@pytest.mark.parametrize("dim", plan.DIMS)
def test_all_tokens(dim: int, page: int, device: torch.device) -> None:
    shape = Shape(heads=6, kv_heads=2, dim=dim, page=page)
    check(problem(shape, SIZES, block=page, lists=None), device)


def test_large_scores(device: torch.device) -> None:
    """Scores of some hundreds, whose maxima rise from tile to tile."""
    p = problem(Shape(heads=2, kv_heads=1, dim=128, page=64), [(700, 700)], block=64, lists=None)
    rising = torch.linspace(1, 30, 700)[:, None]
    sequences = [((k.float() * rising).bfloat16(), v) for k, v in p.sequences]
    cache = paged(Shape(heads=2, kv_heads=1, dim=128, page=64), sequences)
    check(replace(p, sequences=sequences, cache=cache), device)


def test_long_prompts_and_many_sequences(device: torch.device) -> None:
    shape = Shape(heads=8, kv_heads=2, dim=128, page=128)
    check(problem(shape, [(3000, 5000)], block=128, lists=2, kept=0.3), device)
    sizes = [(each % 150, each % 150 + 3 * each) for each in range(0, 300, 7)]
    check(problem(shape, sizes, block=128, lists=8), device)


def test_every_config_gives_the_same_bits(device: torch.device) -> None:
    p = moved(
        problem(Shape(heads=4, kv_heads=2, dim=128, page=64), SIZES, block=64, lists=2), device
    )
    want = attend(p)
    for config in plan.CANDIDATES:
        if config.dim == 128:
            got = (torch.full_like(want[0], 7.0), torch.full_like(want[1], 7.0))
            enqueue(got, p.q, p.starts, p.cache, p.lists, p.block, 128**-0.5, config)
            same(got, want)


def ordinary(device: torch.device, sizes: list[tuple[int, int]]) -> Problem:
    shape = Shape(heads=8, kv_heads=2, dim=128)
    return moved(problem(shape, sizes, block=64, lists=2), device)


def test_no_list_and_no_block_gives_zeros(device: torch.device) -> None:
    p = ordinary(device, [(100, 300)])
    assert p.indices is not None
    assert p.counts is not None
    none, some = torch.full_like(p.indices, -1), torch.zeros_like(p.indices)
    for lists in ((none, None), (some, torch.zeros_like(p.counts))):
        out, lse = attend_prefill(p.q, p.starts, p.cache, *lists, block=64)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


def test_a_key_that_is_nan_shows(device: torch.device) -> None:
    p = moved(
        problem(Shape(heads=4, kv_heads=2, dim=64), [(100, 100)], block=64, lists=None), device
    )
    p.cache.keys[int(p.cache.table[0, 2]), 1, 3] = float("nan")  # token 35
    out, lse = attend_prefill(p.q, p.starts, p.cache)
    assert out[:, :2].isfinite().all()
    assert out[:35].isfinite().all()
    assert out[35:, 2:].isnan().all()
    assert lse[35:, 2:].isnan().all()


def test_pages_and_blocks_out_of_range_are_none(device: torch.device) -> None:
    p = ordinary(device, [(64, 320)])
    table = p.cache.table.clone()
    table[0, 4:8] = torch.tensor([-1, 2**31 - 1, -5, 2**30])  # block 1
    indices = torch.tensor([4, 1, 0, 2**26, -9]).int().expand(1, 2, 1, 5).contiguous().to(device)
    kept = torch.tensor([4, -1, 0, -1, -1]).int().expand(1, 2, 1, 5).contiguous().to(device)
    broken = replace(p, cache=replace(p.cache, table=table), indices=indices, counts=None)
    same(attend(broken), attend(replace(p, indices=kept, counts=None)))


def test_physical_pages_may_be_anywhere(device: torch.device) -> None:
    shape = Shape(heads=4, kv_heads=2, dim=64)
    p = problem(shape, [(200, 500), (60, 60)], block=64, lists=2)
    first, second = (
        attend(moved(replace(p, cache=paged(shape, p.sequences, order=order)), device))
        for order in (torch.arange(67), torch.arange(67).flip(0))
    )
    same(first, second)


@pytest.mark.parametrize("layout", ["tokens before heads", "inside"])
def test_strides_do_not_matter(layout: str, device: torch.device) -> None:
    p = ordinary(device, [(70, 100)])
    laid = []
    for pool in (p.cache.keys, p.cache.values):
        if layout == "inside":
            frame = torch.full((*pool.shape[:2], 20, 200), float("nan"), dtype=pool.dtype)
            laid.append(frame.to(device)[:, :, 2:18, 8:136].copy_(pool))
        else:
            laid.append(pool.transpose(1, 2).contiguous().transpose(1, 2))
    wide = torch.full((1, p.cache.table.shape[1] + 5), -1, dtype=torch.int32, device=device)
    wide[:, : p.cache.table.shape[1]] = p.cache.table
    table = wide[:, : p.cache.table.shape[1]]
    other = replace(p, cache=PagedKV(laid[0], laid[1], table, p.cache.lengths))
    spread = torch.randn(70, 8, 256, device=device).bfloat16()[..., ::2]
    spread.copy_(p.q)
    same(attend(replace(other, q=spread)), attend(p))


def test_every_entry_is_written_and_none_beside(device: torch.device) -> None:
    p = ordinary(device, [(0, 10), (90, 120), (65, 65)])
    want, guard = attend(p), 64
    frames, results = [], []
    for each in want:
        frame = torch.full((each.numel() + 2 * guard,), 7.0, dtype=each.dtype, device=device)
        frames.append(frame)
        results.append(frame[guard : guard + each.numel()].view(each.shape))
    enqueue((results[0], results[1]), p.q, p.starts, p.cache, p.lists, 64, 128**-0.5)
    for frame, mine, other in zip(frames, results, want, strict=True):
        assert torch.equal(mine, other)
        assert (frame[:guard] == 7).all()
        assert (frame[-guard:] == 7).all()


def test_runs_do_not_differ(device: torch.device) -> None:
    p = ordinary(device, [(700, 2000), (77, 77)])
    first = attend(p)
    for _ in range(20):
        same(attend(p), first)


def test_streams_do_not_share_their_work(device: torch.device) -> None:
    problems = [ordinary(device, [(400, 900)]), ordinary(device, [(350, 350), (40, 500)])]
    want = [attend(p) for p in problems]
    streams = [torch.cuda.Stream(device) for _ in problems]
    torch.cuda.synchronize(device)
    found: list[tuple[int, tuple[Tensor, Tensor]]] = []
    for _ in range(5):
        for number, (stream, p) in enumerate(zip(streams, problems, strict=True)):
            with torch.cuda.stream(stream):
                found.append((number, attend(p)))
    torch.cuda.synchronize(device)
    for number, got in found:
        same(got, want[number])


def test_one_graph_for_all_lengths_and_lists(device: torch.device) -> None:
    p = ordinary(device, [(320, 640), (0, 640)])
    assert p.indices is not None
    assert p.counts is not None
    graph = capture(lambda: list(attend_prefill(p.q, p.starts, p.cache, *p.lists, block=64)))
    for middle, lengths in ((200, [640, 200]), (10, [10, 500]), (320, [333, 0]), (0, [7, 320])):
        p.starts.copy_(torch.tensor([0, middle, 320]))
        p.cache.lengths.copy_(torch.tensor(lengths))
        p.indices.copy_(torch.rand(p.indices.shape).argsort(-1))
        p.counts.copy_(torch.randint(0, p.indices.shape[3] + 1, p.counts.shape))
        with nothing_waits():
            graph.replay()
        same(tuple(graph.outputs), attend_prefill(p.q, p.starts, p.cache, *p.lists, block=64))


def test_torch_compile_sees_one_operator(device: torch.device) -> None:
    torch.compiler.reset()
    p = ordinary(device, [(100, 130)])
    starts, cache, indices, counts = p.starts, p.cache, p.indices, p.counts
    compiled = torch.compile(
        lambda x: attend_prefill(x, starts, cache, indices, counts, block=64), fullgraph=True
    )
    same(compiled(p.q), attend(p))
