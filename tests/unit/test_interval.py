from __future__ import annotations

import math
import statistics

import pytest

from hopsparse.models._interval import mean_and_error, paired_interval, student_quantile


# Quantiles as tables of Student's t print them.
@pytest.mark.parametrize(
    ("freedom", "printed"),
    [(1, 12.706), (2, 4.303), (5, 2.571), (9, 2.262), (10, 2.228), (15, 2.131), (30, 2.042)],
)
def test_student_quantile(freedom: int, printed: float) -> None:
    assert round(student_quantile(freedom), 3) == printed


def test_many_windows_are_normal() -> None:
    assert round(student_quantile(1_000_000), 3) == 1.960


def test_error_of_equal_windows_is_the_textbook_one() -> None:
    means = [2.0, 3.5, 2.5, 4.0]
    mean, error = mean_and_error([8 * each for each in means], [8] * 4)
    assert mean == statistics.mean(means)
    assert error == pytest.approx(statistics.stdev(means) / math.sqrt(4))


def test_longer_windows_weigh_more() -> None:
    assert mean_and_error([10.0, 90.0], [10, 30])[0] == 100 / 40


@pytest.mark.parametrize("sums", [[3.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_no_error_where_nothing_tells_of_spread(sums: list[float]) -> None:
    assert mean_and_error(sums, [4] * len(sums))[1] is None


def test_interval_is_of_the_differences_of_pairs() -> None:
    """Windows differ by far more than the models do, and the interval does not see it."""
    before = [10.0, 50.0, 90.0]
    after = [11.0, 51.0, 91.0]
    found = paired_interval(after, before, [10, 10, 10])
    assert found.value == found.low == found.high == math.exp(0.1)
    unsure = paired_interval([11.0, 51.0, 92.0], before, [10, 10, 10])
    reach = 4.3027 * statistics.stdev([0.1, 0.1, 0.2]) / math.sqrt(3)
    assert unsure.value == pytest.approx(math.exp(0.4 / 3))
    assert unsure.low == pytest.approx(math.exp(0.4 / 3 - reach))
    assert unsure.high == pytest.approx(math.exp(0.4 / 3 + reach))


def test_one_window_has_no_interval() -> None:
    found = paired_interval([4.0], [2.0], [2])
    assert (found.value, found.low, found.high) == (math.exp(1.0), None, None)


def test_ratio_that_overflows_is_infinite() -> None:
    assert paired_interval([1e9, 1e9], [0.0, 0.0], [2, 2]).value == math.inf
