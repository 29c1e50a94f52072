"""How sure a mean over windows is: standard errors, and an interval for a ratio of perplexities.

Means are per token over windows of possibly different lengths, so errors are those of the ratio
estimator (Cochran, Sampling Techniques, 1977, 6.4); with equal windows it is the plain standard
error of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# 97.5 % quantiles of Student's t for 1 to 9 degrees of freedom; a series gives the others.
_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
_NORMAL = 1.959964


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; the ends are None where one window tells nothing of spread.

    Attributes:
        value: The estimate.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None


def mean_and_error(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float | None]:
    """The mean a token over all windows, and its standard error over windows.

    Args:
        sums: Of each window.
        counts: Tokens of each window.

    Returns:
        The mean, 0 without tokens; the error, None for fewer than two windows.

    Example:
        >>> mean_and_error([10.0, 30.0], [10, 10])
        (2.0, 1.0)
    """
    total, windows = sum(counts), len(sums)
    mean = sum(sums) / max(1, total)
    if windows < 2 or not math.isfinite(mean):
        return mean, None
    pairs = zip(sums, counts, strict=True)
    squares = sum((each - mean * count) ** 2 for each, count in pairs)
    return mean, math.sqrt(squares * windows / (windows - 1)) / total


def paired_interval(
    after: Sequence[float], before: Sequence[float], counts: Sequence[int]
) -> Interval:
    """exp(mean difference of losses): the ratio of two perplexities on the same windows.

    The interval is Student's t of the differences window by window, on the scale of losses.

    Args:
        after: Summed loss of each window in nats.
        before: The same of the model that is divided by.
        counts: Tokens of each window.

    Example:
        >>> paired_interval([7.0, 9.0], [7.0, 9.0], [10, 10])
        Interval(value=1.0, low=1.0, high=1.0)
    """
    differences = [b - a for b, a in zip(after, before, strict=True)]
    mean, error = mean_and_error(differences, counts)
    if error is None:
        return Interval(_exp(mean))
    reach = student_quantile(len(counts) - 1) * error
    return Interval(_exp(mean), _exp(mean - reach), _exp(mean + reach))


def student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, to four digits.

    Args:
        freedom: Degrees of freedom, at least 1.

    Source: Abramowitz and Stegun 26.7.5, from ten degrees on.

    Example:
        >>> student_quantile(1), round(student_quantile(15), 3)
        (12.7062, 2.131)
    """
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    z, n = _NORMAL, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)
