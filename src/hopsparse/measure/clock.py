"""Device time of several ways to compute one thing, measured side by side.

A contender is captured into one CUDA graph that runs all its calls, so that no launch from Python
is timed. Each call works on its own copy of the weights, so that the L2 cache holds none of them.
Graphs are replayed in turns, A B C, B C A, ..., with events around each replay: clocks, power and
temperature drift, and drift hits all alike. Ratios are therefore of one run, round by round.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from ..errors import ArgumentError, GpuLostError, UnsupportedError
from .fault import named
from .timing import Ratio as Ratio
from .timing import Timing as Timing
from .timing import ratio as ratio

#: Rounds that are measured however little of the budget is left.
LEAST_ROUNDS = 3
# A graph of more nodes takes longer to capture than it tells more.
_MOST_CALLS = 4000
# A call of cuSPARSELt in float16 takes the host 0.15 s, as a captured one does.
_MOST_CAPTURE_S = 2.0

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """One way to compute a result.

    Attributes:
        name: How tables call it.
        calls: `calls[i]` computes the result from copy i of the inputs, on the current stream.

    Example:
        >>> Contender("add", [lambda: 1 + 1]).name
        'add'
    """

    name: str
    calls: Sequence[Call]

    def __post_init__(self) -> None:
        if not self.calls:
            raise ArgumentError(
                f"contender {self.name!r} without calls", need="at least one", hint="calls=[run]"
            )


def copies_to_defeat_l2(
    bytes_per_copy: int, l2_bytes: int, *, memory_bytes: int = 16 << 30, most: int = 256
) -> int:
    """How many copies to rotate so that over twice the L2 cache lies between two uses of one.

    Args:
        bytes_per_copy: What a call reads of its own copy, as the smallest contender stores it.
        l2_bytes: Size of the cache.
        memory_bytes: What all copies may take; two are always made.
        most: Upper limit, for copies so small that the cache cannot be defeated cheaply.

    Example:
        >>> copies_to_defeat_l2(50 << 20, 60 << 20), copies_to_defeat_l2(1 << 30, 60 << 20)
        (4, 2)
    """
    if bytes_per_copy < 1:
        raise ArgumentError(
            f"{bytes_per_copy} bytes a copy", need="at least one", hint="the bytes of a weight"
        )
    others = 2 * l2_bytes // bytes_per_copy + 1
    return max(2, min(others + 1, memory_bytes // bytes_per_copy, most))


def turns(count: int, number: int) -> list[int]:
    """Who runs when in round `number`: each round starts one contender later.

    Example:
        >>> turns(3, 0), turns(3, 1)
        ([0, 1, 2], [1, 2, 0])
    """
    return [(number + place) % count for place in range(count)]


def time_side_by_side(
    contenders: Sequence[Contender],
    *,
    rounds: int = 25,
    min_ms: float = 4.0,
    warm_s: float = 0.3,
    budget_s: float = 30.0,
    flush_l2: bool = False,
    device: torch.device | int | None = None,
) -> list[Timing]:
    """Measure the device time of one call of each contender.

    Every call is run once eagerly first: what it compiles, allocates or looks up is not timed.

    Args:
        contenders: What to compare. One that raises is reported as failed; the others go on.
        rounds: Samples of each.
        min_ms: Calls are repeated in a graph until it runs this long, as far as the host captures
            them in 2 seconds; launching a graph costs microseconds.
        warm_s: Seconds of replays before the first sample, to bring clocks up.
        budget_s: Seconds for all of it. A contender that is not captured by then fails; rounds
            stop, but not before `LEAST_ROUNDS`.
        flush_l2: Overwrite the cache before each replay, and run each call once a replay: what a
            single cold call takes, with some microseconds of launching in it.
        device: GPU to measure on; the current one if left out.

    Returns:
        One timing for each contender, in their order.

    Raises:
        ArgumentError: No rounds, or a time that is negative.
        UnsupportedError: There is no GPU.
        GpuLostError: A kernel of a contender failed; it names the contender.
    """
    if rounds < 1 or min(min_ms, warm_s, budget_s) < 0:
        raise ArgumentError(
            f"rounds={rounds}, min_ms={min_ms}, warm_s={warm_s}, budget_s={budget_s}",
            need="at least one round, and no negative time",
            hint="the defaults",
        )
    where = gpu(device)
    end = time.monotonic() + budget_s
    with torch.cuda.device(where), torch.cuda.stream(measuring_stream(where.index)):
        least_ms = 0.0 if flush_l2 else min_ms
        recorder = Recorder(end)
        captured = [recorder.captured(each, least_ms) for each in contenders]
        running = [each for each in captured if isinstance(each, Captured)]
        flush = _flush_buffer(where) if flush_l2 else None
        everyone = " or ".join(each.timing.name for each in running)
        with named(f"{everyone}, in turns,", torch.cuda.synchronize):
            _warm_up(running, warm_s, end)
            samples = iter(_sampled(running, rounds, end, flush))
    return [
        replace(each.timing, samples_us=next(samples)) if isinstance(each, Captured) else each
        for each in captured
    ]


def host_time(run: Call, calls: int = 2000, *, chunk: int = 50) -> float:
    """Seconds that the host needs for one eager call, however long the GPU takes.

    The GPU is waited for after every `chunk` calls, outside the timed span: a full launch queue
    would make the host wait for the GPU inside it.

    Args:
        run: The call.
        calls: How many to time, rounded up to whole chunks.
        chunk: Calls of a sample; the result is the median over samples.

    Example:
        >>> 0 < host_time(lambda: None, calls=100) < 1e-3
        True
    """
    if min(calls, chunk) < 1:
        raise ArgumentError(
            f"calls={calls}, chunk={chunk}", need="at least one of each", hint="the defaults"
        )
    wait: Call = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(chunk):
        run()
    spans = []
    for _ in range(-(-calls // chunk)):
        wait()
        started = time.perf_counter()
        for _ in range(chunk):
            run()
        spans.append((time.perf_counter() - started) / chunk)
    wait()
    return statistics.median(spans)


def gpu(device: torch.device | int | None = None) -> torch.device:
    """The GPU to measure on.

    Raises:
        UnsupportedError: There is none, torch sees none, or its current stream is being captured.
    """
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
        raise UnsupportedError(
            f"torch {torch.__version__} ({build}) sees no GPU",
            need="an NVIDIA GPU and a build of torch that runs on it",
            hint="hopsparse doctor, which says what is missing",
        )
    index = device if device is None or isinstance(device, int) else device.index
    where = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    # Measuring waits, which would fail inside the capture and spoil it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with torch.cuda.device(where):
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    "a measurement while a CUDA graph is captured",
                    need="a current stream that is not captured",
                    hint="measure or tune before the capture",
                )
    return where


@dataclass(frozen=True)
class Captured:
    """A graph that can be replayed.

    Attributes:
        timing: What its samples go to; it says how many calls the graph makes.
        graph: The graph.
    """

    timing: Timing
    graph: torch.cuda.CUDAGraph


@cache
def measuring_stream(index: int) -> torch.cuda.Stream:
    """The stream that contenders are captured on."""
    # cuBLAS keeps a workspace for every stream that it has seen: one stream, one workspace.
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


class Recorder:
    """Captures contenders on the current stream, into memory that their graphs share.

    Graphs may share memory because they are replayed one after the other, and nobody reads their
    results.

    Args:
        end: `time.monotonic()` after which nothing is captured.
    """

    def __init__(self, end: float) -> None:
        self._end = end
        self._pool = torch.cuda.graph_pool_handle()

    def captured(self, contender: Contender, min_ms: float) -> Captured | Timing:
        """The graph of a contender, or why there is none."""
        if time.monotonic() > self._end:
            return Timing(contender.name, error="not measured: the time for this run was spent")
        try:
            with named(contender.name, torch.cuda.synchronize):
                graph, passes = self._repeated(contender.calls, min_ms)
        except GpuLostError:
            raise
        except Exception as error:
            # Whatever a rival raises is a fact about the rival. torch takes no pool again that a
            # broken capture has left.
            self._pool = torch.cuda.graph_pool_handle()
            words = " ".join(f"{type(error).__name__}: {error}".split())
            return Timing(contender.name, error=words)
        calls = len(contender.calls) * passes
        return Captured(Timing(contender.name, calls_per_sample=calls), graph)

    def _repeated(self, calls: Sequence[Call], min_ms: float) -> tuple[torch.cuda.CUDAGraph, int]:
        """A graph that runs so long, and how often it makes all calls."""
        torch.cuda.synchronize()
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph, host_s = self._capture(calls)
        fits = min(_MOST_CALLS // len(calls), int(_MOST_CAPTURE_S / host_s))
        passes = max(1, min(fits, math.ceil(min_ms / max(_span_ms(graph), 1e-3))))
        return (graph if passes == 1 else self._capture([*calls] * passes)[0]), passes

    def _capture(self, calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, float]:
        """A graph of the calls, and the seconds that the host needed to make them."""
        # `torch.cuda.graph` leaves its stream current, and hides the first error, when a capture
        # breaks.
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with nothing_collected():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            started = time.perf_counter()
            try:
                for call in calls:
                    call()
                host_s = time.perf_counter() - started
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph, host_s

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that a call has broken or left."""
        try:
            with warnings.catch_warnings():
                # That the graph is empty, where the first call raised.
                warnings.simplefilter("ignore")
                graph.capture_end()
        except RuntimeError:
            # Some releases of torch then believe that the capture goes on: the next empty_cache()
            # would fail, and the memory of the capture would stay taken.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
                torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """A graph that is collected during a capture would free memory, which breaks it.

    Cheaper than to collect before every capture, which takes 0.1 s in a process that has torch.

    Example:
        >>> with nothing_collected():
        ...     gc.isenabled()
        False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _span_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Rough time of one replay."""
    graph.replay()
    start, stop = _event(), _event()
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def _warm_up(running: Sequence[Captured], seconds: float, end: float) -> None:
    until = min(time.monotonic() + seconds, end)
    while running and time.monotonic() < until:
        for each in running:
            each.graph.replay()
        torch.cuda.synchronize()


