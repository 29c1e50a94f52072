"""Times of subjects, in turns: by captured graphs on a GPU, by the clock of the host elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..measure.clock import Contender, copies_to_defeat_l2, time_side_by_side, turns
from ..measure.profile.phases import Recorder
from ..measure.profile.subject import Subject
from ..measure.timing import Timing
from .profile_subjects import Built, Setting, build

_BUDGET_S, _WARM_CALLS = 12.0, 2
_MOST_BYTES = 8 << 30


def timed(settings: Sequence[Setting], device: torch.device, rounds: int) -> list[Subject]:
    """Make every subject, time them in turns, and record the phases of one call each.

    Args:
        settings: What to run.
        device: Where.
        rounds: Samples of each.

    Raises:
        VerificationError: An operator computes something else than float64 does.
        GpuLostError: A kernel failed.
    """
    recorder, built = Recorder(device), []
    with torch.no_grad():
        for setting in settings:
            with recorder.recording(setting.name):
                built.append(build(setting, device, _copies(setting, device)))
        for each in built:
            for _ in range(_WARM_CALLS):
                each.calls[0]()
            with recorder.recording(each.setting.name):
                each.calls[0]()
        spans = recorder.spans()
        timings = _timings(built, device, rounds)
    clock = "gpu events" if device.type == "cuda" else "host"
    return [
        Subject(
            each.setting.name,
            each.plan,
            each.work,
            timing,
            clock,
            tuple(span for span in spans if span.subject == each.setting.name),
        )
        for each, timing in zip(built, timings, strict=True)
    ]


def _copies(setting: Setting, device: torch.device) -> int:
    """Weights to rotate so that the L2 cache holds none of them."""
    if device.type != "cuda" or not setting.op:
        return 1
    size = 4 if setting.op == "select" else 2
    nbytes = max(1, int(setting.out * setting.k * size * setting.kept))
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return copies_to_defeat_l2(nbytes, l2_bytes, memory_bytes=_MOST_BYTES, most=32)


def _timings(built: Sequence[Built], device: torch.device, rounds: int) -> list[Timing]:
    names = [each.setting.name for each in built]
    if device.type == "cuda" and all(each.setting.op for each in built):
        contenders = [Contender(name, each.calls) for name, each in zip(names, built, strict=True)]
        return time_side_by_side(contenders, rounds=rounds, budget_s=_BUDGET_S, device=device)
    samples: list[list[float]] = [[] for _ in built]
    end = time.monotonic() + _BUDGET_S
    for number in range(rounds):
        for index in turns(len(built), number):
            samples[index].append(_eager_us(built[index].calls[0], device))
        if time.monotonic() > end:
            break
    timings = [Timing(name, calls_per_sample=1) for name in names]
    return [replace(t, samples_us=tuple(each)) for t, each in zip(timings, samples, strict=True)]


def _eager_us(call: Callable[[], Any], device: torch.device) -> float:
    """One call as a program makes it, with what the host needs for it."""
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - started)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    call()
    last.record()
    last.synchronize()
    return 1e3 * float(first.elapsed_time(last))
