"""What was measured on an H200 is what spmm_bsr predicts, and chooses: the committed rows."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hopsparse.ops.spmm_bsr import fragments_cost
from hopsparse.ops.spmm_bsr.fragments import TILE, Fragments, fragments_of
from hopsparse.ops.spmm_bsr.schedule import Problem, predicted_us
from hopsparse.ops.spmm_bsr.strips import Strips, strips_of
from hopsparse.plan import TARGETS
from tests.helpers.blocks import pattern

plan = import_module("hopsparse.ops.spmm_bsr.plan")
ROWS = Path(__file__).parents[2] / "benchmarks/results/h200/spmm_bsr.jsonl"
H200 = TARGETS["h200"]
SIZES = Problem(2048, 16384, 4096)
SMALL = [(block, sparsity) for block in (32, 16) for sparsity in (0.5, 0.8, 0.9)]
WEIGHTS = [(block, sparsity) for block in (128, 64, 32, 16) for sparsity in (0.5, 0.8, 0.9)]


@cache
def rows(block: int, sparsity: float) -> list[dict[str, Any]]:
    """Those of one weight."""
    key = vars(SIZES) | {"block": block, "sparsity": sparsity}
    found = [json.loads(line) for line in ROWS.read_text().splitlines()]
    return [row for row in found if key.items() <= row.items()]


def times(block: int, sparsity: float) -> dict[str, float]:
    """Measured device time by contender."""
    return {row["contender"]: row["us"] for row in rows(block, sparsity)}


@cache
def strips(block: int, sparsity: float) -> Strips:
    """Of a weight that multiplies as much as the measured one, which was drawn on a GPU."""
    measured = rows(block, sparsity)[0]["multiplied"]
    # Of few blocks the kept part is far from that which was asked for.
    zeros = 1 - measured if block >= 64 else sparsity
    for seed in range(50):
        made = strips_of(pattern(SIZES.out, SIZES.k, block, zeros, seed))
        multiplied = made.steps * made.rows * 64 / (SIZES.out * SIZES.k)
        if multiplied == pytest.approx(measured, rel=0.005):
            return made
    raise AssertionError(f"no weight like the measured one, which multiplies {measured}")


@cache
def fragments(block: int, sparsity: float) -> Fragments:
    """Of a weight that stores as much as the measured one."""
    row = rows(block, sparsity)[0]
    measured = row["multiplied"] * row["filled"]
    for seed in range(20):
        made = fragments_of(pattern(SIZES.out, SIZES.k, block, sparsity, seed))
        stored = made.pieces * TILE * TILE * made.height / (SIZES.out * SIZES.k)
        if stored == pytest.approx(measured, rel=0.005):
            return made
    raise AssertionError(f"no weight like the measured one, which stores {measured}")


@pytest.mark.parametrize(("block", "sparsity"), WEIGHTS)
def test_every_tile_takes_what_is_predicted(block: int, sparsity: float) -> None:
    made, measured = strips(block, sparsity), times(block, sparsity)
    known = plan.candidates(made.panels, made.width)
    assert {config.name for config in known} <= measured.keys()
    for config in known:
        predicted = predicted_us(config, made.lengths, SIZES, H200.sm_count)
        assert predicted == pytest.approx(measured[config.name], rel=0.07), config


@pytest.mark.parametrize(("block", "sparsity"), WEIGHTS)
def test_what_runs_is_what_was_fastest(block: int, sparsity: float) -> None:
    """The kernel exactly where its fastest tile beat dense; and that tile, or one of its time."""
    made, measured = strips(block, sparsity), times(block, sparsity)
    known = plan.candidates(made.panels, made.width)
    decision = plan.decide(made.lengths, known, SIZES, "bfloat16", H200)
    fastest = min(measured[config.name] for config in known)
    assert decision.uses_kernel(kept=True) is (fastest < measured["cublas"])
    assert measured[decision.config.name] <= 1.01 * fastest
    # Dense is predicted to be as fast as it ever was, so that a doubt is decided for it.
    assert 0.89 * measured["cublas"] < decision.dense_us < 1.03 * measured["cublas"]


@pytest.mark.parametrize(("block", "sparsity"), SMALL)
def test_every_tile_of_small_blocks_takes_what_is_predicted(block: int, sparsity: float) -> None:
    made, measured = fragments(block, sparsity), times(block, sparsity)
    known = plan.fragment_candidates(made.height)
    assert {config.name for config in known} <= measured.keys()
    for config in known:
        predicted = fragments_cost.predicted_us(config, made, SIZES, H200.sm_count)
        assert predicted == pytest.approx(measured[config.name], rel=0.06), config


@pytest.mark.parametrize(("block", "sparsity"), SMALL)
def test_of_both_kernels_the_faster_runs(block: int, sparsity: float) -> None:
    """Exactly where one beat dense."""
    made, measured = strips(block, sparsity), times(block, sparsity)
    small, known = fragments(block, sparsity), plan.candidates(made.panels, made.width)
    decision = plan.decide(made.lengths, known, SIZES, "bfloat16", H200, fragments=small)
    tiles = [*known, *plan.fragment_candidates(small.height)]
    fastest = min(measured[config.name] for config in tiles)
    assert decision.uses_kernel(kept=True) is (fastest < measured["cublas"])
    if decision.uses_kernel(kept=True):
        assert measured[decision.config.name] <= 1.01 * fastest
        assert decision.instruction == ("wgmma" if (block, sparsity) == (32, 0.9) else "mma.sync")
