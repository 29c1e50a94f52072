"""The arithmetic of energy, which needs no GPU; tests/gpu/test_energy.py measures."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.measure import energy, power
from hopsparse.measure.clock import Contender
from hopsparse.measure.energy import (
    Energy,
    Turn,
    check_energy,
    check_turns,
    energy_side_by_side,
    power_of,
)


def test_power_is_taken_between_two_steps_of_the_counter() -> None:
    """500 W, read every 7 ms from a counter that moves every 100 ms, from anywhere in a step."""
    for start in (0.0, 0.03, 0.099):
        times = [start + 0.007 * number for number in range(300)]
        readings = [(now, 500.0 * math.floor(now / 0.1) * 0.1) for now in times]
        watts = power_of(readings)
        assert watts is not None
        # Off by one reading at either end, and never by a step: those are 0.1 s of 2.
        assert abs(watts - 500) <= 500 * 0.007 / (times[-1] - times[0] - 0.2)


@pytest.mark.parametrize("joules", [[], [1.0], [1.0, 1.0], [1.0, 2.0], [1.0, 2.0, 2.0]])
def test_a_counter_without_two_steps_has_no_power(joules: list[float]) -> None:
    assert power_of(list(enumerate(joules))) is None


def test_medians_are_over_turns_and_energy_is_of_a_turn() -> None:
    turns = (Turn(1000.0, 400.0), Turn(500.0, 600.0), Turn(2000.0, 500.0))
    found = Energy("dense", turns)
    assert (found.us, found.watts) == (1000.0, 500.0)
    assert found.joules == pytest.approx(0.4)  # of 0.4, 0.3 and 1.0
    assert math.isnan(Energy("dense", error="no").joules)


@pytest.mark.parametrize(
    ("rounds", "seconds"), [(0, 2.0), (3, 0.5), (3, math.inf), (3, math.nan), (3, -1.0)]
)
def test_turns_that_say_nothing_are_refused(rounds: int, seconds: float) -> None:
    with pytest.raises(ArgumentError, match="the counter moves in steps"):
        check_turns(rounds, seconds)
    with pytest.raises(ArgumentError):
        energy_side_by_side([Contender("a", [lambda: 0])], rounds=rounds, seconds=seconds)


def test_without_a_gpu_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="sees no GPU"):
        check_energy()
    with pytest.raises(UnsupportedError, match="sees no GPU"):
        energy_side_by_side([Contender("a", [lambda: 0])])


@pytest.fixture
def forgotten() -> Iterator[None]:
    """NVML is looked for once a process: anew in the test, and after it."""
    power._nvml.cache_clear()
    power._opened.cache_clear()
    yield
    power._nvml.cache_clear()
    power._opened.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_without_the_bench_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(energy, "gpu", lambda device: torch.device("cuda", 0))
    with pytest.raises(UnsupportedError) as caught:
        check_energy()
    assert "nvidia-ml-py is not installed" in caught.value.got
    assert "hopsparse[bench]" in caught.value.need
    assert "pip install 'hopsparse[bench]'" in caught.value.hint
