"""The text of the attend_prefill kernels, run by threads of the CPU, against float64.

Copies, swizzles, descriptors, barriers, lists and masks are those of the GPU; what this cannot see
is the compiler's code, a wait that is missing, and clocks.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.ops.attend_prefill import plan
from hopsparse.ops.attend_prefill.device import fits
from tests.helpers.attention import Shape
from tests.helpers.prefill import Problem, assert_prefill, one_key_each, problem
from tests.helpers.prefill_on_cpu import Run, compiled

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compiled(tmp_path_factory.mktemp("prefill"), plan.Config(64, 2))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compiled(tmp_path_factory.mktemp("prefill"), plan.Config(128, 3, turns=False))


def check(kernel: Run, p: Problem) -> tuple[Tensor, Tensor]:
    assert fits(p.q, p.cache, p.lists, p.block, p.q.shape[2] ** -0.5)
    out, lse = kernel(p.q, p.starts, p.cache, p.lists, p.block)
    assert_prefill(p, out, lse)
    return out, lse


# Whole prompts, chunks behind earlier tokens, one query, none, and lengths on no edge.
SIZES = [(130, 130), (0, 40), (1, 77), (64, 200), (70, 333)]


@pytest.mark.parametrize("page", plan.PAGES)
def test_all_tokens(narrow: Run, page: int) -> None:
    shape = Shape(heads=3, kv_heads=1, dim=64, page=page)
    check(narrow, problem(shape, SIZES, block=page, lists=None))


@pytest.mark.parametrize(
    ("block", "page", "group", "each"),
    [(64, 64, 3, False), (64, 16, 2, True), (128, 32, 2, False), (192, 64, 1, True)],
)
def test_lists(narrow: Run, block: int, page: int, group: int, each: bool) -> None:
    """Lists of heads of keys, and of query heads; groups that pair, and one that does not."""
    shape = Shape(heads=2 * group, kv_heads=2, dim=64, page=page)
    check(narrow, problem(shape, SIZES, block=block, lists=shape.heads if each else 2))


def test_heads_of_128(wide: Run) -> None:
    shape = Shape(heads=2, kv_heads=1, dim=128, page=64)
    check(wide, problem(shape, [(200, 300)], block=128, lists=1, kept=1.0))
    check(wide, problem(shape, [(66, 66)], block=64, lists=None))


def test_small_whole_numbers_are_exact(narrow: Run) -> None:
    """Keys of zeros give equal weights: means of whole numbers, over powers of two."""
    p = problem(Shape(heads=2, kv_heads=2, dim=64), [(128, 128)], block=64, lists=None)
    p.cache.keys.zero_()
    p.cache.values.copy_(torch.randint(-8, 9, p.cache.values.shape))
    out, lse = narrow(p.q, p.starts, p.cache, p.lists, p.block)
    pages = p.cache.table[0].long()
    values = p.cache.values[pages].transpose(0, 1).reshape(2, 128, 64).float()
    for count in (1, 2, 4, 8, 16, 32, 64, 128):
        mean = values[:, :count].mean(1)
        assert torch.equal(out[count - 1], mean.bfloat16())
        assert lse[count - 1, 0] == torch.tensor(float(count)).log()


def test_nan_shows_and_what_is_not_seen_does_not(narrow: Run) -> None:
    p = problem(Shape(heads=2, kv_heads=2, dim=64), [(100, 100)], block=64, lists=None)
    page = int(p.cache.table[0, 2])
    p.cache.keys[page, 1, 3] = float("nan")  # token 35
    out, lse = narrow(p.q, p.starts, p.cache, p.lists, p.block)
    assert out[:, 0].isfinite().all()
    assert out[:35, 1].isfinite().all()
    assert out[35:, 1].isnan().all()
    assert lse[35:, 1].isnan().all()


def test_pages_and_blocks_out_of_range_are_none(narrow: Run) -> None:
    p = problem(Shape(heads=2, kv_heads=2, dim=64), [(64, 320)], block=64, lists=2, kept=1.0)
    assert p.indices is not None
    table = p.cache.table.clone()
    table[0, 4:8], table[0, 12] = -1, 2**30  # block 1, and a piece of block 3
    indices = torch.tensor([4, 1, 0, 2**26, -9]).int().expand(1, 2, 1, 5).contiguous()
    kept = torch.tensor([4, -1, 0, -1, -1]).int().expand(1, 2, 1, 5).contiguous()
    broken = replace(p, cache=replace(p.cache, table=table), indices=indices, counts=None)
    sound = replace(p, indices=kept, counts=None)
    got = narrow(broken.q, broken.starts, broken.cache, broken.lists, 64)
    assert_prefill(sound, *got)


def test_tokens_before_heads(narrow: Run) -> None:
    p = problem(Shape(heads=2, kv_heads=2, dim=64), [(70, 90)], block=64, lists=2)
    pools = (p.cache.keys, p.cache.values)
    keys, values = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in pools)
    caches = (p.cache, replace(p.cache, keys=keys, values=values))
    first, second = (narrow(p.q, p.starts, cache, p.lists, 64) for cache in caches)
    for mine, same in zip(first, second, strict=True):
        assert torch.equal(mine, same)


def maxima(numbers: list[int]) -> list[int]:
    """The largest of each number and those behind it."""
    return list(accumulate(reversed(numbers), max))[::-1]


def test_items_are_all_there_once_and_most_work_comes_first(
    narrow: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(300, 4000), (0, 10), (129, 129), (1, 3000)]
    shape = Shape(heads=4, kv_heads=4, dim=64, page=128)
    p = problem(shape, sizes, block=64, lists=4)
    assert p.counts is not None
    real = plan.divide
    monkeypatch.setattr(plan, "divide", lambda *a: replace(real(*a), per_section=3))
    work = narrow.order(p.q, p.starts, p.cache, p.lists, 64)
    count = int(work[0, 1])
    items = [tuple(each) for each in work[1 : 1 + count, :3].tolist()]
    want = {
        (b, tile, head)
        for b, (queries, _) in enumerate(sizes)
        for tile in range(-(-queries // 64))
        for head in range(4)
    }
    assert len(items) == len(want)
    assert set(items) == want
    assert work[0, 0] == 0
    assert [each[2] // 3 for each in items] == sorted(each[2] // 3 for each in items)
    for section in range(2):
        tiles = []
        for b, tile, head in items:
            if head // 3 == section:
                end = sizes[b][1] - sizes[b][0] + min((tile + 1) * 64, sizes[b][0])
                tiles.append(1 + min(end, 64 * int(p.counts[b, head, tile])) // 128)
        # Nothing comes before what has over an eighth more work.
        assert all(
            8 * most <= 9 * first + 8 for first, most in zip(tiles, maxima(tiles), strict=True)
        )


def test_what_has_no_kernel() -> None:
    p = problem(Shape(heads=2, kv_heads=2, dim=64), [(64, 64)], block=64, lists=2)
    scale = 0.125
    assert fits(p.q, p.cache, p.lists, 64, scale)
    assert not fits(p.q, p.cache, p.lists, 64, -scale)
    assert not fits(p.q, p.cache, p.lists, 32, scale)
    assert fits(p.q, p.cache, (None, None), 16, scale)
    assert not fits(p.q[:0], p.cache, p.lists, 64, scale)
    assert not fits(p.q, replace(p.cache, key_scale=2.0), p.lists, 64, scale)
    odd = problem(Shape(heads=2, kv_heads=2, dim=64, page=48), [(64, 64)], block=48, lists=None)
    assert not fits(odd.q, odd.cache, odd.lists, 48, scale)
    far = problem(Shape(heads=2, kv_heads=2, dim=256), [(64, 64)], block=64, lists=None)
    assert not fits(far.q, far.cache, far.lists, 64, scale)


def test_configs_that_do_not_fit_are_refused() -> None:
    for config in ((128, 4), (256, 2), (64, 1)):
        with pytest.raises(ArgumentError, match="bytes of shared memory"):
            plan.Config(*config)
    with pytest.raises(ArgumentError, match="float32"):
        plan.spec_for("float32", plan.CHOSEN[128])
    assert ctypes.sizeof(plan.Args) % 64 == 0


def test_one_key_each_is_exact(narrow: Run) -> None:
    shape = Shape(heads=4, kv_heads=2, dim=64, page=32)
    p, want = one_key_each(problem(shape, [(100, 230), (40, 40)], block=64, lists=2))
    out, _ = narrow(p.q, p.starts, p.cache, p.lists, 64)
    assert torch.equal(out, want)
