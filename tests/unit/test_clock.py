"""The arithmetic of measuring, which needs no GPU; tests/gpu/test_clock.py measures."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import nullcontext, suppress

import pytest
import torch

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.measure.clock import (
    Contender,
    Timing,
    copies_to_defeat_l2,
    host_time,
    nothing_collected,
    ratio,
    time_side_by_side,
    turns,
)
from hopsparse.ops.spmm_nm.cost import Problem
from hopsparse.ops.spmm_nm.scaled.plan import numbers_for
from hopsparse.ops.spmm_nm.scaled.tuning import tune_scaled
from hopsparse.ops.spmm_nm.tuning import tune_problem

L2 = 60 << 20


def test_every_contender_has_every_turn_equally_often() -> None:
    rounds = [turns(3, number) for number in range(6)]
    assert rounds[:3] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    for place in range(3):
        assert sorted(order[place] for order in rounds) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("size", [1 << 20, 19 << 20, 60 << 20, 61 << 20, 119 << 20])
def test_over_twice_the_cache_lies_between_two_uses_and_no_more_than_needed(size: int) -> None:
    others = copies_to_defeat_l2(size, L2) - 1
    assert others * size > 2 * L2
    assert others == 1 or (others - 1) * size <= 2 * L2


def test_copies_are_bounded_by_memory_and_count_but_never_one() -> None:
    assert copies_to_defeat_l2(10 << 20, L2, memory_bytes=50 << 20) == 5
    assert copies_to_defeat_l2(1 << 40, L2) == 2
    assert copies_to_defeat_l2(2, L2, most=7) == 7
    with pytest.raises(ArgumentError, match="0 bytes"):
        copies_to_defeat_l2(0, L2)


def test_a_drift_that_hits_both_leaves_a_ratio_exact() -> None:
    drift = [1 + 0.1 * number for number in range(20)]
    slow = Timing("slow", tuple(3.0 * each for each in drift))
    fast = Timing("fast", tuple(2.0 * each for each in drift))
    found = ratio(slow, fast)
    assert found.value == pytest.approx(1.5)
    assert found.low == pytest.approx(1.5)
    assert found.high == pytest.approx(1.5)


def test_noise_widens_the_interval_around_the_ratio() -> None:
    noise = torch.randn(2, 40, dtype=torch.double) / 50
    slow = Timing("slow", tuple((2 + noise[0]).tolist()))
    fast = Timing("fast", tuple((1 + noise[1]).tolist()))
    found = ratio(slow, fast)
    assert found.low < found.value < found.high
    assert found.low < 2 < found.high
    assert found.high - found.low < 0.1
    assert ratio(slow, fast) == found
    assert ratio(slow, fast, seed=1) != found


def test_a_ratio_needs_two_timings_of_one_run() -> None:
    good = Timing("good", (1.0, 2.0))
    with pytest.raises(ArgumentError, match="bad has no samples: it broke"):
        ratio(Timing("bad", error="it broke"), good)
    with pytest.raises(ArgumentError, match="3 samples of other, 2 of good"):
        ratio(Timing("other", (1.0, 2.0, 3.0)), good)


def test_a_failed_timing_has_no_numbers() -> None:
    failed = Timing("failed", error="it broke")
    assert math.isnan(failed.us)
    assert all(math.isnan(each) for each in failed.quartiles_us)


def test_spread_is_the_distance_of_quartiles() -> None:
    timing = Timing("t", (10.0, 20.0, 30.0, 40.0, 50.0))
    assert timing.us == 30
    assert timing.quartiles_us == (20, 40)
    assert timing.spread == pytest.approx(2 / 3)


def test_host_time_counts_every_call_and_takes_the_median_of_chunks() -> None:
    calls = []
    assert host_time(lambda: calls.append(1), calls=95, chunk=10) > 0
    assert len(calls) == 10 + 100
    with pytest.raises(ArgumentError, match="chunk=0"):
        host_time(lambda: None, chunk=0)


def test_nothing_is_timed_without_calls_or_rounds() -> None:
    with pytest.raises(ArgumentError, match="'empty' without calls"):
        Contender("empty", [])
    with pytest.raises(ArgumentError, match="rounds=0"):
        time_side_by_side([Contender("one", [int])], rounds=0)
    with pytest.raises(ArgumentError, match="min_ms=-1"):
        time_side_by_side([Contender("one", [int])], min_ms=-1)


def test_without_a_gpu_timing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="sees no GPU"):
        time_side_by_side([Contender("one", [int])])


def test_nothing_is_measured_or_tuned_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device": lambda where: nullcontext(where),
        "is_current_stream_capturing": lambda: True,
    }
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, fact)
    ran: list[int] = []
    for refused in (
        lambda: time_side_by_side([Contender("one", [lambda: ran.append(1)])]),
        lambda: tune_problem(Problem(16, 64, 64), "bfloat16"),
        lambda: tune_scaled(Problem(16, 64, 64), numbers_for("int8")),
    ):
        with pytest.raises(UnsupportedError, match="a measurement while a CUDA graph is captured"):
            refused()
    assert not ran


class Node:
    """Part of a cycle, which reference counts never free."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_cycle_outlives_a_capture_and_collection_is_as_it_was(is_enabled: bool) -> None:
    (gc.enable if is_enabled else gc.disable)()
    try:
        alive = weakref.ref(Node())
        with suppress(KeyError), nothing_collected():
            for _ in range(10 * gc.get_threshold()[0]):
                Node()
            assert alive() is not None
            raise KeyError
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
    gc.collect()
    assert alive() is None
