"""Whole runs on any device: how long each takes until the device is done, and on what power."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from .power import energy_joules


class Watch:
    """Times runs one after the other, and counts the energy of all of them.

    For runs of milliseconds; `clock` times kernels.

    Args:
        device: Where they run.

    Attributes:
        ms: Of each run, until the device was done with it.

    Example:
        >>> watch = Watch(torch.device("cpu"))
        >>> watch.time(lambda: torch.ones(8).sum())
        >>> len(watch.ms), watch.watts()
        (1, None)
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.ms = device, list[float]()
        self._joules = self._energy()
        self._started = time.perf_counter()

    def time(self, run: Callable[[], object]) -> None:
        """Time one run."""
        started = time.perf_counter()
        run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.ms.append((time.perf_counter() - started) * 1e3)

    def watts(self) -> float | None:
        """Mean power since the watch was made; None where the device does not count energy."""
        joules = self._energy()
        if joules is None or self._joules is None:
            return None
        return round((joules - self._joules) / (time.perf_counter() - self._started), 1)

    def memory_bytes(self) -> int:
        """Most that was allocated since `emptied`; of a CPU 0."""
        if self._device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated(self._device)

    def _energy(self) -> float | None:
        return energy_joules(self._device) if self._device.type == "cuda" else None


def emptied(device: torch.device) -> None:
    """Give back the memory that nothing holds, and count its peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
