"""What docs/ops/spmm_bsr.md says without a GPU is computed here, and so is `explain`."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import BSR
from hopsparse.ops.spmm_bsr.explain import explain
from hopsparse.ops.spmm_bsr.fragments import fragments_of
from hopsparse.ops.spmm_bsr.fragments_cost import predicted_us
from hopsparse.plan import TARGETS
from tests.helpers.blocks import pattern

PAGE = Path(__file__).parents[2] / "docs" / "ops" / "spmm_bsr.md"
ROWS = PAGE.parents[2] / "benchmarks/results/h200/spmm_bsr.jsonl"
H200 = TARGETS["h200"]
plan = import_module("hopsparse.ops.spmm_bsr.plan")
WGMMA = {config.name for config in plan.CANDIDATES}
MMA = {config.name for config in plan.FRAGMENT_CANDIDATES}


def predicted_table() -> list[str]:
    """By block and sparsity: what is multiplied, and what everything is predicted to take."""
    lines = []
    for block in (128, 64, 32, 16):
        for sparsity in (0.5, 0.8, 0.9):
            found = explain(pattern(16384, 4096, block, sparsity), 2048, H200)
            decision = found.decision
            runs = decision.config.name if decision.uses_kernel(kept=True) else "dense"
            times = (found.floor_us, decision.kernel_us, decision.dense_us)
            facts = [f"{block}", f"{sparsity:.0%}", f"{found.multiplied:.0%}"]
            facts += [f"{time:.0f}" for time in times]
            lines.append(f"| {' | '.join([*facts, runs])} |")
    return lines


def measured_table() -> list[str]:
    """The committed rows: the floor of what is stored, our fastest tile, and the others."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    peak = H200.dense_peak["bfloat16"].sustained
    lines = []
    weights = {(row["block"], row["sparsity"]) for row in rows}
    for block, sparsity in sorted(weights, key=lambda each: (-each[0], each[1])):
        here = [row for row in rows if (row["block"], row["sparsity"]) == (block, sparsity)]
        us = {row["contender"]: row["us"] for row in here}
        entries = here[0]["multiplied"] * here[0]["filled"] * 16384 * 4096
        moved = 2 * (entries + 2048 * (16384 + 4096))
        floor = 1e6 * max(moved / H200.read_bandwidth, 2 * entries * 2048 / peak)
        wgmma, mma = (
            min((time for name, time in us.items() if name in tiles), default=None)
            for tiles in (WGMMA, MMA)
        )
        ours = min(time for time in (wgmma, mma) if time is not None)
        dense, torch_us = us["cublas"], us["torch_bsr"]
        cells = [f"{block}", f"{sparsity:.0%}", f"{floor:.0f}"]
        cells += ["" if time is None else f"{time:.1f}" for time in (wgmma, mma)]
        cells += [f"{dense:.1f}", f"{dense / ours:.2f}"]
        cells += [f"{torch_us:.1f}", f"{torch_us / ours:.2f}", f"{us['triton']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def first_run_table() -> list[str]:
    """The kernel of small blocks: predicted before it ran, measured, predicted since."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    us = {(row["block"], row["sparsity"], row["contender"]): row for row in rows}
    problem = plan.Problem(2048, 16384, 4096)
    lines = []
    for block, height in ((32, 2), (16, 1)):
        for sparsity in (0.5, 0.8, 0.9):
            w = fragments_of(pattern(16384, 4096, block, sparsity))
            for config in plan.fragment_candidates(height):
                row = us[block, sparsity, config.name]
                first, measured = row["predicted_us"], row["us"]
                now = predicted_us(config, w, problem, H200.sm_count)
                cells = [f"{block}", f"{sparsity:.0%}", config.name, f"{first:.0f}"]
                cells += [f"{measured:.1f}", f"{measured / first:.2f}", f"{now:.0f}"]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_the_first_run_of_small_blocks_in_the_docs_is_the_rows() -> None:
    expected = "\n".join(first_run_table())
    print(expected)
    assert expected in PAGE.read_text(encoding="utf-8")


def test_the_measurements_in_the_docs_are_the_rows() -> None:
    expected = "\n".join(measured_table())
    print(expected)
    assert expected in PAGE.read_text(encoding="utf-8")


def test_the_predictions_in_the_docs_are_computed() -> None:
    expected = "\n".join(predicted_table())
    print(expected)
    assert expected in PAGE.read_text(encoding="utf-8")


def test_an_explanation_names_what_runs_and_what_else_could() -> None:
    found = explain(pattern(4096, 4096, 64, 0.9), 4096, H200)
    lines = found.lines()
    assert found.decision.config.name in lines[0]
    assert [config for config, _ in found.others] != []
    assert found.floor_us < found.decision.kernel_us <= min(us for _, us in found.others)
    assert 1 <= found.unevenness < 1.5
    assert found.filled == 1
    assert "dense" in explain(pattern(4096, 4096, 16, 0.0), 4096, H200).lines()[0]


def test_one_full_strip_is_uneven() -> None:
    dense = torch.zeros(8448, 1024, dtype=torch.bfloat16)
    dense[64:128] = 1
    found = explain(BSR.from_dense(dense, (64, 64)), 16, H200)
    assert found.unevenness == pytest.approx(16 / (147 / 132))


def test_what_cannot_run_is_not_explained() -> None:
    with pytest.raises(UnsupportedError, match="blocks of 8 x 8"):
        explain(BSR.from_dense(torch.ones(16, 16).half(), (8, 8)), 1, H200)
    with pytest.raises(ArgumentError, match="whole numbers above 0"):
        explain(BSR.from_dense(torch.ones(16, 16).half(), (16, 16)), 0, H200)
