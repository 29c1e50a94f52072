from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hopsparse.errors import ArgumentError
from hopsparse.measure.timing import Timing
from hopsparse.tune import Measured, Ranking, Steps, Store, search, tune
from tests.helpers.tuning import KEY, WAYS, Numpy, Way, by_rows, whole

RIGHT = ["rows", "whole", "columns"]


def test_the_fastest_right_candidate_is_first() -> None:
    numpy = Numpy()
    ranking = search(WAYS, numpy.steps())
    assert ranking.order == RIGHT
    assert ranking.measured["rows"] == Measured(2.0, pytest.approx(1.9), pytest.approx(2.2))
    assert ranking.measured["rows"].spread == pytest.approx(0.15)
    assert sorted(ranking.timed) == sorted(RIGHT)
    assert ranking.unmeasured == ()


def test_a_wrong_candidate_is_reported_and_never_timed() -> None:
    numpy = Numpy()
    ranking = search(WAYS, numpy.steps())
    assert "wrong" not in {name for heat in numpy.heats for name in heat}
    assert math.isinf(ranking.measured["wrong"].us)
    assert "times the bound, so it was not timed" in ranking.measured["wrong"].error


def test_what_fails_is_said_and_stops_no_other() -> None:
    ranking = search(WAYS, Numpy().steps())
    assert ranking.failed == {
        "broken": "RuntimeError: no such instruction",
        "uncompiled": "CompileError: oops",
    }


def test_real_times_rank_the_loop_behind_the_product() -> None:
    ways = {"columns": WAYS["columns"], "whole": WAYS["whole"]}
    assert search(ways, Numpy(drift=None).steps()).order == ["whole", "columns"]


def test_a_clock_that_drifts_between_heats_changes_no_order() -> None:
    # The second heat runs at half the speed: without the shared candidate, `b` would look slower.
    ways = {name: Way(whole, us) for name, us in (("a", 3.0), ("c", 4.0), ("b", 2.0), ("d", 5.0))}
    numpy = Numpy(drift=(1.0, 2.0, 0.5))
    ranking = search(ways, numpy.steps(), heat=2)
    assert numpy.heats == [["a", "c"], ["a", "b"], ["b", "d"]]
    assert ranking.order == ["b", "a", "c", "d"]
    assert [ranking.measured[name].us for name in "abcd"] == pytest.approx([3.0, 2.0, 4.0, 5.0])


def test_what_is_known_is_not_measured_again() -> None:
    first = search(WAYS, Numpy().steps())
    numpy = Numpy()
    again = search(WAYS, numpy.steps(), known=first.measured)
    assert again.timed == ()
    assert again.order == first.order
    assert numpy.heats == []
    # What failed is tried again; what was wrong stays wrong.
    assert numpy.compiled == ["broken", "whole"]


def test_a_new_candidate_is_timed_beside_the_fastest_alone() -> None:
    known = search(WAYS, Numpy().steps()).measured
    numpy = Numpy(drift=(3.0,))
    ranking = search({**WAYS, "new": Way(by_rows, 1.5)}, numpy.steps(), known=known)
    assert numpy.heats == [["rows", "new"]]
    assert ranking.timed == ("new",)
    assert ranking.measured["new"].us == pytest.approx(1.5)
    assert ranking.measured["rows"] == known["rows"]


def test_a_spent_budget_leaves_out_the_last_and_says_so() -> None:
    ways = {name: Way(whole, 1.0) for name in "abcdef"}
    ranking = search(ways, Numpy().steps(), budget_s=0.0, heat=2)
    assert ranking.timed == ("a", "b")
    assert ranking.unmeasured == ("c", "d", "e", "f")


def test_after_ctrl_c_the_rest_is_measured_and_no_more() -> None:
    numpy, kept = Numpy(), []
    steps = numpy.steps()

    def interrupted(ready: Mapping[str, object], seconds: float) -> list[Timing]:
        if numpy.heats:
            raise KeyboardInterrupt
        return list(numpy.time(ready, seconds))  # type: ignore[arg-type]

    stopped = Steps(steps.compile, steps.prepare, steps.verify, interrupted)
    ways = {name: Way(whole, us) for name, us in (("a", 3.0), ("b", 2.0), ("c", 1.0))}
    with pytest.raises(KeyboardInterrupt):
        search(ways, stopped, heat=2, keep=lambda found: kept.append(dict(found)))
    assert [set(found) for found in kept] == [{"a", "b"}]
    ranking = search(ways, steps, known=kept[0], heat=2)
    assert ranking.timed == ("c",)
    assert ranking.order == ["c", "b", "a"]


def test_ctrl_c_while_compiling_drops_what_has_not_begun() -> None:
    numpy, closed = Numpy(), []
    steps = numpy.steps()

    def compile_(ways: Sequence[Way]) -> Generator[tuple[Way, str], None, None]:
        try:
            yield from steps.compile(ways)
        finally:
            closed.append(list(numpy.compiled))

    def interrupt(*step: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(WAYS, replace(steps, compile=compile_), show=interrupt)
    assert closed == [["whole"]]
    assert numpy.heats == []


def test_progress_says_how_far_it_is_and_what_is_left() -> None:
    told: list[tuple[str, int, int, str, float | None]] = []
    search(WAYS, Numpy().steps(), budget_s=30.0, show=lambda *step: told.append(step))
    compiled = [step[1:3] for step in told if step[0] == "compile"]
    assert compiled == [(done, len(WAYS)) for done in range(1, len(WAYS) + 1)]
    measured = [step for step in told if step[0] == "measure"]
    names = ["whole", "rows", "columns", "wrong", "broken"]
    assert [step[3] for step in measured] == names
    assert [step[1] for step in measured] == list(range(5))
    assert all(step[4] is not None and 0 <= step[4] <= 30 for step in measured)


def test_a_heat_of_one_compares_nothing() -> None:
    with pytest.raises(ArgumentError, match="2 or more"):
        search(WAYS, Numpy().steps(), heat=1)


def test_no_candidates_are_no_error() -> None:
    assert search({}, Numpy().steps()) == Ranking()


def test_what_was_tuned_is_found_by_the_next_process(tmp_path: Path) -> None:
    tune(Store(tmp_path), KEY, WAYS, Numpy().steps())
    later = Store(tmp_path)
    assert later.best(KEY, WAYS) == "rows"
    numpy = Numpy()
    assert tune(later, KEY, WAYS, numpy.steps()).timed == ()
    assert numpy.heats == []