def _sampled(
    running: Sequence[Captured], rounds: int, end: float, flush: torch.Tensor | None
) -> list[tuple[float, ...]]:
    """Microseconds a call by contender and round."""
    spans: list[list[_Span]] = []
    for number in range(rounds if running else 0):
        if number >= LEAST_ROUNDS and time.monotonic() > end:
            break
        spans.append(_round(running, number, flush))
        # One round is always queued behind the one that is waited for: the GPU never idles, and
        # the launch of a graph hides behind the graph before it.
        if number:
            spans[-2][turns(len(running), number - 1)[-1]][1].synchronize()
    torch.cuda.synchronize()
    return [
        tuple(
            1e3 * start.elapsed_time(stop) / each.timing.calls_per_sample
            for start, stop in (row[index] for row in spans)
        )
        for index, each in enumerate(running)
    ]


_Span = tuple[torch.cuda.Event, torch.cuda.Event]


def _round(running: Sequence[Captured], number: int, flush: torch.Tensor | None) -> list[_Span]:
    """Queue one replay of each; the events come back in the order of the contenders."""
    spans = [(_event(), _event()) for _ in running]
    for index in turns(len(running), number):
        if flush is not None:
            flush.fill_(1)
        start, stop = spans[index]
        start.record()
        running[index].graph.replay()
        stop.record()
    return spans


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _flush_buffer(device: torch.device) -> torch.Tensor:
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(size, dtype=torch.int8, device=device)
