"""The gpu tier runs on one H100 or H200, and is skipped where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU; asked for when a test runs, so that collecting needs none."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs one H100 or H200")
    return torch.device("cuda:0")
