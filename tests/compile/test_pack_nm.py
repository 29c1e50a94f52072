"""What the compiler makes of the packing kernels."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from cuda.pathfinder import find_nvidia_binary_utility

from hopsparse.compiler import Cubin, KernelCache
from hopsparse.ops.pack_nm import plan
from hopsparse.plan.spec import KernelSpec

SPECS = plan.every_spec()
REGISTERS_OF_AN_SM, ENOUGH_THREADS = 65_536, 1024


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    return KernelCache(tmp_path_factory.mktemp("kernels"))


def disassembled(cubin: Cubin, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin.image)
    command = [find_nvidia_binary_utility("nvdisasm") or "nvdisasm", "-c", str(path)]
    return subprocess.check_output(command, text=True)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_compiles_without_spills_or_complaints(
    spec: KernelSpec, cache: KernelCache, tmp_path: Path
) -> None:
    cubin = cache.get(spec)
    assert (cubin.spill_bytes, cubin.stack_bytes, cubin.static_smem_bytes) == (0, 0, 0)
    assert (cubin.advice, cubin.warnings) == ((), ())
    sass = disassembled(cubin, tmp_path)
    assert [name for name in plan.SASS if name not in sass] == []


@pytest.mark.parametrize("select", ["check", "magnitude"])
def test_a_thread_has_eight_vectors_in_flight_and_an_sm_enough_threads(
    select: plan.Select, cache: KernelCache, tmp_path: Path
) -> None:
    cubin = cache.get(plan.spec_for(plan.default_config(select, vector=True), "bfloat16"))
    assert cubin.registers * ENOUGH_THREADS <= REGISTERS_OF_AN_SM
    sass = disassembled(cubin, tmp_path)
    before_first_store = sass[: sass.index("STG")]
    assert len(re.findall(r"LDG\.E\S*\.128", before_first_store)) == 8
