"""The gate on kernels: 5 % is seen, nothing is not, and every case runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import hopsparse
from benchmarks.gate import changed
from hopsparse.cli.gate import Sampler
from hopsparse.cli.gate_cases import SUITES, Case, cases_of
from hopsparse.measure.gate import Limits, decide
from hopsparse.measure.other_build import load_build

CASES = [case for suite in SUITES for case in cases_of(suite, torch.device("cuda"))]


@pytest.mark.parametrize(("part", "alarms"), [(0.0, 0), (0.05, 5)])
def test_the_gate(part: float, alarms: int, device: torch.device) -> None:
    other = load_build(Path(hopsparse.__file__).parents[1], "hopsparse_tested")
    case = Case("nm", 4096, 4096, 256)
    sample = Sampler(case, (other, hopsparse), device, partial(changed, part))
    found = [decide(sample, Limits())[0] for _ in range(5)]
    print([(round(each.ratio, 4), round(each.base_us, 2), each.rounds) for each in found])
    assert sum(each.slower for each in found) == alarms


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_runs(case: Case, device: torch.device) -> None:
    first = case.calls(hopsparse, device, 0)[0]
    result = first()
    torch.cuda.synchronize()
    if isinstance(result, torch.Tensor):
        assert torch.isfinite(result.float()).all()
