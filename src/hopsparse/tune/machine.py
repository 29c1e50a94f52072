"""Which GPUs share what was measured: one name, one number of SMs, one driver."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ..measure.power import driver_version

# The same version, where nvidia-ml-py is not installed: a server needs no `bench` extra to find
# what was tuned with it.
_MODULE_VERSION = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class Machine:
    """One class of GPUs.

    Attributes:
        gpu: Name, as the driver says it; that of a MIG slice names the slice.
        sm_count: Streaming multiprocessors.
        driver: Version of the driver.
    """

    gpu: str
    sm_count: int
    driver: str


@cache
def machine_of(device: int) -> Machine:
    """The class of a GPU, asked for once.

    Args:
        device: Ordinal, as torch counts.
    """
    facts = torch.cuda.get_device_properties(device)
    return Machine(facts.name, facts.multi_processor_count, _driver())


def _driver() -> str:
    if (version := driver_version()) is not None:
        return version
    try:
        return _MODULE_VERSION.read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"
