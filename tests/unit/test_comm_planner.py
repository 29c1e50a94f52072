"""What is chosen for a bucket, for links that were not measured but are easy to think about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hopsparse.comm import HybridOptions, HybridState, Link, PlannedState
from hopsparse.comm.link import _line
from hopsparse.comm.planner import plan_bucket
from hopsparse.errors import ArgumentError

MILLION = [torch.Size([1024, 1024])] * 4


def link(bytes_per_s: float, delay_s: float, coding: float = 10e-9) -> Link:
    """An all-reduce of two ranks sends what it reduces once."""
    byte = 1 / bytes_per_s
    return Link(delay_s, byte, 1.05 * byte, delay_s, byte, coding, 5e-9)


@pytest.mark.parametrize(
    ("found", "method"),
    [
        (link(400e9, 20e-6, coding=0.05e-9), "dense"),  # NVLink
        (link(12.5e6, 1e-3), "hybrid"),  # 100 Mbit/s
        (link(125e6, 0.3e-3), "hybrid"),  # 1 Gbit/s
        (link(1.25e9, 0.1e-3, coding=50e-9), "bf16"),  # 10 Gbit/s and a slow processor
    ],
)
def test_what_suits_a_link(found: Link, method: str) -> None:
    assert plan_bucket(MILLION, found, HybridOptions(every=2), ranks=2).method == method


def test_one_rank_sends_nothing_however_slow_its_link_seems() -> None:
    slow = link(1e6, 0.5)
    assert plan_bucket(MILLION, slow, HybridOptions(), ranks=2).method == "hybrid"
    assert plan_bucket(MILLION, slow, HybridOptions(), ranks=1, rank=2).method == "dense"


def test_low_rank_is_chosen_where_it_is_asked_for_and_quicker() -> None:
    slow, options = link(12.5e6, 1e-3), HybridOptions(remainder="int4")
    assert plan_bucket(MILLION, slow, options, ranks=2).method == "hybrid"
    assert plan_bucket(MILLION, slow, options, ranks=2, rank=2).method == "low-rank"
    # Vectors are sent as they are.
    vectors = [torch.Size([1 << 22])]
    assert plan_bucket(vectors, slow, options, ranks=2, rank=2).method == "hybrid"


def test_predictions_are_those_of_a_sheet_of_paper() -> None:
    found = plan_bucket([torch.Size([1000, 1024])], link(1e6, 0.5), HybridOptions(k=0.01), 2, 1)
    n, exact = 1_024_000, 10_240
    sent = 4 * exact + 4 * 16 + 2 * exact + 66 * 8000
    assert found.predicted_ms == pytest.approx(
        {
            "dense": 500 + 4e-3 * n,
            "bf16": 500 + 2.1e-3 * n,
            "hybrid": 500 + 1e-3 * sent + 1e-5 * n,
            "low-rank": 1500 + 4e-3 * 2024 + 5e-6 * n,
        }
    )


def test_more_ranks_exchange_three_times_and_send_sums() -> None:
    slow = link(1e6, 0.5, coding=1e-12)
    two, eight = (
        plan_bucket(MILLION, slow, HybridOptions(), ranks).predicted_ms["hybrid"]
        for ranks in (2, 8)
    )
    sparse, blocks = 4 * (6 * 1049 + 2 + 64), 4 * 8192 * 66
    assert two == pytest.approx(500 + 1e-3 * (sparse + blocks), rel=1e-4)
    assert eight == pytest.approx(1500 + 1e-3 * (7 * sparse + 2 * 7 / 8 * blocks), rel=1e-4)


@given(
    st.floats(1e6, 1e12),
    st.floats(1e-6, 1e-1),
    st.floats(1e-11, 1e-6),
    st.integers(2, 16),
    st.lists(st.integers(0, 1 << 22), min_size=1, max_size=4),
    st.sampled_from([None, 2]),
)
def test_it_never_plans_what_is_slower_than_bfloat16(
    speed: float, delay: float, coding: float, ranks: int, sizes: list[int], rank: int | None
) -> None:
    shapes = [torch.Size([size]) for size in sizes]
    found = plan_bucket(shapes, link(speed, delay, coding), HybridOptions(), ranks, rank)
    chosen, half = found.predicted_ms[found.method], found.predicted_ms["bf16"]
    assert chosen <= max(1.02 * half, half + 0.1)


def test_a_plan_needs_gradients_that_mean_the_same() -> None:
    with pytest.raises(ArgumentError, match="momentum = 0.9"):
        PlannedState(HybridState(momentum=0.9))
    with pytest.raises(ArgumentError, match="clip = 1.0"):
        PlannedState(HybridState(clip=1.0))
    with pytest.raises(ArgumentError, match="rank = 0"):
        PlannedState(HybridState(), rank=0)


def test_a_link_comes_back_from_a_checkpoint() -> None:
    found = link(3e8, 1e-4)
    assert Link.from_tensor(found.to_tensor()) == found
    halved = replace(found, half_s=2e-4)
    assert Link.from_tensor(halved.to_tensor()) == halved
    assert Link.from_tensor(halved.to_tensor()[:7]) == found
    unknown = torch.tensor([1.0] * 7 + [torch.nan])
    for wrong in (torch.zeros(8), torch.ones(6), -halved.to_tensor(), unknown):
        with pytest.raises(ArgumentError, match="8 times"):
            Link.from_tensor(wrong)


def test_a_fast_link_is_measured_by_messages_that_it_notices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for byte, largest in ((1e-6, 1 << 20), (1e-9, 8 << 20), (2e-12, 64 << 20)):
        sizes: list[int] = []

        def slowest(
            group: object,
            device: object,
            work: Callable[[], object],
            rounds: int,
            sizes: list[int] = sizes,
            byte: float = byte,
        ) -> float:
            work()
            return 1e-5 + byte * sizes[-1]

        monkeypatch.setattr("hopsparse.comm.link._slowest", slowest)
        assert _line(None, torch.device("cpu"), sizes.append)[1] == pytest.approx(byte)  # type: ignore[arg-type]
        assert max(sizes) == largest


def test_conversions_that_take_longer_than_they_save_are_left_out() -> None:
    fast = link(2e11, 2e-5, coding=5e-9)
    large = [torch.Size([1 << 26])]
    assert plan_bucket(large, fast, HybridOptions(), ranks=2).method == "bf16"
    late = replace(fast, half_s=1e-3)
    found = plan_bucket(large, late, HybridOptions(), ranks=2)
    assert found.method == "dense"
    assert found.predicted_ms["bf16"] > found.predicted_ms["dense"]
