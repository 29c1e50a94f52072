from __future__ import annotations

import itertools
import math
import random

import pytest

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.plan import Option, solve

DENSE = Option("dense", 10.0, 100, 0.0)
SPARSE = Option("2:4", 6.0, 56, 0.02)


def random_layers(seed: int) -> tuple[dict[str, list[Option]], float]:
    """Up to 5 layers of up to 4 options, in integers: ties happen and sums are exact."""
    draw = random.Random(seed)
    layers = {
        f"layer{index}": [
            Option(f"form{form}", draw.randint(1, 20), draw.randint(1, 20), draw.randint(0, 12))
            for form in range(draw.randint(1, 4))
        ]
        for index in range(draw.randint(1, 5))
    }
    least = sum(min(option.cost for option in options) for options in layers.values())
    return layers, least + draw.randint(0, 25)


def brute_force(layers: dict[str, list[Option]], budget: float, minimise: str) -> float:
    return min(
        sum(getattr(option, minimise) for option in choice)
        for choice in itertools.product(*layers.values())
        if sum(option.cost for option in choice) <= budget
    )


def totals(layers: dict[str, list[Option]], choice: dict[str, str]) -> tuple[float, float, int]:
    taken = [next(o for o in layers[name] if o.form == form) for name, form in choice.items()]
    return (
        sum(option.cost for option in taken),
        sum(option.time_us for option in taken),
        sum(option.bytes for option in taken),
    )


@pytest.mark.parametrize("minimise", ["time_us", "bytes"])
@pytest.mark.parametrize("seed", range(60))
def test_the_optimum_lies_between_the_bound_and_what_was_found(seed: int, minimise: str) -> None:
    layers, budget = random_layers(seed)
    found = solve(layers, budget, minimise=minimise)
    best = brute_force(layers, budget, minimise)
    # Sums of small integers are exact; only the split step of the bound is a quotient.
    assert found.bound <= best * (1 + 1e-15)
    assert best <= found.value
    # Proven for the plan before filling, and filling only lowers the value.
    assert found.value - found.bound <= found.step
    assert found.cost <= budget
    assert totals(layers, dict(found.choice)) == (found.cost, found.time_us, found.bytes)


def test_exchanging_finds_the_optimum_of_most_small_cases() -> None:
    cases = [random_layers(seed) for seed in range(200)]
    exact = sum(solve(*case).value == brute_force(*case, "time_us") for case in cases)
    assert exact >= 190


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_monotone_and_each_of_its_plans_is_optimal(seed: int) -> None:
    layers, budget = random_layers(seed)
    front = solve(layers, budget).front
    for before, after in itertools.pairwise(front.points):
        assert after.cost > before.cost
        assert after.time_us < before.time_us
    for index, point in enumerate(front.points):
        assert totals(layers, front.choice(index)) == (point.cost, point.time_us, point.bytes)
        assert point.time_us == brute_force(layers, point.cost, "time_us")
        assert solve(layers, point.cost).gap == pytest.approx(0, abs=1e-15)


def test_a_budget_of_exactly_a_plan_takes_that_plan() -> None:
    layers = {name: [DENSE, SPARSE] for name in "abc"}
    # 0.02 + 0.02 + 0.02 is 0.06 only when summed exactly.
    found = solve(layers, math.fsum([0.02] * 3))
    assert set(found.choice.values()) == {"2:4"}
    assert found.gap == 0


def test_no_budget_leaves_the_least_cost_and_infinite_room_the_least_value() -> None:
    layers = {name: [DENSE, SPARSE] for name in "ab"}
    assert set(solve(layers, 0).choice.values()) == {"dense"}
    found = solve(layers, 1e9)
    assert set(found.choice.values()) == {"2:4"}
    assert (found.bound, found.step) == (found.value, 0.0)


def test_a_free_option_is_taken_even_without_budget() -> None:
    assert solve({"a": [DENSE, Option("dense+int8", 7.0, 50, 0.0)]}, 0).choice["a"] == "dense+int8"


def test_ties_go_to_bytes_and_then_to_the_first_name() -> None:
    light = Option("6:8", 6.0, 40, 0.02)
    assert solve({"a": [DENSE, SPARSE, light]}, 0.02).choice["a"] == "6:8"
    both = {"b": [DENSE, SPARSE], "a": [DENSE, SPARSE]}
    assert dict(solve(both, 0.03).choice) == {"b": "dense", "a": "2:4"}
    assert dict(solve({"a": [DENSE, SPARSE], "b": [DENSE, light]}, 0.03).choice) == {
        "a": "dense",
        "b": "6:8",
    }


def test_options_off_the_hull_fill_what_is_left() -> None:
    layers = {
        "a": [Option("dense", 10, 10, 0), Option("mid", 8, 8, 3), Option("low", 2, 2, 5)],
    }
    found = solve(layers, 4)
    assert (found.choice["a"], found.bound) == ("mid", 10 - 8 * 4 / 5)


def test_an_exchange_beats_the_greedy_walk() -> None:
    # The steepest step leaves too little for the one that saves most.
    layers = {
        "a": [Option("dense", 10, 10, 0), Option("2:4", 7, 5, 1)],
        "b": [Option("dense", 30, 30, 0), Option("2:4", 10, 15, 10)],
    }
    found = solve(layers, 10)
    assert dict(found.choice) == {"a": "dense", "b": "2:4"}


def test_a_large_model_is_solved_in_a_moment_with_a_small_gap() -> None:
    draw = random.Random(0)
    forms = [f"form{index}" for index in range(20)]
    layers = {
        f"layer{index}": [DENSE]
        + [Option(f, draw.uniform(2, 10), draw.randint(20, 99), draw.random() ** 2) for f in forms]
        for index in range(200)
    }
    found = solve(layers, 5.0)
    assert found.value - found.bound < found.step
    assert found.gap < 1e-3
    assert solve(layers, 5.0) == found


def test_a_budget_below_the_best_reachable_says_what_is_reachable() -> None:
    with pytest.raises(UnsupportedError) as caught:
        solve({"a": [SPARSE], "b": [SPARSE, DENSE]}, 0.01)
    assert "a as 2:4" in caught.value.got
    assert "0.02" in caught.value.need


@pytest.mark.parametrize(
    ("layers", "budget", "minimise"),
    [
        ({}, 1, "time_us"),
        ({"a": []}, 1, "time_us"),
        ({"a": [DENSE, DENSE]}, 1, "time_us"),
        ({"a": [DENSE]}, math.nan, "time_us"),
        ({"a": [DENSE]}, 1, "cost"),
        ({"a": [Option("2:4", 1.0, 1, -0.1)]}, 1, "time_us"),
        ({"a": [Option("2:4", 1.0, 1, math.nan)]}, 1, "time_us"),
        ({"a": [Option("2:4", math.inf, 1, 0.1)]}, 1, "time_us"),
    ],
)
def test_what_means_nothing_is_refused(
    layers: dict[str, list[Option]], budget: float, minimise: str
) -> None:
    with pytest.raises(ArgumentError):
        solve(layers, budget, minimise=minimise)
