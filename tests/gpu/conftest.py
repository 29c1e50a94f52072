"""The gpu tier runs on one H100 or H200, and is skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hopsparse.launch import kernel as launch_kernel
from hopsparse.ops.quantize_rows import device as quantize_launches
from hopsparse.ops.spmm_bsr.device import forget_launches as forget_bsr_launches
from hopsparse.ops.spmm_nm.device import forget_launches
from hopsparse.ops.spmm_nm.int4.device import forget_int4_launches
from hopsparse.ops.spmm_nm.scaled.device import forget_scaled_launches
from hopsparse.ops.spmm_nm.windows.device import forget_window_launches
from hopsparse.tune import Machine, machine_of


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU; asked for when a test runs, so that collecting needs none."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs one H100 or H200")
    return torch.device("cuda:0")


@pytest.fixture
def here(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    """The machine, with nothing tuned, compiled or loaded, in memory or on disk."""
    monkeypatch.setenv("HOPSPARSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch_kernel, "_LOADED", {})
    monkeypatch.setattr(quantize_launches, "_BOUND", launch_kernel.KnownLaunches())
    _forget()
    yield machine_of(device.index)
    _forget()


def _forget() -> None:
    forget_bsr_launches()
    forget_window_launches()
    for forget in (forget_launches, forget_scaled_launches, forget_int4_launches):
        forget()
