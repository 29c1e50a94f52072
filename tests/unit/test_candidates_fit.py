"""benchmarks/candidates.py --fit: rows of a known model lead back to it, each kind on its own."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hopsparse.ops.spmm_nm.cost import FITTED, Problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPES = ((4096, 4096), (4096, 14336))
TRUE = replace(FITTED[8], tensor_share=0.6, l2_bytes=55.0, promote_clocks=400.0, fixed_us=3.0)


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setitem(FITTED, 8, FITTED[8])
    return import_module("candidates")


def rows_of(candidates: Any, dtype: str, sums: str) -> list[dict[str, Any]]:
    """As if every tile took what the true model says, and cuBLAS twice as long as the fastest."""
    kind, rows = candidates.kind_of_words(dtype, sums), []
    for tokens in (16, 4096):
        for shape in SHAPES:
            problem = Problem(tokens, *shape)
            key = {"tokens": tokens, "out": shape[0], "k": shape[1], "dtype": dtype, "sums": sums}
            us = {c.name: kind.predicted_us(c, problem) for c in kind.near(problem, 6.0)}
            us[candidates.DENSE] = 2 * min(us.values())
            rows += [key | {"tile": tile, "us": each, "error": ""} for tile, each in us.items()]
    return rows


def test_constants_are_found_again(
    candidates: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = FITTED[8]
    FITTED[8] = TRUE
    kinds = [("float8_e4m3fn", "promoted"), ("int8", "exact")]
    rows = [row for kind in kinds for row in rows_of(candidates, *kind)]
    wrong = {"tile": "64x16x256_w1_s8_c1x1", "us": None, "error": "wrong"}
    rows.append(rows[0] | wrong)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    FITTED[8] = known
    candidates.fit(path, None)
    before = capsys.readouterr().out
    candidates.fit(path, [])
    after = capsys.readouterr().out
    for told in (before, after):
        assert [line for line in told.splitlines() if line in map(" ".join, kinds)] == list(
            map(" ".join, kinds)
        )
        assert told.count("4 problems: regret") == len(kinds)
    assert FITTED[8] != known
    ratios = [
        kind.predicted_us(config, problem) / row["us"]
        for row in rows
        if row["us"] and row["tile"] != candidates.DENSE
        for kind in [candidates.kind_of_words(row["dtype"], row["sums"])]
        for problem in [Problem(row["tokens"], row["out"], row["k"])]
        for config in [next(c for c in kind.configs if c.name == row["tile"])]
    ]
    assert 0.9 < min(ratios) <= max(ratios) < 1.1
    assert FITTED[8].promote_clocks > 2 * known.promote_clocks


def test_rows_of_16_bits_that_name_no_dtype_are_bfloat16(
    candidates: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = BENCHMARKS / "results/h200/spmm_nm_candidates.jsonl"
    few = tmp_path / "few.jsonl"
    few.write_text("".join(rows.read_text().splitlines(keepends=True)[:200]))
    candidates.fit(few, None)
    assert capsys.readouterr().out.startswith("bfloat16\n")
