"""Gradients over several processes: what comes out, that it is the same everywhere, what breaks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, VerificationError
from hopsparse.measure.error import gamma
from tests.helpers import comm_ranks
from tests.helpers.comm_ranks import SHAPES, gradient
from tests.helpers.ranks import KILLED, on_ranks

SHAPE = (90, 100)


def equal(one: Any, two: Any) -> bool:
    """Bit by bit; NaN is NaN."""
    return bool(np.array_equal(np.asarray(one), np.asarray(two), equal_nan=True))


def all_equal(found: list[Any]) -> bool:
    if isinstance(found[0], dict):
        return all(all_equal([each[key] for each in found]) for key in found[0])
    if isinstance(found[0], list):
        same_length = len({len(each) for each in found}) == 1
        return same_length and all(all_equal(list(parts)) for parts in zip(*found, strict=True))
    return all(equal(found[0], each) for each in found)


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_remainder_it_is_the_mean_of_the_largest_bit_by_bit(ranks: int) -> None:
    options = {"k": 0.01, "remainder": None, "error_feedback": False}
    found = on_ranks(comm_ranks.means, ranks, options, SHAPE, 2)
    assert all_equal([each["means"] for each in found])
    for step in range(2):
        total = torch.zeros(SHAPE)
        for rank in range(ranks):
            values = gradient(rank, step, SHAPE).flatten()
            order = torch.sort(values.abs(), descending=True, stable=True).indices[:90]
            sent = torch.zeros_like(values)
            sent[order] = values[order]
            total += sent.view(SHAPE)
        assert equal(found[0]["means"][step], total / ranks)


@pytest.mark.parametrize(("ranks", "remainder"), [(2, "int4"), (3, "int8"), (4, "int3"), (4, "sign")])
def test_nothing_is_lost(ranks: int, remainder: str) -> None:
    """What the ranks kept and what came out make up every gradient until then."""
    options = {"k": 0.01, "remainder": remainder, "every": 3, "warmup": 2}
    found = on_ranks(comm_ranks.means, ranks, options, SHAPE, 5)
    assert all_equal([each["means"] for each in found])
    given, out, size = (torch.zeros(SHAPE, dtype=torch.float64) for _ in range(3))
    kept = [torch.zeros(SHAPE, dtype=torch.float64)] * ranks
    for step in range(5):
        gradients = [gradient(rank, step, SHAPE).double() for rank in range(ranks)]
        mean = torch.from_numpy(found[0]["means"][step]).double()
        for part in (*gradients, *kept, ranks * mean):
            size += part.abs()
        kept = [torch.from_numpy(each["residuals"][step]).double() for each in found]
        size += torch.stack(kept).abs().sum(0)
        given += torch.stack(gradients).sum(0)
        out += ranks * mean
        # A step adds what was kept, adds up ranks twice, divides twice, and multiplies what its
        # own sums lack; no operand is more than the sizes of that step.
        bound = gamma(2 * ranks + 6, torch.float32) * size
        assert bool(((given - out - torch.stack(kept).sum(0)).abs() <= bound).all())
        assert bool(torch.stack(kept).any())


def test_what_needs_no_rounding_is_the_mean_bit_by_bit() -> None:
    """Integers of -7 to 7 with a 7 left in each block: the scale is 1, and nothing is kept."""
    found = on_ranks(comm_ranks.integers, 2)
    assert all_equal([each["mean"] for each in found])
    both = [comm_ranks.integers_of(rank) for rank in range(2)]
    assert equal(found[0]["mean"], (both[0] + both[1]) / 2)
    assert not any(each["residual"].any() for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_shape_and_dtype(dtype: torch.dtype) -> None:
    options = {"k": 0.01, "remainder": "int4", "dense_below": 5}
    for ranks in (1, 2, 3):
        found = on_ranks(comm_ranks.of_every_shape, ranks, dtype, options)
        assert all_equal(found)
        assert [each.shape for each in found[0]] == [*SHAPES, (30, 40)]
        if ranks == 1:
            mine: list[Tensor] = [gradient(0, *each).to(dtype).float() for each in enumerate(SHAPES)]
            assert all(equal(*pair) for pair in zip(found[0], mine, strict=False))


@pytest.mark.parametrize("ranks", [2, 4])
def test_buckets_do_not_matter(ranks: int) -> None:
    """One bucket, and one for each parameter, which DDP makes anew after the first step."""
    options = {"k": 0.02, "remainder": "int4", "every": 2, "warmup": 2}
    one, many = (on_ranks(comm_ranks.trained, ranks, options, mb, 4) for mb in (25.0, 0.001))
    weights = [{key: each[key] for key in each if key != "counters"} for each in one + many]
    assert all_equal(weights)
    assert one[0]["counters"]["calls"] < many[0]["counters"]["calls"]
    assert one[0]["counters"]["values"] == many[0]["counters"]["values"]


def test_channels_last_keep_their_places() -> None:
    """Sums of small integers are exact."""
    found = on_ranks(comm_ranks.channels_last, 2)
    expected = torch.zeros(8, 6, 3, 3)
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randint(-2, 3, (2, 6, 5, 5), generator=generator).float()
        for row, column in itertools.product(range(3), range(3)):
            expected[:, :, row, column] += x[:, :, row : row + 3, column : column + 3].sum((0, 2, 3))
    assert all(equal(each, expected / 2) for each in found)


@pytest.mark.parametrize("remainder", ["int4", "sign"])
def test_what_has_no_gradient_does_not_move(remainder: str) -> None:
    """Adam would make a step of anything that is not zero."""
    found = on_ranks(comm_ranks.trained, 2, {"k": 0.01, "remainder": remainder}, 25.0, 3)
    assert equal(found[0]["unmoved"], comm_ranks.Small().unmoved.detach())
    assert not equal(found[0]["first.weight"], comm_ranks.Small().first.weight.detach())


def test_bytes_are_those_of_the_formula() -> None:
    """3,600 values above the least size, 64 below; headers of 8 bytes as the layout says."""
    counted = on_ranks(comm_ranks.trained, 2, {"k": 0.01, "remainder": "int4"}, 25.0, 1)[0]
    sizes, dense = (24 * 40, 40 * 24, 900), (40, 24)
    sent = 8 + sum(4 * n for n in dense)
    for n in sizes:
        k, blocks = math.ceil(0.01 * n), math.ceil(n / 128)
        parts = (4 * k, 4, 2 * k, 64 * blocks, 2 * blocks)
        sent += sum(math.ceil(part / 8) * 8 for part in parts)
    assert counted["counters"]["sent_bytes"] == sent
    assert counted["counters"]["dense_bytes"] == 4 * (sum(sizes) + sum(dense))


@pytest.mark.parametrize(
    ("one", "two", "told"),
    [
        ({"k": 0.01}, {"k": 0.02}, "k = 0.01, rank 1 k = 0.02"),
        ({}, {"remainder": "int8"}, "remainder = int4, rank 1 remainder = int8"),
    ],
)
def test_ranks_with_other_options_are_told(one: Any, two: Any, told: str) -> None:
    for error in on_ranks(comm_ranks.mismatched, 2, [one, two]):
        assert isinstance(error, ArgumentError)
        assert told in error.got


def test_ranks_in_other_steps_are_told() -> None:
    for error in on_ranks(comm_ranks.late, 2):
        assert isinstance(error, ArgumentError)
        assert "step 0, rank 1 tensor [5000] torch.float32, step 1" in error.got


def test_replicas_that_differ_are_told() -> None:
    for error in on_ranks(comm_ranks.unequal, 2):
        assert isinstance(error, VerificationError)
        assert error.got == "parameters differ between rank 0 and ranks [1]"


def test_a_rank_that_dies_is_noticed() -> None:
    first, second, third = on_ranks(comm_ranks.dying, 3)
    assert second == KILLED
    assert isinstance(first, RuntimeError)
    assert isinstance(third, RuntimeError)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_passed_on_and_not_kept(value: float) -> None:
    found = on_ranks(comm_ranks.infinite, 2, value)
    assert all_equal(found)
    for step, name in itertools.product(range(3), ("bad", "good")):
        mean = found[0][f"{name}{step}"]
        finite = np.isfinite(mean)
        assert not finite.any() if (name, step) == ("bad", 1) else finite.all()
    assert found[0]["kept"]
    assert found[0]["skipped"] == 1


def test_a_scaler_skips_the_step_and_what_is_kept_follows_its_scale() -> None:
    found = on_ranks(comm_ranks.scaled, 2)
    assert all_equal(found)
    assert found[0]["scales"] == [1024.0, 1024.0, 512.0, 512.0]
    assert found[0]["moved"] == [True, True, False, True]
    assert found[0]["halved"]


def test_momentum_is_that_of_the_mean() -> None:
    found = on_ranks(comm_ranks.with_momentum, 2, 4)
    velocity = torch.zeros(600)
    for step in range(4):
        both = []
        for rank in range(2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            both.append(torch.randint(-4, 5, (600,), generator=generator).float())
        velocity = velocity / 2 + (both[0] + both[1]) / 2
        assert equal(found[0][step], velocity)


def test_momentum_of_what_was_sent_is_gone() -> None:
    found = on_ranks(comm_ranks.masked, 2)
    assert found[0]["sent"].tolist() == [0.0, -12.0, 0.0, 0.0]
    assert found[1]["velocity"].tolist() == [2.0, 0.0, 4.0, 8.0]


@pytest.mark.parametrize(("size", "mean"), [(0.5, 0.5), (4.0, 1.0), (2.0**100, 1.0)])
def test_each_rank_clips_its_own(size: float, mean: float) -> None:
    """Four ranks may have a norm of 4 / sqrt(4) each, which is 1 for each of four values."""
    found = on_ranks(comm_ranks.clipped, 4, size)
    assert all(each.tolist() == [mean] * 4 for each in found)


@pytest.mark.parametrize("kind", ["double", "sparse", "integers"])
def test_other_gradients_are_refused(kind: str) -> None:
    (error,) = on_ranks(comm_ranks.refused, 1, kind)
    assert isinstance(error, ArgumentError)
    assert error.need == "float32, bfloat16 or float16, strided"
