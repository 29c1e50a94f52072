"""What was measured: samples, their median and spread, and ratios of two of them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

from ..errors import ArgumentError

_RESAMPLES = 2000


@dataclass(frozen=True)
class Timing:
    """What one contender took.

    Attributes:
        name: Of the contender.
        samples_us: Microseconds of one call, one sample a round; sample i of every timing of one
            run was taken in round i.
        calls_per_sample: Calls that a sample is the mean of.
        error: Why there are no samples, or "".

    Example:
        >>> timing = Timing("dense", (10.0, 12.0, 11.0))
        >>> timing.us, timing.quartiles_us
        (11.0, (10.5, 11.5))
    """

    name: str
    samples_us: tuple[float, ...] = ()
    calls_per_sample: int = 0
    error: str = ""

    @property
    def us(self) -> float:
        """Median of the samples; NaN where there are none."""
        return statistics.median(self.samples_us) if self.samples_us else math.nan

    @property
    def quartiles_us(self) -> tuple[float, float]:
        """First and third quartile; NaN where there are no samples."""
        if not self.samples_us:
            return math.nan, math.nan
        low, high = np.quantile(self.samples_us, (0.25, 0.75))
        return float(low), float(high)

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a part of the median."""
        low, high = self.quartiles_us
        return (high - low) / self.us


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float


def ratio(slow: Timing, fast: Timing, *, seed: int = 0) -> Ratio:
    """How many times the time of `fast` the time of `slow` is: above 1 where `fast` is faster.

    The interval is a percentile bootstrap over rounds. Both timings of a round are drawn together,
    because they share the state that the GPU was in.

    Raises:
        ArgumentError: One failed, or they are not of one run.

    Example:
        >>> ratio(Timing("dense", (20.0, 22.0)), Timing("sparse", (10.0, 11.0)))
        Ratio(value=2.0, low=2.0, high=2.0)
    """
    for timing in (slow, fast):
        if not timing.samples_us:
            raise ArgumentError(
                f"{timing.name} has no samples: {timing.error or 'it was not run'}",
                need="two timings that succeeded",
                hint="looking at Timing.error first",
            )
    rounds = len(slow.samples_us)
    if len(fast.samples_us) != rounds:
        raise ArgumentError(
            f"{rounds} samples of {slow.name}, {len(fast.samples_us)} of {fast.name}",
            need="timings of one run",
            hint="time_side_by_side([a, b])",
        )
    drawn = np.random.default_rng(seed).integers(0, rounds, (_RESAMPLES, rounds))
    medians = [np.median(np.array(each.samples_us)[drawn], axis=1) for each in (slow, fast)]
    low, high = np.quantile(medians[0] / medians[1], (0.025, 0.975))
    return Ratio(slow.us / fast.us, float(low), float(high))
