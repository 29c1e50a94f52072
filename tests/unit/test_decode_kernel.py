"""The text of the attend_decode kernel, run by threads of the CPU, against float64.

What this cannot see is the compiler's code for the GPU, its tensor cores and its clocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.ops import PagedKV
from hopsparse.ops.attend_decode import plan
from hopsparse.ops.attend_decode.device import fits
from hopsparse.plan import TARGETS
from tests.helpers.attention import Shape, assert_attention, listed, paged, tokens_of
from tests.helpers.decode_on_cpu import Built, Run, compiled

# Copies that arrive as late as they may, and at once; both dtypes; all dims and both groups.
BUILDS = (
    Built(),
    Built(is_late=False, stages=3),
    Built("f16", heads=16, stages=3),
    Built(dim=128),
    Built("f16", dim=256, heads=16, shares_queries=True),
)


Kernels = Callable[[Built], Run]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return functools.cache(lambda built: compiled(built, tmp_path_factory.mktemp("decode")))


@pytest.fixture(scope="module")
def kernel(kernels: Kernels) -> Run:
    return kernels(BUILDS[0])


@pytest.mark.parametrize("built", BUILDS, ids=[each.name for each in BUILDS])
@pytest.mark.parametrize(("splits", "block"), [(1, 64), (2, 16), (4, None)])
def test_lists_and_lengths(kernels: Kernels, built: Built, block: int | None, splits: int) -> None:
    group = built.heads - 3
    shape = Shape(heads=2 * group, kv_heads=2, dim=built.dim)
    sequences = tokens_of(shape, [0, 1, 200], built.dtype)
    q = torch.randn(3, shape.heads, shape.dim).to(built.dtype)
    lists = torch.rand(3, 2, 6).argsort(-1)
    lists = lists.where(torch.rand(lists.shape) < 0.8, -1).int()
    lists[2, 1] = -1
    counts = torch.randint(0, 7, (3, 2)).int()
    order = (lists, counts) if block else (None, None)
    out, lse = kernels(built)(q, paged(shape, sequences), *order, block or 16, splits)
    for b, (keys, values) in enumerate(sequences):
        for head in range(shape.heads):
            kv = head // group
            own = list(range(keys.shape[1]))
            if block:
                own = listed(lists[b, kv, : int(counts[b, kv])].tolist(), block, keys.shape[1])
            pair = (keys[kv, own], values[kv, own])
            assert_attention((out[b, head], lse[b, head]), q[b, head], *pair, shape.scale)


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("splits", [1, 16])
def test_every_entry_is_finished_by_one_block(kernel: Run, splits: int, group: int) -> None:
    shape = Shape(heads=group, kv_heads=1, dim=64)
    ((keys, values),) = sequences = tokens_of(shape, [90], torch.bfloat16)
    q = torch.randn(1, group, 64).bfloat16()
    out, lse = kernel(q, paged(shape, sequences), None, None, 16, splits)
    for head in range(group):
        pair = (keys[0], values[0])
        assert_attention((out[0, head], lse[0, head]), q[0, head], *pair, shape.scale)


def test_a_list_longer_than_a_look_ahead(kernel: Run) -> None:
    """A lane looks up one of 32 tiles: 2 blocks of 2 warps take 128 tiles before the next."""
    shape = Shape(heads=2, kv_heads=1, dim=64, page=32)
    ((keys, values),) = sequences = tokens_of(shape, [4500], torch.bfloat16)
    order = torch.randperm(141).int()
    q = torch.randn(1, 2, 64).bfloat16()
    cache = paged(shape, sequences)
    out, lse = kernel(q, cache, order[None, None, :140], None, 32)
    own = listed(order[:140].tolist(), 32, 4500)
    for head in range(2):
        pair = (keys[0, own], values[0, own])
        assert_attention((out[0, head], lse[0, head]), q[0, head], *pair, shape.scale)


def one_sequence() -> tuple[Shape, list[tuple[Tensor, Tensor]], Tensor]:
    shape = Shape(dim=64)
    return shape, tokens_of(shape, [150], torch.bfloat16), torch.randn(1, 4, 64).bfloat16()


@pytest.mark.parametrize("scale", [0.0, -0.125, 3.0])
def test_any_scale(kernel: Run, scale: float) -> None:
    shape, sequences, q = one_sequence()
    out, lse = kernel(q, paged(shape, sequences), None, None, 16, scale=scale)
    ((keys, values),) = sequences
    for head in range(4):
        pair = (keys[head // 2], values[head // 2])
        assert_attention((out[0, head], lse[0, head]), q[0, head], *pair, scale)


def test_small_weights_of_float16_are_not_lost(kernels: Kernels) -> None:
    """One key of a tile is exp(13) times as heavy as any other, and its value is zero.

    Weights of 1 and less would be subnormal numbers of float16, here off by 2e-3.
    """
    shape, count = Shape(heads=1, kv_heads=1, dim=64), 16
    keys, values = torch.zeros(1, count, 64), torch.full((1, count, 64), 16.0)
    keys[0, 7, 0], values[0, 7] = 13.0 * 8, 0.0
    q = torch.zeros(1, 1, 64)
    q[0, 0, 0] = 1
    sequences = [(keys.half(), values.half())]
    out, _ = kernels(BUILDS[2])(q.half(), paged(shape, sequences), None, None, 16)
    want = 16 * (count - 1) / (count - 1 + torch.tensor(13.0).exp())
    assert ((out - want).abs() <= 2**-10 * want).all()


def test_a_key_that_is_nan_shows(kernel: Run) -> None:
    shape, sequences, q = one_sequence()
    sequences[0][0][0, 70, 5] = float("nan")
    out, lse = kernel(q, paged(shape, sequences), None, None, 16)
    assert out[0, :2].isnan().all()
    assert lse[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()


@pytest.mark.parametrize("splits", [1, 2])
def test_a_sequence_of_nan_is_not_an_empty_one(kernel: Run, splits: int) -> None:
    shape, sequences, q = one_sequence()
    sequences[0][0].fill_(float("nan"))
    out, _ = kernel(q, paged(shape, sequences), None, None, 16, splits)
    assert out.isnan().all()


def test_an_infinite_value_is_infinite(kernel: Run) -> None:
    shape, sequences, q = one_sequence()
    sequences[0][1][0, 70, 5] = float("inf")
    out, _ = kernel(q, paged(shape, sequences), None, None, 16)
    assert (out[0, :2, 5] == float("inf")).all()
    assert out[0, :2, 6:].isfinite().all()


def test_physical_pages_may_be_anywhere(kernel: Run) -> None:
    shape, sequences, q = one_sequence()
    first, second = (
        kernel(q, paged(shape, sequences, order=order), None, None, 16)
        for order in (torch.arange(13), torch.arange(13).flip(0))
    )
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


def test_pages_and_blocks_out_of_range_are_none(kernel: Run) -> None:
    shape, sequences, q = one_sequence()
    cache = paged(shape, sequences)
    table = cache.table.clone()
    table[0, 1], table[0, 3] = -1, 2**31 - 1
    every = torch.arange(10).view(1, 1, 10).expand(1, 2, 10).int().contiguous()
    kept = every.clone()
    kept[..., 1], kept[..., 3] = -1, -1
    beyond = every.clone()
    beyond[..., 1], beyond[..., 3] = 2**27, -(2**31)
    want = kernel(q, cache, kept, None, 16)
    for ours in (
        kernel(q, replace(cache, table=table), every, None, 16),
        kernel(q, cache, beyond, None, 16),
    ):
        for mine, other in zip(ours, want, strict=True):
            assert torch.equal(mine, other)


# ---- the plan ------------------------------------------------------------------------------------


def test_two_blocks_of_every_kernel_share_an_sm() -> None:
    target, reserved = TARGETS["h200"], 1024
    for spec in plan.every_spec():
        assert spec.smem_bytes <= target.smem_per_block
        assert 2 * (spec.smem_bytes + reserved) <= target.smem_per_sm
    with pytest.raises(ArgumentError, match="float32"):
        plan.spec_for("float32", 128, 8)


def test_enough_is_in_flight_while_a_tile_is_used() -> None:
    """By Little's law: what memory delivers to an SM in the microsecond that a read takes."""
    target = TARGETS["h200"]
    for dim in plan.DIMS:
        for group in plan.GROUPS:
            stages = plan.stages_for(dim, group) - 1
            in_flight = 2 * plan.warps_for(dim) * stages * 2 * plan.TILE * 2 * dim
            assert in_flight >= target.read_bandwidth / target.sm_count * 1e-6, (dim, group)


