"""Clocks, watts and temperature of a GPU, read through NVML. Settings are never changed.

NVML comes with the driver and is spoken to by `nvidia-ml-py` (the `bench` extra). Where either is
missing every number is None, and `State.why` says so: a measurement goes on without it.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons; what keeps clocks low without being a limit
# (idle, an application's own setting) is left out.
_LIMITS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "hardware temperature",
    0x80: "power brake",
}


@dataclass(frozen=True)
class State:
    """What a GPU is doing at one moment.

    Attributes:
        sm_mhz: Clock of the SMs.
        memory_mhz: Clock of the memory.
        watts: Power, as averaged by the driver.
        celsius: Temperature of the chip.
        limits: What holds the clocks down, such as `power cap`; None where it cannot be read.
        why: Why a number is None, or "".
    """

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None
    limits: tuple[str, ...] | None = None
    why: str = ""


def sample(device: torch.device | int | None = None) -> State:
    """Read a GPU once; takes about a millisecond.

    Args:
        device: Which one, as torch counts; the current one if left out.

    Example:
        >>> state = sample()
        >>> state.watts is not None or state.why != ""
        True
    """
    nvml, handle, why = _opened(_index(device))
    if nvml is None:
        return State(why=why)
    reasons = _read(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    power = _read(nvml, "nvmlDeviceGetPowerUsage", handle)
    state = State(
        sm_mhz=_read(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        memory_mhz=_read(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
        watts=None if power is None else power / 1e3,
        celsius=_read(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        limits=None
        if reasons is None
        else tuple(word for bit, word in _LIMITS.items() if int(reasons) & bit),
    )
    if None in (state.sm_mhz, state.memory_mhz, state.watts, state.celsius, state.limits):
        return State(**{**vars(state), "why": "this GPU does not tell all of it"})
    return state


def energy_joules(device: torch.device | int | None = None) -> float | None:
    """Energy that the GPU has used since its driver was loaded; None where it cannot be read.

    The counter moves every few tens of milliseconds: take differences over a second and more.
    """
    nvml, handle, _ = _opened(_index(device))
    if nvml is None:
        return None
    used = _read(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle)
    return None if used is None else used / 1e3


def why_no_energy(device: torch.device | int | None = None) -> str | None:
    """Why `energy_joules` has no number, or None if it has.

    Example:
        >>> (why_no_energy() is None) == (energy_joules() is not None)
        True
    """
    nvml, _, why = _opened(_index(device))
    if nvml is None:
        return why
    return None if energy_joules(device) is not None else "this GPU, or slice of one, tells none"


class Sampler:
    """Watch a GPU during a `with` block, from a thread.

    Attributes:
        states: What was read, in order; the first and the last at the edges of the block.
        seconds: Length of the block.
        joules: Energy of the block, or None.

    Args:
        device: Which one, as torch counts; the current one if left out.
        interval_s: Seconds between two readings.

    Example:
        >>> with Sampler() as seen:
        ...     _ = sum(range(1000))
        >>> seen.watts is None or seen.watts > 0
        True
    """

    def __init__(
        self, device: torch.device | int | None = None, *, interval_s: float = 0.05
    ) -> None:
        self._device = _index(device)
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.states: list[State] = []
        self.seconds = 0.0
        self.joules: float | None = None

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        self._before = energy_joules(self._device)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.seconds = time.perf_counter() - self._started
        after = energy_joules(self._device)
        if after is not None and self._before is not None:
            self.joules = after - self._before

    @property
    def watts(self) -> float | None:
        """Mean power: by the energy counter over blocks of a second, else by the readings."""
        if self.joules is not None and self.seconds >= 1:
            return self.joules / self.seconds
        return _over(statistics.fmean, [state.watts for state in self.states])

    @property
    def sm_mhz(self) -> float | None:
        """Median clock of the SMs."""
        return _over(statistics.median, [state.sm_mhz for state in self.states])

    @property
    def celsius(self) -> float | None:
        """Highest temperature."""
        return _over(max, [state.celsius for state in self.states])

    @property
    def limits(self) -> tuple[str, ...] | None:
        """Everything that held the clocks down at some moment."""
        known = [state.limits for state in self.states if state.limits is not None]
        return tuple(sorted(set().union(*known))) if known else None

    @property
    def why(self) -> str:
        """Why a number is None, or ""."""
        return self.states[0].why if self.states else ""

    def _watch(self) -> None:
        while True:
            self.states.append(sample(self._device))
            if self._stop.wait(self._interval_s):
                return


def driver_version() -> str | None:
    """Version of the NVIDIA driver, or None."""
    nvml, _ = _nvml()
    if nvml is None:
        return None
    version = nvml.nvmlSystemGetDriverVersion()
    return version.decode() if isinstance(version, bytes) else str(version)


def _over(fold: Any, values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(fold(known)) if known else None


def _index(device: torch.device | int | None) -> int | None:
    if isinstance(device, int):
        return device
    if device is not None and device.index is not None:
        return device.index
    return torch.cuda.current_device() if torch.cuda.is_available() else None


@cache
def _nvml() -> tuple[Any, str]:
    """The library, initialised; or None, and why."""
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed: pip install 'hopsparse[bench]'"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    return pynvml, ""


@cache
def _opened(index: int | None) -> tuple[Any, Any, str]:
    """The library and the handle of a GPU; or None twice, and why."""
    nvml, why = _nvml()
    if nvml is None:
        return None, None, why
    if index is None:
        return None, None, "torch sees no GPU"
    # torch numbers what CUDA_VISIBLE_DEVICES leaves; NVML numbers all. A UUID names one to both.
    uuid = torch.cuda.get_device_properties(index).uuid
    for prefix in ("GPU-", "MIG-"):
        try:
            return nvml, nvml.nvmlDeviceGetHandleByUUID(f"{prefix}{uuid}"), ""
        except nvml.NVMLError:
            continue
    return None, None, f"NVML does not know the GPU {uuid}"


def _read(nvml: Any, name: str, *arguments: Any) -> float | None:
    """One number, or None where this GPU (a MIG slice, say) does not tell it."""
    try:
        return float(getattr(nvml, name)(*arguments))
    except nvml.NVMLError:
        return None
