"""The kernel of attend_decode is as near to float64 as float32 allows, for every shape it takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.compiler import KernelCache
from hopsparse.launch import capture
from hopsparse.ops import KeyBlocks, PagedKV, append_keys, attend_decode, score_blocks, select
from hopsparse.ops.attend_decode import plan
from hopsparse.ops.attend_decode.device import enqueue, fits
from tests.helpers.attention import GROUPS, Shape, assert_attention, listed, paged, tokens_of
from tests.helpers.waiting import nothing_waits

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def _compiled(device: torch.device) -> None:
    """All kernels, side by side, before the first test. Numbers of blocks share a code."""
    specs = {spec.text: spec for spec in plan.every_spec()}
    with ThreadPoolExecutor() as pool:
        list(pool.map(KernelCache.default().get, specs.values()))


def moved(cache: PagedKV, device: torch.device) -> PagedKV:
    names = ("keys", "values", "table", "lengths")
    return replace(cache, **{name: getattr(cache, name).to(device) for name in names})


def check(
    device: torch.device,
    shape: Shape,
    sequences: list[tuple[Tensor, Tensor]],
    lists: Tensor | None,
    block: int,
) -> None:
    q = torch.randn(len(sequences), shape.heads, shape.dim).to(sequences[0][0].dtype)
    cache = moved(paged(shape, sequences), device)
    assert fits(q.to(device), cache)
    indices = None if lists is None else lists.int().to(device)
    out, lse = (each.cpu() for each in attend_decode(q.to(device), cache, indices, block=block))
    for b, (keys, values) in enumerate(sequences):
        for head in range(shape.heads):
            kv = head // (shape.heads // shape.kv_heads)
            own = list(range(keys.shape[1]))
            if lists is not None:
                own = listed(lists[b, kv].tolist(), block, keys.shape[1])
            pair = (keys[kv, own], values[kv, own])
            assert_attention((out[b, head], lse[b, head]), q[b, head], *pair, shape.scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", plan.DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_groups_dims_and_dtypes(
    group: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    shape = Shape(heads=2 * group, kv_heads=2, dim=dim)
    sequences = tokens_of(shape, [0, 1, 333, 700], dtype)
    lists = torch.rand(4, 2, 11).argsort(-1)
    check(device, shape, sequences, lists.where(torch.rand(lists.shape) < 0.7, -1), 64)
    check(device, shape, sequences, None, 64)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("block", [128, 256])
def test_pages_and_blocks(page: int, block: int, device: torch.device) -> None:
    shape = Shape(dim=128, page=page)
    sequences = tokens_of(shape, [1000, 257], torch.bfloat16)
    check(device, shape, sequences, torch.tensor([[[3, 0], [1, -1]]] * 2), block)


def test_long_lists(device: torch.device) -> None:
    shape = Shape(heads=8, kv_heads=2, dim=128, page=64)
    sequences = tokens_of(shape, [20_000], torch.bfloat16)
    check(device, shape, sequences, torch.rand(1, 2, 313).argsort(-1)[..., :150], 64)


@pytest.mark.parametrize("splits", plan.SPLITS)
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (7, 128), (13, 128), (16, 256)])
def test_any_number_of_blocks_may_share_a_list(
    group: int, dim: int, splits: int, device: torch.device
) -> None:
    """More of them than there are tiles, and so few that each warp looks far ahead."""
    shape = Shape(heads=2 * group, kv_heads=2, dim=dim, page=64)
    sequences = tokens_of(shape, [0, 40, 6000], torch.bfloat16)
    q = torch.randn(3, shape.heads, dim).bfloat16()
    cache = moved(paged(shape, sequences), device)
    out = torch.full_like(q, float("nan"), device=device)
    lse = torch.full(q.shape[:2], float("nan"), device=device)
    enqueue((out, lse), q.to(device), cache, (None, None), 64, shape.scale, splits)
    for b, (keys, values) in enumerate(sequences):
        for head in range(shape.heads):
            kv = head // group
            got = (out[b, head].cpu(), lse[b, head].cpu())
            assert_attention(got, q[b, head], keys[kv], values[kv], shape.scale)


def problem(device: torch.device, lengths: list[int]) -> tuple[Tensor, PagedKV]:
    shape = Shape(heads=8, kv_heads=2, dim=128)
    cache = moved(paged(shape, tokens_of(shape, lengths, torch.bfloat16)), device)
    return torch.randn(len(lengths), 8, 128).bfloat16().to(device), cache


def test_pools_of_more_entries_than_32_bits_count(device: torch.device) -> None:
    """Keys and values take turns in a pool of 2.3e9 entries; its last pages are used."""
    shape = Shape(heads=8, kv_heads=2, dim=128, page=64)
    sequences = tokens_of(shape, [200], torch.bfloat16)
    pool = torch.empty(140_000, 2, 64, 128, dtype=torch.bfloat16, device=device)
    small = paged(shape, sequences, order=torch.arange(7))
    first = pool.shape[0] // 2 - small.keys.shape[0]
    keys, values = pool[0::2], pool[1::2]
    keys[first:], values[first:] = small.keys.to(device), small.values.to(device)
    table = (small.table + first).to(device)
    cache = PagedKV(keys, values, table, small.lengths.to(device))
    q = torch.randn(1, 8, 128).bfloat16().to(device)
    assert fits(q, cache)
    assert keys.numel() + values.numel() > 2**31
    for mine, other in zip(
        attend_decode(q, cache), attend_decode(q, moved(small, device)), strict=True
    ):
        assert torch.equal(mine, other)


def test_lists_without_width_are_empty(device: torch.device) -> None:
    q, cache = problem(device, [500, 60])
    nothing = torch.empty(2, 2, 0, dtype=torch.int32, device=device)
    out, lse = attend_decode(q, cache, nothing)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_queries_may_begin_anywhere(device: torch.device) -> None:
    q, cache = problem(device, [500, 60])
    apart = torch.empty(q.numel() + 1, dtype=q.dtype, device=device)[1:].view(q.shape).copy_(q)
    for mine, other in zip(attend_decode(apart, cache), attend_decode(q, cache), strict=True):
        assert torch.equal(mine, other)


def test_sixteen_times_none_and_then_two_blocks(device: torch.device) -> None:
    shape = Shape(dim=64)
    sequences = tokens_of(shape, [160], torch.bfloat16)
    check(device, shape, sequences, torch.tensor([[[-1] * 16 + [3, 7], [-1] * 18]]), 16)


def test_tables_and_lengths_of_any_strides(device: torch.device) -> None:
    """Servers slice what they hold for more sequences and longer ones."""
    q, cache = problem(device, [500, 60, 333])
    wide = torch.full((3, cache.table.shape[1] + 5), -1, dtype=torch.int32, device=device)
    wide[:, : cache.table.shape[1]] = cache.table
    apart = torch.zeros(6, dtype=torch.int32, device=device)
    apart[::2] = cache.lengths
    other = replace(cache, table=wide[:, : cache.table.shape[1]], lengths=apart[::2])
    for mine, right in zip(
        attend_decode(q, other, block=32), attend_decode(q, cache, block=32), strict=True
    ):
        assert torch.equal(mine, right)


def test_physical_pages_may_be_anywhere(device: torch.device) -> None:
    shape = Shape(heads=8, kv_heads=2, dim=128)
    sequences = tokens_of(shape, [500, 60], torch.bfloat16)
    q = torch.randn(2, 8, 128).bfloat16().to(device)
    first, second = (
        attend_decode(q, moved(paged(shape, sequences, order=order), device), block=32)
        for order in (torch.arange(67), torch.arange(67).flip(0))
    )
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


def test_pages_and_blocks_out_of_range_are_none(device: torch.device) -> None:
    q, cache = problem(device, [100])
    table = cache.table.clone()
    table[0, 1], table[0, 3] = -1, 2**31 - 1
    broken = replace(cache, table=table)
    every = torch.arange(7).view(1, 1, 7).expand(1, 2, 7).int().to(device)
    kept = torch.tensor([0, 2, 4, 5, 6, -1, -1]).int().expand(1, 2, 7).contiguous().to(device)
    beyond = every.clone()
    beyond[..., 1], beyond[..., 3] = 2**26, -7
    want = attend_decode(q, cache, kept, block=16)
    for ours in (
        attend_decode(q, broken, every, block=16),
        attend_decode(q, cache, beyond, block=16),
    ):
        # The same tokens in other places of the list: equal but for the order of sums.
        torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("layout", ["tokens before heads", "inside"])
def test_strides_do_not_matter(layout: str, device: torch.device) -> None:
    q, cache = problem(device, [100])
    laid = []
    for pool in (cache.keys, cache.values):
        if layout == "inside":
            frame = torch.full((*pool.shape[:2], 20, 200), float("nan"), dtype=pool.dtype)
            laid.append(frame.to(device)[:, :, 2:18, 8:136].copy_(pool))
        else:
            laid.append(pool.transpose(1, 2).contiguous().transpose(1, 2))
    other = replace(cache, keys=laid[0], values=laid[1])
    assert fits(q, other)
    for mine, same in zip(attend_decode(q, other), attend_decode(q, cache), strict=True):
        assert torch.equal(mine, same)


def test_a_key_that_is_nan_shows(device: torch.device) -> None:
    q, cache = problem(device, [100, 100])
    cache.keys[cache.table[1, 2].item(), 1, 3] = float("nan")
    out, lse = attend_decode(q, cache)
    assert out[1, 4:].isnan().all()
    assert lse[1, 4:].isnan().all()
    assert out[0].isfinite().all()
    assert out[1, :4].isfinite().all()


def test_every_entry_is_written_and_none_beside(device: torch.device) -> None:
    q, cache = problem(device, [0, 90])
    want, guard = attend_decode(q, cache), 64
    frames, results = [], []
    for each in want:
        frame = torch.full((each.numel() + 2 * guard,), 7.0, dtype=each.dtype, device=device)
        frames.append(frame)
        results.append(frame[guard : guard + each.numel()].view(each.shape))
    enqueue((results[0], results[1]), q, cache, (None, None), 64, 128**-0.5)
    for frame, mine, other in zip(frames, results, want, strict=True):
        assert torch.equal(mine, other)
        assert (frame[:guard] == 7).all()
        assert (frame[-guard:] == 7).all()


def test_runs_do_not_differ(device: torch.device) -> None:
    q, cache = problem(device, [3000, 77])
    first = attend_decode(q, cache)
    for _ in range(20):
        for mine, other in zip(attend_decode(q, cache), first, strict=True):
            assert torch.equal(mine, other)


def test_one_graph_for_all_lengths_and_lists(device: torch.device) -> None:
    q, cache = problem(device, [640, 640])
    indices = torch.zeros(2, 2, 10, dtype=torch.int32, device=device)
    counts = torch.ones(2, 2, dtype=torch.int32, device=device)
    graph = capture(lambda: list(attend_decode(q, cache, indices, counts)))
    for lengths in ([640, 3], [0, 500], [64, 65]):
        indices.copy_(torch.rand(2, 2, 10).argsort(-1))
        counts.copy_(torch.randint(0, 11, (2, 2)))
        cache.lengths.copy_(torch.tensor(lengths))
        with nothing_waits():
            graph.replay()
        for mine, other in zip(
            graph.outputs, attend_decode(q, cache, indices, counts), strict=True
        ):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("early", [False, True])
def test_a_whole_step_in_one_graph(early: bool, device: torch.device) -> None:
    """Scores, selection and attention of growing sequences; each layer has lists of its own.

    Early: attention may start before the kernel ahead of it has ended, and waits for it.
    """
    shape = Shape(heads=8, kv_heads=2, dim=64, page=64)
    q = torch.randn(2, 8, 64).bfloat16().to(device)
    cache = moved(paged(shape, tokens_of(shape, [640, 640], torch.bfloat16)), device)
    layers = [
        KeyBlocks.empty((2, 2, 10, 64), block=64, dtype=q.dtype, device=device) for _ in range(2)
    ]

    def step() -> list[Tensor]:
        found: list[Tensor] = []
        for number, blocks in enumerate(layers):
            scores = score_blocks(q * (number + 1), blocks, cache.lengths)
            lengths = ((cache.lengths + 63) // 64)[:, None].expand(2, 2).contiguous()
            chosen = select(scores, 4, lengths=lengths, sink=1, recent=1)
            found += [*chosen, *attend_decode(q, cache, *chosen, block=64)]
        return found

    keys = torch.randn(2, 640, 2, 64).bfloat16().to(device)
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    for blocks in layers:
        append_keys(blocks, keys, starts)
    graph = capture(step, early=early)
    for lengths in ([640, 3], [0, 500], [64, 65]):
        cache.lengths.copy_(torch.tensor(lengths))
        q.copy_(torch.randn(2, 8, 64))
        for blocks in layers:
            append_keys(blocks, torch.randn_like(keys), starts)
        with nothing_waits():
            graph.replay()
        for mine, other in zip(graph.outputs, step(), strict=True):
            assert torch.equal(mine, other)


def test_torch_compile_sees_one_operator(device: torch.device) -> None:
    torch.compiler.reset()
    q, cache = problem(device, [100])
    compiled = torch.compile(lambda x: attend_decode(x, cache), fullgraph=True)
    for mine, other in zip(compiled(q), attend_decode(q, cache), strict=True):
        assert torch.equal(mine, other)