def test_a_kernel_is_known_for_every_number_of_blocks() -> None:
    for spec in plan.every_spec():
        variants = plan.splits_of(spec)
        assert spec in variants
        assert set(variants) <= set(plan.every_spec())
        assert len({each.text for each in variants}) == 1


def test_blocks_of_a_list_fill_the_gpu_and_have_a_tile_for_each_warp() -> None:
    for lists in (1, 7, 8, 64, 256, 5000):
        for tokens in (0, 16, 64, 65, 2048, 32_768, 131_072):
            splits = plan.splits_for(lists, tokens, 132)
            assert splits in plan.SPLITS
            assert splits == 1 or (splits - 1) * plan.TILE * plan.warps_for(128) < tokens
            # There is room for two blocks an SM, of which a power of two takes more than half.
            assert tokens < 2048 or splits == 16 or splits * lists > 132


def test_lists_whose_tiles_are_not_countable_are_left_to_torch() -> None:
    pool = torch.zeros(1, 1, 16, 64).bfloat16()
    cache = PagedKV(pool, pool, torch.zeros(1, 1).int(), torch.ones(1).int())
    q, one = torch.zeros(1, 1, 64).bfloat16(), torch.zeros(1, 1, 1).int()
    assert fits(q, cache, (one, None), 64)
    assert fits(q, cache, (one, None), 2**31)
    assert not fits(q, cache, (one, None), 2**32)
    assert fits(q, cache, (one.expand(1, 1, 2**25), None), 2**10)
    assert not fits(q, cache, (one.expand(1, 1, 2**26), None), 2**10)
