"""The smoke test of doctor on a real GPU."""

from __future__ import annotations

import json

import torch
from typer.testing import CliRunner

from hopsparse.cli import app
from hopsparse.launch.smoke import smoke_test


def test_clusters_and_tma_work(device: torch.device) -> None:
    for _ in range(3):
        smoke_test(device.index)


def test_doctor_runs_it(device: torch.device) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["smoke"]["failed"] == {}
    assert 0 in found["smoke"]["ran"]
    assert found["kernels"]["damaged"] == 0
