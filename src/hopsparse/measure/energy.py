"""Energy of several ways to compute one thing, by the counter that a GPU keeps of all it uses.

Contenders run in turns of seconds, each replaying its graph without a pause. A turn begins to count
once clocks and power have settled. The counter moves every few tens of milliseconds: power is what
it rose by between two of its steps, over the time between them, so that no step is cut. Time is
that of the GPU. A joule is therefore that of the whole card, its memory and what idles.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import ArgumentError, UnsupportedError
from .clock import Captured, Contender, Recorder, gpu, measuring_stream, turns
from .fault import named
from .power import Sampler, energy_joules, why_no_energy

#: A turn must be long beside the steps of the counter.
LEAST_SECONDS = 1.0
_SETTLE_S = 0.5
# A graph so long hides its launch, and the reading of the counter, behind the graph before it.
_GRAPH_MS = 20.0
_CAPTURE_S = 300.0  # for all of them; only what hangs takes so long


@dataclass(frozen=True)
class Turn:
    """What one turn measured.

    Attributes:
        us: Time of one call.
        watts: Mean power.
        sm_mhz: Median clock, or None.
        celsius: Highest temperature, or None.
        limits: What held the clock down, or None.
    """

    us: float
    watts: float
    sm_mhz: float | None = None
    celsius: float | None = None
    limits: tuple[str, ...] | None = None

    @property
    def joules(self) -> float:
        """Energy of one call."""
        return self.us * 1e-6 * self.watts


@dataclass(frozen=True)
class Energy:
    """What one contender used.

    Attributes:
        name: Of the contender.
        turns: One for each round.
        error: Why there are none, or "".

    Example:
        >>> Energy("dense", (Turn(1000.0, 500.0), Turn(1000.0, 250.0))).joules
        0.375
    """

    name: str
    turns: tuple[Turn, ...] = ()
    error: str = ""

    @property
    def joules(self) -> float:
        """Median energy of one call; NaN without turns."""
        return self._median(lambda turn: turn.joules)

    @property
    def us(self) -> float:
        """Median time of one call; NaN without turns."""
        return self._median(lambda turn: turn.us)

    @property
    def watts(self) -> float:
        """Median power; NaN without turns."""
        return self._median(lambda turn: turn.watts)

    def _median(self, of: Callable[[Turn], float]) -> float:
        return statistics.median(map(of, self.turns)) if self.turns else float("nan")


def check_energy(device: torch.device | int | None = None) -> None:
    """Refuse to go on where energy cannot be read.

    Raises:
        UnsupportedError: There is no GPU, no `hopsparse[bench]`, or no counter.
    """
    where = gpu(device)
    if (why := why_no_energy(where)) is not None:
        raise UnsupportedError(
            f"energy: {why}",
            need="nvidia-ml-py of hopsparse[bench], and a whole GPU that counts its energy",
            hint="pip install 'hopsparse[bench]'",
        )


def energy_side_by_side(
    contenders: Sequence[Contender],
    *,
    rounds: int = 3,
    seconds: float = 2.0,
    device: torch.device | int | None = None,
) -> list[Energy]:
    """Measure the energy of one call of each contender.

    Args:
        contenders: What to compare. One that raises is reported as failed; the others go on.
        rounds: Turns of each; each round starts one contender later.
        seconds: Length of a turn, besides the half second before it.
        device: GPU to measure on; the current one if left out.

    Returns:
        One for each contender, in their order.

    Raises:
        ArgumentError: No rounds, or turns too short for the counter.
        UnsupportedError: See `check_energy`.
        GpuLostError: A kernel of a contender failed; it names the contender.
    """
    check_turns(rounds, seconds)
    check_energy(device)
    where = gpu(device)
    with torch.cuda.device(where), torch.cuda.stream(measuring_stream(where.index)):
        recorder = Recorder(time.monotonic() + _CAPTURE_S)
        captured = [recorder.captured(each, _GRAPH_MS) for each in contenders]
        running = [each for each in captured if isinstance(each, Captured)]
        found: list[list[Turn]] = [[] for _ in running]
        for number in range(rounds if running else 0):
            for index in turns(len(running), number):
                with named(running[index].timing.name, torch.cuda.synchronize):
                    found[index].append(_turn(running[index], seconds, where))
    measured = iter(found)
    return [
        Energy(each.timing.name, tuple(next(measured)))
        if isinstance(each, Captured)
        else Energy(each.name, error=each.error)
        for each in captured
    ]


def check_turns(rounds: int, seconds: float) -> None:
    """Refuse turns that say nothing.

    Raises:
        ArgumentError: No rounds, or turns too short for the counter.
    """
    if rounds < 1 or not LEAST_SECONDS <= seconds < float("inf"):
        raise ArgumentError(
            f"{rounds} rounds of {seconds} seconds",
            need=f"at least one, of at least {LEAST_SECONDS:g} second: the counter moves in steps",
            hint="3 rounds of 2 seconds",
        )


def power_of(readings: Sequence[tuple[float, float]]) -> float | None:
    """Watts between the first and the last step of a counter; None where it made no two.

    Args:
        readings: (seconds, joules), in order.

    Example:
        >>> power_of([(0.0, 5.0), (0.5, 7.0), (0.9, 7.0), (1.5, 107.0), (1.6, 107.0)])
        100.0
    """
    steps = [now for now, before in zip(readings[1:], readings, strict=False) if now[1] > before[1]]
    if len(steps) < 2:
        return None
    (first_s, first_joules), (last_s, last_joules) = steps[0], steps[-1]
    return (last_joules - first_joules) / (last_s - first_s)


def _turn(captured: Captured, seconds: float, device: torch.device) -> Turn:
    _replays(captured.graph, _SETTLE_S, device)
    with Sampler(device) as seen:
        us, readings = _replays(captured.graph, seconds, device)
    watts = power_of(readings)
    if watts is None:
        raise UnsupportedError(
            f"the energy counter of this GPU made no two steps in {seconds:g} seconds",
            need="a counter that moves",
            hint="longer turns",
        )
    turn = Turn(us / captured.timing.calls_per_sample, watts)
    return replace(turn, sm_mhz=seen.sm_mhz, celsius=seen.celsius, limits=seen.limits)


def _replays(
    graph: torch.cuda.CUDAGraph, seconds: float, device: torch.device
) -> tuple[float, list[tuple[float, float]]]:
    """Microseconds of a replay, and the counter meanwhile; one replay is always queued."""
    ends = deque([_replayed(graph)])
    first, count = ends[0], 0
    readings: list[tuple[float, float]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        ends.append(_replayed(graph))
        count += 1
        ends.popleft().synchronize()
        joules = energy_joules(device)
        if joules is not None:
            readings.append((time.perf_counter(), joules))
    last = ends[-1]
    last.synchronize()
    return 1e3 * first.elapsed_time(last) / count, readings


def _replayed(graph: torch.cuda.CUDAGraph) -> torch.cuda.Event:
    graph.replay()
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end.record()
    return end
