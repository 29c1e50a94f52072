"""Times of two ways in turns, for `hopsparse.measure.gate`: on a GPU, or on one core of a CPU."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import ArgumentError
from .clock import LEAST_ROUNDS, Contender, time_side_by_side
from .gate import Samples

Call = Callable[[], Any]

_CHUNK_S, _SLOT_S, _CHUNKS, _MOST_CALLS = 3e-3, 1e-4, 5, 2000
_MIN_MS, _WARM_S = 2.0, 0.05
# As `time_side_by_side` has: processes that get a tenth of a processor come to an end too.
_BUDGET_S = 30.0


def slowed(calls: Sequence[Call], part: float) -> tuple[list[Call], list[Call]]:
    """The same calls often enough, and a list that does more by a known part.

    Args:
        calls: What to make slower.
        part: By how much: 0.05 makes every twentieth call twice.

    Returns:
        Two lists of one length: as they are, and slower.

    Raises:
        ArgumentError: A part that is no 1/n.

    Example:
        >>> done = []
        >>> plain, slow = slowed([lambda: done.append(1)], 0.25)
        >>> for call in slow:
        ...     call()
        >>> len(plain), len(slow), len(done)
        (4, 4, 5)
    """
    every = round(1 / part) if part > 0 else 0
    if every < 1 or abs(every * part - 1) > 1e-9:
        raise ArgumentError(f"slower by {part}", need="1/2, 1/20 and the like", hint="0.05")

    def twice(call: Call) -> Call:
        def run() -> None:
            call()
            call()

        return run

    plain = [call for _ in range(every) for call in calls]
    return plain, [*(twice(call) for call in calls), *plain[len(calls) :]]


def paired(base: Sequence[Call], new: Sequence[Call], rounds: int, device: torch.device) -> Samples:
    """Times of one call of each, round by round, in turns.

    Args:
        base: Calls that a sample of the base goes through.
        new: As many of what is judged.
        rounds: Samples of each; fewer come where they take over 30 seconds.
        device: Where calls run. On a CPU the time of the processor counts, not that of the clock
            on the wall, and torch is held to one thread: what else runs there matters less. A
            round is then the sum of the least times of its calls; what happens now and then, such
            as a collection of garbage, is not in it.

    Raises:
        ArgumentError: Lists of two lengths.
        GpuLostError: A kernel failed.
    """
    if len(base) != len(new) or not base or rounds < 1:
        raise ArgumentError(
            f"{len(base)} and {len(new)} calls, {rounds} rounds",
            need="two lists of one length, and a round",
            hint="slowed(calls, 0.05)",
        )
    if device.type == "cuda":
        return _on_gpu(base, new, rounds, device)
    with _one_thread():
        return _on_cpu(base, new, rounds)


def _on_gpu(
    base: Sequence[Call], new: Sequence[Call], rounds: int, device: torch.device
) -> Samples:
    contenders = [Contender("base", base), Contender("new", new)]
    first, second = time_side_by_side(
        contenders, rounds=rounds, min_ms=_MIN_MS, warm_s=_WARM_S, device=device
    )
    for timing in (first, second):
        if timing.error:
            raise ArgumentError(
                f"{timing.name}: {timing.error}",
                need="a case that both builds run",
                hint="fewer cases, or a newer base",
            )
    return list(first.samples_us), list(second.samples_us)


def _on_cpu(base: Sequence[Call], new: Sequence[Call], rounds: int) -> Samples:
    ways = (base, new)
    for way in ways:
        for call in way[: len(set(way))]:
            call()
    once_us = _once_us(base)
    slots = [_slots(way, once_us) for way in ways]
    order, each_us = random.Random(0), 1 / sum(len(slot) for slot in slots[0])
    samples: tuple[list[float], list[float]] = ([], [])
    end = time.monotonic() + _BUDGET_S
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.monotonic() > end:
            break
        # What interrupts a program only makes it slower, and seldom the same slot each time.
        least = [[math.inf] * len(slots[0]) for _ in ways]
        for _ in range(_CHUNKS):
            for place, pair in enumerate(zip(*slots, strict=True)):
                for index in order.choice(((0, 1), (1, 0))):
                    least[index][place] = min(least[index][place], _slot_us(pair[index]))
        for sample, found in zip(samples, least, strict=True):
            sample.append(sum(found) * each_us)
    return samples


def _once_us(calls: Sequence[Call]) -> float:
    """Time of one call."""
    return min(_slot_us(calls) for _ in range(3)) / len(calls)


def _slots(calls: Sequence[Call], once_us: float) -> list[list[Call]]:
    """Pieces of a pass, or of some passes, each as short as the clock reads well.

    The other way's piece is next: a machine changes its speed for some milliseconds at a time, as
    others come and go on the core beside or push data out of caches, and both see the same.
    """
    whole = max(1, min(_MOST_CALLS, int(1e6 * _CHUNK_S / max(once_us * len(calls), 1.0))))
    every = list(calls) * whole
    count = max(1, math.ceil(1e6 * _SLOT_S / max(once_us, 1.0)))
    return [every[start : start + count] for start in range(0, len(every), count)]


def _slot_us(calls: Sequence[Call]) -> float:
    started = time.process_time_ns()
    for call in calls:
        call()
    return max(1, time.process_time_ns() - started) / 1e3


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
