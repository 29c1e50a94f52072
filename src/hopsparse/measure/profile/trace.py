"""A profile as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from .counters import TIME, Kernel, counted
from .subject import Subject

_PHASES, _KERNELS = 1, 2


def trace(subjects: Sequence[Subject]) -> dict[str, Any]:
    """The trace as JSON values: phases as they were timed, and below them kernels one by one.

    ncu runs every kernel alone and several times, so kernels have lengths and counters, and no
    place among the phases: they are laid end to end.

    Args:
        subjects: What was profiled; each gets a track of phases and one of kernels.

    Example:
        >>> sorted(trace([]))
        ['displayTimeUnit', 'traceEvents']
    """
    events = [_name("process_name", _PHASES, 0, "phases")]
    if any(subject.kernels for subject in subjects):
        events.append(_name("process_name", _KERNELS, 0, "kernels (ncu, end to end)"))
    for track, subject in enumerate(subjects, start=1):
        events.append(_name("thread_name", _PHASES, track, f"{subject.name} ({subject.clock})"))
        events += _phases(subject, track)
        if subject.kernels:
            events.append(_name("thread_name", _KERNELS, track, subject.name))
            events += _kernels(subject.kernels, track)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _phases(subject: Subject, track: int) -> Iterator[dict[str, Any]]:
    for span in subject.spans:
        yield {
            "ph": "X",
            "pid": _PHASES,
            "tid": track,
            "ts": span.start_us,
            "dur": span.us,
            "name": f"{span.phase} {span.what}".strip(),
            "cat": span.phase or "subject",
        }


def _kernels(kernels: Sequence[Kernel], track: int) -> Iterator[dict[str, Any]]:
    start = 0.0
    for kernel in kernels:
        us = (kernel.value(TIME) or 0.0) / 1e3
        known = {key: each for key, each in asdict(counted([kernel])).items() if each is not None}
        yield {
            "ph": "X",
            "pid": _KERNELS,
            "tid": track,
            "ts": start,
            "dur": us,
            "name": kernel.name,
            "cat": kernel.phase or "kernel",
            "args": known | {"phase": kernel.phase},
        }
        start += us


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": track, "name": kind, "args": {"name": name}}
