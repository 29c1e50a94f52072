"""What the compiler makes of the kernels over a CSR matrix, beside what all have to show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hopsparse.compiler import KernelCache
from hopsparse.ops.spmm_csr.plan import INDEX_BYTES, TEAMS, THREADS, Team, spec_for
from hopsparse.ops.spmm_csr.wide import CANDIDATES, Config, wide_spec
from hopsparse.ops.spmm_csr.wide_cost import UNIT_SLOTS
from tests.helpers.kernels import disassemble

REGISTERS_OF_AN_SM = 65_536
VECTOR = [team for team in TEAMS if team.vector]
GATHER = r"LDG\.E\.128\.CONSTANT"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all: each kernel is compiled once."""
    return tmp_path_factory.mktemp("kernels")


def lines_of(job: str, dtype: str, team: Team, folder: Path) -> list[str]:
    spec = spec_for(job, dtype, team, INDEX_BYTES[0])  # type: ignore[arg-type]
    (sass,) = disassemble([KernelCache(folder).get(spec).image])
    return sass.splitlines()


def places(lines: list[str], instruction: str) -> list[int]:
    return [number for number, line in enumerate(lines) if re.search(instruction, line)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("team", VECTOR, ids=lambda team: team.name)
def test_eight_gathers_are_asked_for_before_one_is_used(
    dtype: str, team: Team, folder: Path
) -> None:
    lines = lines_of("multiply", dtype, team, folder)
    gathers = places(lines, GATHER)
    assert len(gathers) == 8
    assert max(gathers) < min(places(lines, r"\bFFMA"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("team", VECTOR, ids=lambda team: team.name)
def test_both_sides_of_four_dots_are_asked_for_before_one_is_used(
    dtype: str, team: Team, folder: Path
) -> None:
    lines = lines_of("sample", dtype, team, folder)
    gathers = places(lines, GATHER)
    assert len(gathers) == 8
    assert max(gathers) < min(places(lines, r"\bFFMA"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("team", VECTOR, ids=lambda team: team.name)
def test_an_sm_has_room_for_what_hides_the_memory(dtype: str, team: Team, folder: Path) -> None:
    """By Little's law: 4.8 TB/s over 132 SMs, for the microsecond that a read takes."""
    for job in ("multiply", "sample"):
        spec = spec_for(job, dtype, team, INDEX_BYTES[0])  # type: ignore[arg-type]
        registers = -(-KernelCache(folder).get(spec).registers // 8) * 8
        threads = REGISTERS_OF_AN_SM // (registers * THREADS) * THREADS
        assert threads * 8 * 16 >= 4.8e12 / 132 * 1e-6


def test_nothing_is_added_by_atomics(folder: Path) -> None:
    for dtype in ("bfloat16", "float32"):
        for job in ("multiply", "sample"):
            assert not places(lines_of(job, dtype, VECTOR[2], folder), r"\b(REDG?|ATOMG?)\b")


@pytest.mark.parametrize("config", CANDIDATES, ids=lambda config: config.name)
def test_wgmma_takes_units_from_two_sets_of_registers(config: Config, folder: Path) -> None:
    """One set is unpacked while the other is read, and nothing between them is moved."""
    (sass,) = disassemble([KernelCache(folder).get(wide_spec(config, "bfloat16", 1024)).image])
    lines = sass.splitlines()
    products = places(lines, rf"HGMMA\.64x{config.tokens}x16\.F32\.BF16 R\d+, R\d+, gdesc")
    assert len(products) == 8
    operands = [re.search(r"HGMMA\S+ R\d+, R(\d+),", lines[at])[1] for at in products]  # type: ignore[index]
    assert len(set(operands)) == 8
    loop = lines[products[0] : products[-1]]
    assert not places(loop, r"\bMOV R\d+, R\d+")
    assert len(places(loop, r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1")) == 1
    # A set is unpacked between the last product of the other and the first of its own.
    between = lines[products[3] : products[4]]
    assert len(places(between, "POPC")) == 4
    assert len(places(between, r"LDS\.U16")) == 4 + 4 * 8
    # What `wide_cost.UNIT_SLOTS` counts.
    end = next(at for at in places(lines, r"BRA") if at > products[-1] and loops(lines, at))
    assert abs((end - products[0]) / 2 - UNIT_SLOTS) < 15


def loops(lines: list[str], at: int) -> bool:
    """Whether a branch goes back by more than the wait for a barrier."""
    found = re.search(r"/\*([0-9a-f]+)\*/.*BRA 0x([0-9a-f]+)", lines[at])
    return bool(found) and int(found[1], 16) - int(found[2], 16) > 0x400  # type: ignore[index]
