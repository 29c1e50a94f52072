"""A kernel that fails costs the process its GPU: each of these breaks one in a child of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

# An assertion on the device stands for any kernel that fails.
_CHILD = """
import torch
from hopsparse.errors import GpuLostError
from hopsparse.measure.clock import Contender, time_side_by_side
from hopsparse.measure.contest import Layer, Way
from hopsparse.measure.peers import CuBLAS

wrong = torch.zeros((), dtype=torch.bool, device="cuda")

def fails(x=None):
    torch._assert_async(wrong)
    return x

def works(x=None):
    return torch.zeros(1, device="cuda")

try:
    {call}
except GpuLostError as error:
    print(error.got)
"""
_CALLS = {
    "contenders": 'time_side_by_side([Contender("good", [works]), Contender("bad", [fails]), '
    'Contender("after", [works])])',
    "ways": 'Layer.random((64, 64), torch.float16, [Way.of(CuBLAS), Way("bad", '
    'lambda weight, bias: fails, lambda product, x: "")]).contest(16)',
}


@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
def test_the_one_whose_kernel_failed_is_named(call: str, device: torch.device) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD.format(call=call)], capture_output=True, text=True
    )
    assert "bad ran a kernel that failed" in done.stdout, done.stderr
