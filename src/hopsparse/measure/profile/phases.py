"""Listeners to the phases of operators: one that marks them for profilers, one that times them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...ranges import listening

_PREFIX = "hopsparse"


@dataclass(frozen=True)
class Span:
    """One phase as it was timed.

    Attributes:
        subject: What was profiled.
        phase: One of `hopsparse.ranges.PHASES`, or "" of the subject as a whole.
        what: Operator or format.
        start_us: When it began, after the first span of its recording.
        us: How long it took: on the GPU where there is one, else on the host.
        depth: How many spans it lies in.
    """

    subject: str
    phase: str
    what: str
    start_us: float
    us: float
    depth: int


def range_name(kind: str, *parts: str) -> str:
    """The name of a range, in letters that no profiler gives a meaning.

    Example:
        >>> range_name("phase", "format", "decode nm")
        'hopsparse.phase.format.decode_nm'
    """
    return ".".join((_PREFIX, kind, *parts)).replace(" ", "_")


@contextmanager
def marked(subject: str = "") -> Iterator[None]:
    """NVTX ranges around every phase, and one around all of them, for ncu and other profilers.

    Args:
        subject: Name of the range around all; none if left out.

    Example:
        >>> with marked():  # without a CUDA build of torch nothing is marked
        ...     pass
    """
    nvtx = torch.cuda.nvtx if torch.version.cuda is not None else None
    if nvtx is None:
        yield
        return
    if subject:
        nvtx.range_push(range_name("subject", subject))
    try:
        with listening(_Marks()):
            yield
    finally:
        if subject:
            nvtx.range_pop()


class _Marks:
    def enter(self, phase: str, what: str) -> None:
        name = range_name("phase", phase, what)
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


class Recorder:
    """Times phases: by events of the current stream on a GPU, by the clock of the host elsewhere.

    Phases of other threads are not recorded. On a GPU a span lasts from the end of the work before
    it to the end of its own, so that waiting for the host counts too.

    Args:
        device: Where the work runs.

    Example:
        >>> from hopsparse.formats import NM
        >>> from hopsparse.ops import spmm_nm
        >>> recorder = Recorder(torch.device("cpu"))
        >>> with recorder.recording("tiny"):
        ...     _ = spmm_nm(NM.from_dense(torch.eye(4)), torch.ones(1, 4))
        >>> [(span.phase, span.depth) for span in recorder.spans()]
        [('', 0), ('format', 1), ('sparse', 1)]
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._thread = threading.get_ident()
        self._open: list[int] = []
        self._marks: list[tuple[str, str, str, int]] = []
        self._times: list[list[float | torch.cuda.Event]] = []
        self._subject = ""

    @contextmanager
    def recording(self, subject: str) -> Iterator[None]:
        """Record the phases of a block, and the block itself."""
        self._subject = subject
        self._enter("", subject)
        try:
            with listening(self):
                yield
        finally:
            self.leave()

    def enter(self, phase: str, what: str) -> None:
        """A phase begins."""
        if threading.get_ident() == self._thread:
            self._enter(phase, what)

    def leave(self) -> None:
        """The phase that began last ends."""
        if threading.get_ident() == self._thread:
            self._times[self._open.pop()].append(self._now())

    def spans(self) -> list[Span]:
        """What was recorded, in order of beginning; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        if not self._times:
            return []
        first = self._times[0][0]
        found = []
        for (subject, phase, what, depth), (start, end) in zip(
            self._marks, self._times, strict=True
        ):
            begin = _between(first, start)
            found.append(Span(subject, phase, what, begin, _between(start, end), depth))
        return found

    def _enter(self, phase: str, what: str) -> None:
        self._marks.append((self._subject, phase, what, len(self._open)))
        self._open.append(len(self._times))
        self._times.append([self._now()])

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return 1e6 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Microseconds from one moment to another."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert isinstance(end, torch.cuda.Event)
    return 1e3 * float(start.elapsed_time(end))
