"""Whose kernel failed, on a stand-in for the GPU: a queue that breaks, and stays broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopsparse.errors import DriverError, GpuLostError
from hopsparse.measure.fault import named
from hopsparse.tune import search
from tests.helpers.tuning import Array, Numpy, Way, whole


class Queue:
    """Work is enqueued; what fails shows when somebody waits, then and for ever."""

    def __init__(self) -> None:
        self.is_broken = False

    def launch(self, works: bool = True) -> None:
        self.is_broken |= not works

    def launch_and_tell(self) -> None:
        self.is_broken = True
        raise GpuLostError("cuLaunchKernelEx returned 715", need="0", hint="none")

    def wait(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal instruction was encountered")


def test_the_first_that_fails_is_named_and_not_the_next() -> None:
    queue = Queue()
    with named("first", queue.wait):
        queue.launch()
    told = r"second ran a kernel that failed \(RuntimeError: CUDA error"
    with pytest.raises(GpuLostError, match=told), named("second", queue.wait):
        queue.launch(works=False)


def test_the_innermost_name_stands() -> None:
    queue = Queue()
    told = "^algorithm 7 ran a kernel"
    with (
        pytest.raises(GpuLostError, match=told),
        named("library", queue.wait),
        named("algorithm 7", queue.wait),
    ):
        queue.launch(works=False)


def test_a_launch_that_reports_a_failed_kernel_gets_the_name_too() -> None:
    """The driver does not know whose kernel it was."""
    queue = Queue()
    told = "^ours ran a kernel that failed"
    with pytest.raises(GpuLostError, match=told), named("ours", queue.wait):
        queue.launch_and_tell()


@pytest.mark.parametrize("refusal", [ValueError("no"), DriverError("no", need="yes", hint="no")])
def test_a_refusal_passes_as_it_is(refusal: Exception) -> None:
    with pytest.raises(type(refusal)) as caught, named("ours", Queue().wait):
        raise refusal
    assert caught.value is refusal


def test_an_error_that_passes_is_no_lost_gpu() -> None:
    """Such as a launch with too much shared memory, which torch reports to the next who asks."""
    left = [RuntimeError("CUDA error: invalid argument")]

    def wait() -> None:
        if left:
            raise left.pop()

    with pytest.raises(RuntimeError, match="invalid argument"), named("ours", wait):
        pass


def test_a_search_stops_at_the_candidate_whose_kernel_failed() -> None:
    queue, numpy = Queue(), Numpy()

    def failing(w: Array, x: Array) -> Array:
        queue.launch(works=False)
        return whole(w, x)

    ways = {name: Way(whole, 1.0) for name in "abcd"} | {"bad": Way(failing, 1.0), "e": Way(whole)}
    steps, kept = replace(numpy.steps(), wait=queue.wait), []
    with pytest.raises(GpuLostError, match="bad ran a kernel that failed"):
        search(ways, steps, heat=2, keep=lambda found: kept.append(sorted(found)))
    assert kept[-1] == list("abcd")
    assert "e" not in {name for heat in numpy.heats for name in heat}
