"""Whether one build is slower than another, decided so that noise does not.

Two ways to run one case are timed in turns, round by round. What counts is the ratio of a round,
as both of its times saw the same machine. Rounds are added until a bootstrap interval of the
median ratio lies on one side of a limit. An alarm needs all of: it lies above, the difference is
above an absolute floor, and the same once more on new data. `benchmarks/gate.py` measures how often
that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError

# Enough that some lie beyond an end of the interval of one look among several, 1 in 800.
_RESAMPLES = 4000

Samples = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Limits:
    """What counts as slower.

    Attributes:
        ratio: Time over that of the base which the whole interval must exceed.
        floor_us: Least difference, in microseconds.
        level: Confidence of the interval, over all looks that a decision takes.
        width: Half width of the interval, as a part of the ratio, at which sampling ends even
            where the limit lies inside.
        most: Rounds after which it ends whatever the width.

    Raises:
        ArgumentError: Numbers that mean nothing.
    """

    ratio: float = 1.02
    floor_us: float = 0.3
    level: float = 0.99
    width: float = 0.004
    most: int = 200

    def __post_init__(self) -> None:
        fits = self.ratio >= 1 and self.floor_us >= 0 and 0.5 <= self.level < 1
        if not fits or self.width <= 0 or self.most < 1:
            raise ArgumentError(
                f"{self}",
                need="a ratio of 1 and more, a floor of 0 and more, a level below 1",
                hint="Limits()",
            )


@dataclass(frozen=True)
class Verdict:
    """What samples say.

    Attributes:
        ratio: Median ratio of the new time to that of the base.
        low: Lower end of its interval.
        high: Upper end.
        base_us: Median time of the base.
        new_us: Median time of what is judged.
        rounds: How many there were.
        slower: Whether this is an alarm.
    """

    ratio: float
    low: float
    high: float
    base_us: float
    new_us: float
    rounds: int
    slower: bool

    @property
    def width(self) -> float:
        """Half of the interval, as a part of the ratio."""
        return (self.high - self.low) / 2 / self.ratio


def judge(base_us: Sequence[float], new_us: Sequence[float], limits: Limits) -> Verdict:
    """Compare times of the same rounds.

    Args:
        base_us: One time of each round.
        new_us: Those of what is judged.
        limits: What counts.

    Raises:
        ArgumentError: Not one time of each in every round, or times that are not positive.

    Example:
        >>> base = [100.0, 101.0, 99.0, 100.0] * 5
        >>> judge(base, base, Limits()).slower
        False
        >>> judge(base, [1.05 * us for us in base], Limits()).slower
        True
    """
    a, b = np.asarray(base_us, float), np.asarray(new_us, float)
    if a.shape != b.shape or not a.size or not (a.min() > 0 and b.min() > 0):
        raise ArgumentError(
            f"{a.size} times of the base and {b.size} others",
            need="one of each in every round, all positive",
            hint="paired(...)",
        )
    logs = np.log(b) - np.log(a)
    return _verdict(logs, _medians(logs), a, b, limits)


def judge_stored(stored: Samples, measured: Samples, limits: Limits) -> Verdict:
    """Compare times of two runs, each as the ratio to an anchor that took turns with it.

    Args:
        stored: Times of the base and of its anchor, round by round.
        measured: Times of what is judged and of the same anchor now.
        limits: What counts.

    Returns:
        The verdict; `base_us` is what the base would take now, by its ratio to the anchor.
    """
    (base, base_anchor), (new, anchor) = (
        tuple(np.asarray(each, float) for each in pair) for pair in (stored, measured)
    )
    old_logs, new_logs = np.log(base) - np.log(base_anchor), np.log(new) - np.log(anchor)
    # Runs share no rounds, so each is drawn from on its own.
    drawn = _medians(new_logs, 1) - _medians(old_logs, 2)
    middle = np.median(new_logs) - np.median(old_logs)
    scaled = np.exp(np.median(old_logs)) * anchor
    return _verdict(np.asarray([middle]), drawn, scaled, new, limits)


def decide(
    sample: Callable[[int], Samples], limits: Limits, *, least: int = 25, confirm: bool = True
) -> tuple[Verdict, Verdict | None]:
    """Sample until the interval is on one side of the limit, and once more after an alarm.

    Args:
        sample: Gives the times of so many rounds, of the base and of what is judged; it is called
            again for more, and once with 0 to begin anew with other data.
        limits: What counts.
        least: Rounds of the first batch; later ones double what there is.
        confirm: Whether an alarm needs a second one.

    Returns:
        The verdict that counts, and the first one where there were two.
    """
    first = _until_decided(sample, limits, least)
    if not first.slower or not confirm:
        return first, None
    sample(0)
    return _until_decided(sample, limits, least), first


def _until_decided(sample: Callable[[int], Samples], limits: Limits, least: int) -> Verdict:
    # Each look may be wrong, so all of them share what the level leaves (Bonferroni).
    looks = 1 + max(0, math.ceil(math.log2(limits.most / least)))
    one_look = replace(limits, level=1 - (1 - limits.level) / looks)
    base: list[float] = []
    new: list[float] = []
    while True:
        # Twice as many each time: an interval costs more than a few rounds.
        wanted = max(least, len(base))
        a, b = sample(wanted)
        base += a
        new += b
        verdict = judge(base, new, one_look)
        decided = not verdict.low <= limits.ratio <= verdict.high
        # Fewer rounds than asked for: there is no time for more.
        out_of_time = len(a) < wanted or len(base) >= limits.most
        if decided or out_of_time or verdict.width <= limits.width:
            return verdict


def _medians(logs: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """Medians of resampled rounds."""
    drawn = np.random.default_rng(seed).integers(0, logs.size, (_RESAMPLES, logs.size))
    medians: NDArray[np.float64] = np.median(logs[drawn], axis=1)
    return medians


def _verdict(
    logs: NDArray[np.float64],
    drawn: NDArray[np.float64],
    base: NDArray[np.float64],
    new: NDArray[np.float64],
    limits: Limits,
) -> Verdict:
    tail = (1 - limits.level) / 2
    low, high = np.exp(np.quantile(drawn, (tail, 1 - tail)))
    ratio = math.exp(float(np.median(logs)))
    base_us, new_us = float(np.median(base)), float(np.median(new))
    slower = bool(low > limits.ratio and base_us * (ratio - 1) > limits.floor_us)
    return Verdict(ratio, float(low), float(high), base_us, new_us, int(new.size), slower)
