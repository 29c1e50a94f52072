"""The search itself: compile all, verify each, time those that are right, in heats.

A heat times a few candidates side by side, together with the fastest one so far. Clocks drift from
heat to heat, and the one that they share takes that out: times are stated as they would have been
in the first heat. What a heat found is kept before the next one begins, so that stopping in
between, by Ctrl-C or a spent budget, loses nothing that was finished.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..errors import ArgumentError, GpuLostError
from ..measure.fault import named
from ..measure.timing import Timing
from .store import Measured

C = TypeVar("C")
R = TypeVar("R")

#: Is told the phase, steps done, steps in all, what is next, and seconds left or None.
Show = Callable[[str, int, int, str, float | None], None]


@dataclass(frozen=True)
class Steps(Generic[C, R]):
    """What an operator does with a candidate.

    Attributes:
        compile: Gives each of some candidates as soon as it is compiled, with an error or "". It
            is closed where the search is interrupted.
        prepare: Makes what can be run.
        verify: Runs it on random data; gives its error as a part of what is allowed, at most 1.
        time: Times some side by side, by name, within about so many seconds; one timing each, in
            their order.
        wait: Waits for the GPU, so that a kernel that fails is laid to the candidate it is of.
    """

    compile: Callable[[Sequence[C]], Generator[tuple[C, str], None, None]]
    prepare: Callable[[C], R]
    verify: Callable[[R], float]
    time: Callable[[Mapping[str, R], float], Sequence[Timing]]
    wait: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Ranking:
    """What a search knows at its end.

    Attributes:
        measured: All that is known, by name of the candidate; also what was known before.
        timed: Names of those that this search timed.
        failed: Why others could not be compiled, run or timed; they are tried again next time.
        unmeasured: Names of those that the budget left no time for.
    """

    measured: Mapping[str, Measured] = field(default_factory=dict)
    timed: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    unmeasured: tuple[str, ...] = ()

    @property
    def order(self) -> list[str]:
        """Names of those that were ever timed, the fastest first."""
        timed = [name for name, each in self.measured.items() if math.isfinite(each.us)]
        return sorted(timed, key=lambda name: self.measured[name].us)


def search(
    candidates: Mapping[str, C],
    steps: Steps[C, R],
    *,
    known: Mapping[str, Measured] | None = None,
    budget_s: float = 60.0,
    heat: int = 5,
    keep: Callable[[Mapping[str, Measured]], None] = lambda found: None,
    show: Show = lambda *step: None,
) -> Ranking:
    """Find the fastest of some candidates.

    Args:
        candidates: By name; the most promising first, as a budget may leave out the last.
        steps: What is done with one.
        known: What was measured before; it is not measured again.
        budget_s: Seconds for verifying and timing. Heats run, however little is left, until one
            candidate is timed.
        heat: Candidates timed side by side, at least 2.
        keep: Is given what was found, after each heat.
        show: Is told how far it is.

    Raises:
        ArgumentError: A heat of fewer than 2.
        GpuLostError: A kernel of a candidate failed; it names the candidate. What was found before
            is kept.

    Example:
        >>> steps = Steps(
        ...     compile=lambda values: ((value, "") for value in values),
        ...     prepare=lambda value: value,
        ...     verify=lambda value: 0.0,
        ...     time=lambda ready, seconds: [Timing(name, (us,)) for name, us in ready.items()],
        ... )
        >>> search({"slow": 2.0, "fast": 1.0}, steps).order
        ['fast', 'slow']
    """
    if heat < 2:
        raise ArgumentError(f"heats of {heat}", need="2 or more", hint="5")
    run = _Search(candidates, steps, dict(known or {}), keep, show)
    missing = run.compiled([name for name in candidates if name not in run.measured])
    end = run.begin(budget_s)
    while missing and (not run.timed or time.monotonic() < end):
        count = heat if run.best is None else heat - 1
        run.heat(missing[:count], len(missing), end)
        missing = missing[count:]
    return Ranking(run.measured, tuple(run.timed), run.failed, tuple(missing))


class _Search(Generic[C, R]):
    """What a search has found so far."""

    def __init__(
        self,
        candidates: Mapping[str, C],
        steps: Steps[C, R],
        measured: dict[str, Measured],
        keep: Callable[[Mapping[str, Measured]], None],
        show: Show,
    ) -> None:
        self.candidates, self.steps = candidates, steps
        self.measured = measured
        self.timed: list[str] = []
        self.failed: dict[str, str] = {}
        self._keep, self._show = keep, show
        self._began = self._end = time.monotonic()
        self._done = 0

    @property
    def best(self) -> str | None:
        """The fastest candidate that is known."""
        names = [name for name in self.candidates if name in self.measured]
        timed = [name for name in names if math.isfinite(self.measured[name].us)]
        return min(timed, key=lambda name: self.measured[name].us) if timed else None

    def begin(self, budget_s: float) -> float:
        """Start the clock of verifying and timing; gives when it ends."""
        self._began = time.monotonic()
        self._end = self._began + budget_s
        return self._end

    def compiled(self, names: Sequence[str]) -> list[str]:
        """Those of some candidates that compile, in their order."""
        by_value = {id(self.candidates[name]): name for name in names}
        began, good = time.monotonic(), set()
        if not names:
            return []
        with closing(self.steps.compile([self.candidates[name] for name in names])) as running:
            for done, (value, error) in enumerate(running, 1):
                name = by_value[id(value)]
                if error:
                    self.failed[name] = error
                else:
                    good.add(name)
                left = (time.monotonic() - began) / done * (len(names) - done)
                self._show("compile", done, len(names), name, left)
        return [name for name in names if name in good]

    def heat(self, names: Sequence[str], missing: int, end: float) -> None:
        """Verify some candidates and time them beside the fastest so far."""
        anchor = self.best
        right = {}
        for name in (name for name in (anchor, *names) if name is not None):
            self._tell(name, missing)
            if (ready := self._verified(name)) is not None:
                right[name] = ready
            self._done += name != anchor
            missing -= name != anchor
        # A budget that is spent still gives a heat that has begun the time to end.
        seconds = max(end - time.monotonic(), 1.0)
        timings = self.steps.time(right, seconds) if set(right) - {anchor} else []
        self._record(dict(zip(right, timings, strict=bool(timings))), anchor)
        self._keep(self.measured)

    def _verified(self, name: str) -> R | None:
        """What can be run of a candidate; a wrong one is never run again."""
        try:
            with named(name, self.steps.wait):
                ready = self.steps.prepare(self.candidates[name])
                excess = self.steps.verify(ready)
        except GpuLostError:
            raise
        except Exception as error:
            self.failed[name] = " ".join(f"{type(error).__name__}: {error}".split())
            return None
        if not excess <= 1:
            told = f"wrong: an error of {excess:.3g} times the bound, so it was not timed"
            self.measured[name] = Measured.wrong(told)
            return None
        return ready

    def _record(self, timings: Mapping[str, Timing], anchor: str | None) -> None:
        factor = 1.0
        if anchor is not None and anchor in timings and timings[anchor].samples_us:
            factor = self.measured[anchor].us / timings[anchor].us
        for name, timing in timings.items():
            if name == anchor:
                continue
            if not timing.samples_us:
                self.failed[name] = timing.error or "it was not timed"
                continue
            low, high = timing.quartiles_us
            self.measured[name] = Measured(timing.us * factor, low * factor, high * factor)
            self.timed.append(name)

    def _tell(self, name: str, missing: int) -> None:
        now = time.monotonic()
        left = max(0.0, self._end - now)
        if self._done:
            left = min(left, (now - self._began) / self._done * missing)
        self._show("measure", self._done, self._done + missing, name, left)
