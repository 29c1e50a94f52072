"""What the compiler makes of attend_decode, beside what all kernels have to show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hopsparse.compiler import Cubin, KernelCache
from hopsparse.ops.attend_decode import plan
from hopsparse.plan import TARGETS
from tests.helpers.kernels import disassemble

TARGET = TARGETS["h200"]
CLOCK_HZ, SCHEDULERS = 1.755e9, 4
KERNELS = [
    (dtype, dim, group) for dtype in plan.DTYPES for dim in plan.DIMS for group in plan.GROUPS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all: each kernel is compiled once."""
    return tmp_path_factory.mktemp("kernels")


def made(dtype: str, dim: int, group: int, folder: Path) -> tuple[Cubin, list[str]]:
    cubin = KernelCache(folder).get(plan.spec_for(dtype, dim, group))
    (sass,) = disassemble([cubin.image])
    return cubin, sass.splitlines()


def places(lines: list[str], instruction: str) -> list[int]:
    return [number for number, line in enumerate(lines) if re.search(instruction, line)]


def loop_of(lines: list[str], place: int) -> int:
    """Instructions of the innermost loop around one."""
    start = int(lines[0].split("*")[1], 16)
    found = []
    for number, line in enumerate(lines[place:], place):
        if branch := re.search(r"\bBRA 0x([0-9a-f]+)", line):
            to = int(branch[1], 16) // 16
            found += [number - to + 1] if to <= place else []
    assert start % 16 == 0
    return min(found)


@pytest.mark.parametrize(("dtype", "dim", "group"), KERNELS)
def test_a_tile_takes_half_of_what_is_issued_while_memory_delivers_it(
    dtype: str, dim: int, group: int, folder: Path
) -> None:
    """With what a tile takes seldom: the next look-up, and outputs whose maximum has moved."""
    _, lines = made(dtype, dim, group, folder)
    copies = places(lines, r"\bLDGSTS")
    tile_bytes = 2 * plan.TILE * 2 * dim
    assert len(copies) * 32 * 16 == tile_bytes
    seconds = tile_bytes / (TARGET.read_bandwidth / TARGET.sm_count)
    assert loop_of(lines, copies[-1]) <= 0.5 * seconds * CLOCK_HZ * SCHEDULERS


@pytest.mark.parametrize(("dtype", "dim", "group"), KERNELS)
def test_nothing_waits_for_all_memory_and_two_blocks_fit(
    dtype: str, dim: int, group: int, folder: Path
) -> None:
    cubin, lines = made(dtype, dim, group, folder)
    assert not places(lines, r"\bMEMBAR")
    threads = plan.spec_for(dtype, dim, group).threads
    assert 2 * threads * -(-cubin.registers // 8) * 8 <= TARGET.registers_per_sm


@pytest.mark.parametrize(("dtype", "dim", "group"), KERNELS)
def test_length_count_and_list_are_asked_for_before_one_is_used(
    dtype: str, dim: int, group: int, folder: Path
) -> None:
    _, lines = made(dtype, dim, group, folder)
    loads = places(lines, r"\bLDG\.E R")[:3]
    for load in loads:
        (register,) = re.findall(r"LDG\.E (R\d+)", lines[load])
        used = rf"[,\[] ?[-|~]*{register}\b(?!\.64)"
        assert not [line for line in lines[load + 1 : loads[-1] + 1] if re.search(used, line)]
