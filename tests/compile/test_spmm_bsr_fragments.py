"""What the compiler makes of the kernel of small blocks, beside what all have to show."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from hopsparse.compiler import KernelCache
from hopsparse.ops.spmm_bsr.fragments_kernel import HELD, FragmentConfig
from tests.helpers.kernels import disassemble

plan = import_module("hopsparse.ops.spmm_bsr.plan")
TILES = [pytest.param(config, id=config.name) for config in plan.FRAGMENT_CANDIDATES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all: each kernel is compiled once."""
    return tmp_path_factory.mktemp("kernels")


def lines_of(config: FragmentConfig, folder: Path) -> list[str]:
    spec = plan.spec_of(config, 64, "bfloat16")
    (sass,) = disassemble([KernelCache(folder).get(spec).image])
    return sass.splitlines()


def places(lines: list[str], instruction: str) -> list[int]:
    return [number for number, line in enumerate(lines) if re.search(instruction, line)]


@pytest.mark.parametrize("config", TILES)
def test_a_piece_is_what_was_budgeted(config: FragmentConfig, folder: Path) -> None:
    lines, held = lines_of(config, folder), HELD[config.height]
    fragments = held * config.tokens // 8 * config.height
    assert len(places(lines, r"\bHMMA\.16816\.F32\.BF16")) == fragments
    assert len(places(lines, r"\bLDSM\.16\.M88\.4\b")) == held * config.tokens // 16
    assert not places(lines, r"\b(LDL|STL)\b")


@pytest.mark.parametrize("config", TILES)
def test_no_piece_waits_for_what_it_asks_for(config: FragmentConfig, folder: Path) -> None:
    """No word goes to a uniform register, which its load would be waited for, and none of the
    fragments of the pieces ahead is moved."""
    lines = lines_of(config, folder)
    products = places(lines, r"\bHMMA\b")
    loop = lines[products[0] : products[-1]]
    assert not places(loop, r"\bR2UR\b")
    asked = {
        int(match[1])
        for line in loop
        if (match := re.search(r"LDG\.E\.LTC128B\.128\.CONSTANT R(\d+),", line))
    }
    fragments = {first + i for first in asked for i in range(4)}
    # All but those of the last piece, whose load may stand behind the last product.
    assert len(fragments) >= 4 * config.height * (HELD[config.height] - 1)
    moved = [re.search(r"\b(?:MOV|MOV\.U32) R\d+, (?:RZ, RZ, )?R(\d+)\b", line) for line in loop]
    assert not fragments & {int(match[1]) for match in moved if match}


def test_a_cluster_loads_by_multicast(folder: Path) -> None:
    for config in plan.FRAGMENT_CANDIDATES:
        copies = places(lines_of(config, folder), r"UTMALDG\.2D\.MULTICAST")
        assert len(copies) == (2 if config.cluster == 2 else 0)
