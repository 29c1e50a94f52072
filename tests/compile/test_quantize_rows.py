"""What the compiler makes of the row quantiser, beside what every kernel has to show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hopsparse.compiler import KernelCache
from hopsparse.ops.quantize_rows import plan
from tests.helpers.kernels import disassemble

REGISTERS_OF_AN_SM = 65_536
LOAD = r"LDG\.E\S*\.128"


def sass_of(spec: plan.KernelSpec, folder: Path) -> str:
    (sass,) = disassemble([KernelCache(folder).get(spec).image])
    return sass


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", plan.KEEPING, ids=str)
def test_a_row_is_asked_for_at_once_and_in_16_bytes(
    dtype: str, shape: plan.Shape, tmp_path: Path
) -> None:
    sass = sass_of(plan.spec_for(dtype, "int8", "plain", shape), tmp_path)
    before_the_largest = sass[: sass.index("REDUX.MAX")]
    pieces = shape.chunks * (2 if dtype == "float32" else 1)
    assert len(re.findall(LOAD, before_the_largest)) == pieces
    # The last load comes before the first magnitude that is compared.
    compared = re.search(r"VIMNMX|FMNMX", before_the_largest)
    assert compared is not None
    assert max(found.start() for found in re.finditer(LOAD, before_the_largest)) < compared.start()


def test_codes_are_stored_8_bytes_at_a_time(tmp_path: Path) -> None:
    shape = plan.KEEPING[1]
    sass = sass_of(plan.spec_for("bfloat16", "fp8", "plain", shape), tmp_path)
    assert sass.count("STG.E.64") == shape.chunks + 1  # and one for careful rows


@pytest.mark.parametrize("source", plan.SOURCES)
@pytest.mark.parametrize("shape", plan.KEEPING, ids=str)
def test_an_sm_has_room_for_what_hides_the_memory(
    shape: plan.Shape, source: plan.Source, tmp_path: Path
) -> None:
    """By Little's law: 4.8 TB/s over 132 SMs, for the microsecond that a read takes."""
    cubin = KernelCache(tmp_path).get(plan.spec_for("bfloat16", "int8", source, shape))
    registers = -(-cubin.registers // 8) * 8
    threads = REGISTERS_OF_AN_SM // (registers * shape.threads) * shape.threads
    assert threads * shape.chunks * 16 >= 4.8e12 / 132 * 1e-6
