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
    sass = sass_of(plan.spec_for("bfloat16", "fp8", "plain", plan.KEEPING[1]), tmp_path)
    assert sass.count("STG.E.64") == plan.KEEPING[1].chunks + 1  # and one for careful rows


@pytest.mark.parametrize("source", plan.SOURCES)
def test_an_sm_has_room_for_enough_threads(source: plan.Source, tmp_path: Path) -> None:
    """What hides the time between the read of a row and its write is other blocks."""
    enough = {"plain": 1536, "norm": 1024, "halves": 1024, "interleaved": 1024}[source]
    cubin = KernelCache(tmp_path).get(plan.spec_for("bfloat16", "int8", source, plan.KEEPING[1]))
    assert cubin.registers * enough <= REGISTERS_OF_AN_SM
