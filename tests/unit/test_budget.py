from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.measure import Decoder, Workload
from hopsparse.models.budget import (
    Outcome,
    Problem,
    as_plan,
    fit_scale,
    meet_budget,
    ratio_of,
    solve_within,
)
from hopsparse.models.sensitivity import LayerCosts, Sensitivity
from hopsparse.plan import TARGETS, ModelPlan

SIDE = 8192
FORMS = {"dense": 0.0, "6:8": 2e-4, "2:4": 2e-3, "2:4+int8": 2.1e-3, "dense+int8": 1e-4}


def problem(objective: str = "time", layers: int = 160, forms: dict[str, float] = FORMS) -> Problem:
    """Large square layers; the later, the more sensitive."""
    costs = {
        f"layer{index:03}": LayerCosts(
            (SIDE, SIDE), {form: cost * (1 + index / 40) for form, cost in forms.items()}
        )
        for index in range(layers)
    }
    decoder = Decoder(dict.fromkeys(costs, (SIDE, SIDE)), (32000, SIDE), layers // 4, 1024)
    sensitivity = Sensitivity(costs, decoder)
    return Problem(sensitivity, Workload(1, 2048), TARGETS["h200"], objective, "made up")


def compounding(factor: float, power: float) -> Callable[[ModelPlan], float]:
    """A model whose log-perplexity rises as a power of the summed cost."""
    return lambda plan: math.exp(factor * plan.predicted["cost_nats"] ** power)


def test_a_plan_is_within_its_budget_and_says_what_it_predicts() -> None:
    plan, solution = solve_within(problem(), 1.05)
    assert plan.predicted["perplexity_ratio"] <= 1.05
    assert plan.predicted["cost_nats"] == solution.cost
    assert plan.predicted["gap_to_bound"] == solution.gap < 0.01
    assert plan.predicted["speedup"] > 1.3
    assert (plan.target, plan.batch, plan.context, plan.model) == ("h200", 1, 2048, "made up")
    assert plan.budget == 1.05


@pytest.mark.parametrize("objective", ["time", "floor", "bytes"])
def test_more_budget_never_makes_a_plan_worse(objective: str) -> None:
    made = problem(objective)
    values = [
        made.step(solve_within(made, budget)[0].layers).value(objective)
        for budget in (1.0, 1.01, 1.05, 1.2, 1.5, 3.0)
    ]
    assert values == sorted(values, reverse=True)
    assert values[0] == made.dense.value(objective)
    assert values[-1] < values[0]


def test_the_most_sensitive_layers_stay_most_careful() -> None:
    plan, _ = solve_within(problem(forms={"dense": 0.0, "2:4": 2e-3}), 1.2)
    forms = list(plan.layers.values())
    assert forms == sorted(forms)  # 2:4 first, then dense
    assert set(forms) == {"dense", "2:4"}


def test_a_larger_scale_is_a_smaller_budget() -> None:
    plan, solution = solve_within(problem(), 1.21, scale=2.0)
    assert solution.cost <= math.log(1.21) / 2
    assert plan.layers == solve_within(problem(), 1.1)[0].layers


def test_the_value_of_a_plan_is_that_of_its_decode_step() -> None:
    made = problem("floor")
    _, solution = solve_within(made, 1.1)
    rest = made.dense.head.floor_us + made.dense.cache.floor_us
    assert solution.time_us + rest == pytest.approx(made.step(solution.choice).floor_us, rel=1e-12)


def test_out_of_reach_says_the_best_reachable() -> None:
    made = problem(forms={"2:4": 2e-3, "6:8": 2e-4})
    with pytest.raises(UnsupportedError) as caught:
        solve_within(made, 1.01)
    best = ratio_of(made.cost(made.uniform("6:8")), 1.0)
    assert f"at least {best:.4g}" in caught.value.need
    assert "layer159 as 6:8" in caught.value.got


@pytest.mark.parametrize(
    ("points", "goal", "expected"),
    [
        ([(0.1, 0.2)], 0.2, 2.0),
        # One point scales in proportion.
        ([(0.1, 0.2)], 0.1, 2.0),
        # Twice the cost, four times the increase: 0.1 is met at 0.1 * sqrt(0.1 / 0.2).
        ([(0.1, 0.2), (0.2, 0.8)], 0.1, 0.1 / (0.1 * math.sqrt(0.5))),
        # The pair around the goal counts, not the two nearest.
        ([(0.1, 0.1), (0.2, 0.19), (0.4, 0.8)], 0.2, None),
        # No increase at all counts as a sixteenth of the goal.
        ([(0.1, -0.5)], 0.16, 0.1),
        # What cannot be measured counts as 64 times the goal.
        ([(0.1, math.inf)], 0.1, 64.0),
        # Noise: more cost, less increase. The power stays at 0.5, the result between the two.
        ([(0.1, 0.3), (0.2, 0.1)], 0.2, 0.2 / math.sqrt(0.02)),
    ],
)
def test_scales_by_hand(
    points: list[tuple[float, float]], goal: float, expected: float | None
) -> None:
    found = fit_scale(points, goal)
    if expected is None:
        assert 0.2 < goal / found < 0.4
    else:
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(("factor", "power"), [(1, 1), (3, 1), (0.3, 1), (5, 1.5), (1, 0.8)])
@pytest.mark.parametrize("budget", [1.05, 1.5])
def test_the_loop_meets_the_budget_within_a_tenth(
    factor: float, power: float, budget: float
) -> None:
    found = meet_budget(problem(), compounding(factor, power), budget, rounds=4)
    ratio = found.plan.predicted["measured_ratio"]
    assert ratio <= budget
    fastest = solve_within(problem(), 1e9)[0].layers == found.plan.layers
    assert fastest or math.log(ratio) >= 0.9 * math.log(budget)
    assert len(found.rounds) <= 4


def test_of_the_plans_that_met_the_budget_the_fastest_is_kept() -> None:
    ratios = iter([1.01, 1.2, 1.02])
    found = meet_budget(problem(), lambda _: next(ratios), 1.05)
    times = [each.plan.predicted["time_us"] for each in found.rounds if each.ratio <= 1.05]
    assert len(found.rounds) == 3
    assert found.plan.predicted["time_us"] == min(times)


def test_a_plan_that_met_the_budget_closely_ends_the_loop() -> None:
    found = meet_budget(problem(), lambda _: 1.048, 1.05)
    assert len(found.rounds) == 1


def test_the_fastest_plan_of_all_ends_the_loop() -> None:
    found = meet_budget(problem(), lambda _: 1.0001, 30.0)
    assert len(found.rounds) == 1
    assert set(found.plan.layers.values()) == {"2:4+int8"}


def test_a_plan_that_failed_is_never_built_again() -> None:
    seen: list[dict[str, str]] = []

    def build(plan: ModelPlan) -> float:
        seen.append(dict(plan.layers))
        return 1.0501 if len(seen) < 4 else 1.0499

    found = meet_budget(problem(), build, 1.05, rounds=5)
    assert isinstance(found, Outcome)
    assert all(seen.count(layers) == 1 for layers in seen)
    costs = [each.cost for each in found.rounds]
    assert costs == sorted(costs, reverse=True)


def test_a_dense_plan_is_not_built() -> None:
    def build(_: ModelPlan) -> float:
        raise AssertionError

    found = meet_budget(problem(forms={"dense": 0.0, "2:4": 0.5}), build, 1.05)
    assert found.plan.predicted["measured_ratio"] == 1.0
    assert set(found.plan.layers.values()) == {"dense"}


@pytest.mark.parametrize("ratio", [1.2, math.inf, math.nan])
def test_a_budget_that_no_plan_met_is_an_error_with_the_best(ratio: float) -> None:
    with pytest.raises(UnsupportedError) as caught:
        meet_budget(problem(), lambda _: ratio, 1.05, rounds=2)
    assert "the best of 2 plans" in caught.value.got
    assert f"{ratio:.4g}" in caught.value.need


def test_unmeasured_forms_have_no_cost() -> None:
    with pytest.raises(ArgumentError, match="not measured"):
        as_plan(problem(), {"layer000": "4:6"}, None)
    with pytest.raises(ArgumentError, match="not measured"):
        as_plan(problem(), {"head": "2:4"}, None)


def test_layers_that_cannot_take_a_form_take_their_cheapest() -> None:
    made = problem(layers=4)
    layers = dict(made.sensitivity.layers)
    layers["layer000"] = LayerCosts((SIDE, SIDE), {"dense": 0.0}, "no token reached it")
    fewer = Problem(Sensitivity(layers, made.sensitivity.decoder), made.workload, made.target)
    assert list(fewer.uniform("2:4").values()) == ["dense", "2:4", "2:4", "2:4"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: problem("speed"),
        lambda: solve_within(problem(), 0.99),
        lambda: solve_within(problem(), math.nan),
        lambda: solve_within(problem(), 1.05, scale=0.0),
        lambda: meet_budget(problem(), lambda _: 1.0, 1.0),
        lambda: meet_budget(problem(), lambda _: 1.0, 1.05, rounds=0),
        lambda: fit_scale([], 0.1),
        lambda: fit_scale([(0.0, 0.1)], 0.1),
        lambda: fit_scale([(0.1, 0.1)], 0.0),
    ],
)
def test_what_means_nothing_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError):
        make()
