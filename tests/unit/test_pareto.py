from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from hopsparse.errors import ArgumentError, CheckpointError
from hopsparse.models.budget import Problem, ratio_of, solve_within
from hopsparse.models.pareto import Pareto, pareto_of, share_text
from hopsparse.report.figures import NARROW, WIDE
from hopsparse.report.pareto import pareto_svg, save_pareto
from tests.unit.test_budget import FORMS, problem


def solved(objective: str = "time", scale: float = 1.0) -> tuple[Problem, Pareto]:
    made = problem(objective, layers=24)
    _, solution = solve_within(made, 1.05, scale)
    return made, pareto_of(made, solution, scale=scale, budget=1.05)


@pytest.mark.parametrize("objective", ["time", "floor", "bytes"])
def test_the_front_trades_quality_for_gain_and_no_uniform_form_beats_it(objective: str) -> None:
    _, pareto = solved(objective)
    for before, after in itertools.pairwise(pareto.front):
        assert after.ratio > before.ratio
        assert after.gain > before.gain
        assert after.value < before.value
    assert pareto.front[0].gain == pytest.approx(1, rel=1e-12)
    for point in pareto.uniform:
        at_least_as_good = [each for each in pareto.front if each.ratio <= point.ratio]
        # A uniform form between two corners may pass the corner by less than one layer's step.
        step = max(before.value - after.value for before, after in itertools.pairwise(pareto.front))
        assert min(each.value for each in at_least_as_good) <= point.value + step


def test_points_are_decode_steps_of_their_forms() -> None:
    made, pareto = solved("time")
    _, solution = solve_within(made, 1.05)
    for index, point in enumerate(pareto.front):
        step = made.step(solution.front.choice(index))
        assert point.value == pytest.approx(step.time_us, rel=1e-12)
        assert point.weight_bytes == step.weight_bytes
        assert sum(point.shares.values()) == 24
    last = pareto.front[-1]
    assert last.shares == {"2:4+int8": 24}
    assert pareto.chosen is not None
    assert pareto.chosen.ratio <= 1.05


def test_uniform_forms_are_all_there() -> None:
    made, pareto = solved(scale=2.0)
    assert [point.label for point in pareto.uniform] == list(FORMS)
    by_form = {point.label: point for point in pareto.uniform}
    assert by_form["2:4"].ratio == ratio_of(made.cost(made.uniform("2:4")), 2.0)
    assert (by_form["dense"].ratio, by_form["dense"].gain) == (1.0, 1.0)


def test_milestones_name_the_best_plan_up_to_a_perplexity() -> None:
    _, pareto = solved()
    found = pareto.milestones((1.0, 1.001, 1.01, 50.0, 60.0))
    assert found[0] is pareto.front[0]
    assert found[-1] is pareto.front[-1]
    assert len(found) == len({id(point) for point in found})
    assert all(point.ratio <= 1.01 for point in found[:-1])


def test_json_holds_every_plan_and_says_that_nothing_was_measured() -> None:
    _, pareto = solved("floor")
    facts = json.loads(json.dumps(pareto.to_json(), allow_nan=False))
    assert facts["measured"] is False
    assert Pareto.from_json(facts) == pareto
    assert len(facts["front"]) == len(pareto.front)
    assert facts["chosen"]["layers_by_form"] == dict(pareto.chosen.shares)  # type: ignore[union-attr]


def test_shares_are_read_as_percent() -> None:
    assert share_text({"a": 1, "b": 2, "c": 0}) == "67 % b, 33 % a"


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_figure_names_its_axes_and_forms(width: float) -> None:
    _, pareto = solved()
    svg = pareto_svg(pareto, width)
    for words in ("predicted perplexity, dense = 1", "all 2:4+int8", "this plan", "not measured"):
        assert words in svg
    assert "currentColor" in svg
    assert svg == pareto_svg(pareto, width)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_same_plans_give_the_same_file(suffix: str, tmp_path: Path) -> None:
    _, pareto = solved("bytes", scale=50.0)
    for name in ("one", "two"):
        save_pareto(pareto, tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_files_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    _, pareto = solved()
    with pytest.raises(ArgumentError, match="plot.pdf"):
        save_pareto(pareto, tmp_path / "plot.pdf")
    with pytest.raises(CheckpointError):
        save_pareto(pareto, tmp_path / "no" / "plot.png")
