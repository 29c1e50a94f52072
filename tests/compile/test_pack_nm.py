"""What the compiler makes of the packing kernels, beside what every kernel has to show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hopsparse.compiler import KernelCache
from hopsparse.ops.pack_nm import plan
from tests.helpers.kernels import disassemble

REGISTERS_OF_AN_SM, ENOUGH_THREADS = 65_536, 1024


@pytest.mark.parametrize("select", ["check", "magnitude"])
def test_a_thread_has_eight_loads_in_flight_and_an_sm_enough_threads(
    select: plan.Select, tmp_path: Path
) -> None:
    spec = plan.spec_for(plan.default_config(select, vector=True), "bfloat16")
    cubin = KernelCache(tmp_path).get(spec)
    assert cubin.registers * ENOUGH_THREADS <= REGISTERS_OF_AN_SM
    (sass,) = disassemble([cubin.image])
    before_the_first_store = sass[: sass.index("STG")]
    assert len(re.findall(r"LDG\.E\S*\.128", before_the_first_store)) == 8
