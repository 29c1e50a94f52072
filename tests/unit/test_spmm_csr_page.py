"""The tables of docs/ops/spmm_csr.md against the rows that they are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hopsparse.ops.spmm_csr import layers
from hopsparse.ops.spmm_csr.cases import DECODE, GRAPHS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/ops/spmm_csr.md").read_text()
ROWS = {
    (row["case"], row["features"], row["dtype"], row["job"], row["contender"]): row["us"]
    for line in (ROOT / "benchmarks/results/h200/spmm_csr.jsonl").read_text().splitlines()
    for row in [json.loads(line)]
}


def told(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}"


def against(rival: float | None, ours: float) -> str:
    return "-" if rival is None else f"{told(rival)}, {rival / ours:.2f} x"


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs(graph, dtype):
    for features in graph.features:
        of = (graph.name, features, dtype)
        cells = [f"{graph.name.removeprefix('power-law-')}, {features}, {dtype}"]
        for job, rivals in (
            ("multiply", ("cusparse", "torch_geometric")),
            ("transposed", ("cusparse",)),
            ("sample", ("cusparse",)),
        ):
            ours = ROWS[*of, job, "hopsparse"]
            cells += [told(ours), *(against(ROWS[*of, job, rival], ours) for rival in rivals)]
        assert f"| {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.name)
def test_weights(case):
    of = (case.name, case.tokens, "bfloat16", "weight")
    ours, cusparse, dense = (ROWS[*of, name] for name in ("hopsparse", "cusparse", "dense"))
    zeros = float(case.pattern.partition(":")[2])
    cells = (
        *(f"{zeros * 100:g} %", str(case.tokens), f"{ours:.1f}"),
        *(f"{cusparse:,.1f}", f"{cusparse / ours:.1f} x", f"{dense:.1f}", f"{dense / ours:.2f} x"),
    )
    assert f"| {' | '.join(cells)} |" in PAGE


def test_what_layers_count_on_was_measured():
    of = (f"{layers.ROWS}x{layers.COLUMNS}-0.8-{layers.MOST_TOKENS}", 16, "bfloat16", "weight")
    assert round(ROWS[*of, "hopsparse"], 1) == layers.TILES_US
    assert round(ROWS[*of, "dense"], 1) == layers.DENSE_US
    for rows in (25344, 151936, 152064, 18432, 28672, 128256):
        assert layers.wins(rows, 4096) is (rows in (25344, 151936, 152064))
