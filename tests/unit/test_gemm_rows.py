"""benchmarks/gemm.py: what names a problem in a file of rows, and which rows its table takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gemm
from hopsparse.measure import record
from hopsparse.measure.suite import CodedProblem, Problem

CODED = CodedProblem("o", 64, 32, 16, "int8", "rows")


def row(problem: Problem, contender: str, us: float) -> dict[str, Any]:
    return {**vars(problem), "contender": contender, "us": us}


def test_codes_are_named_by_their_scaling_too() -> None:
    assert gemm.key_of(Problem("o", 64, 32, 16)) == ("o", 64, 32, 16, "bfloat16")
    assert gemm.key_of(CODED) == ("o", 64, 32, 16, "int8", "rows")


def test_a_row_of_another_scaling_is_not_the_one_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    record.append(path, row(Problem("o", 64, 32, 16), "hopsparse", 1.0))
    record.append(path, row(CodedProblem("o", 64, 32, 16, "int8", "none"), "hopsparse", 1.0))
    known = record.done(path, (*gemm.fields(True), "contender"))
    assert (*gemm.key_of(CODED), "hopsparse") not in known
    record.append(path, row(CODED, "hopsparse", 1.0))
    known = record.done(path, (*gemm.fields(True), "contender"))
    assert (*gemm.key_of(CODED), "hopsparse") in known


def test_the_table_takes_the_rows_of_its_problems(capsys: pytest.CaptureFixture[str]) -> None:
    unscaled = CodedProblem("o", 64, 32, 16, "int8", "none")
    of_16_bits = Problem("o", 64, 32, 16)
    rows = [row(CODED, "hopsparse", 10.0), row(CODED, "cublas", 25.0)]
    for other in (unscaled, of_16_bits):
        rows += [row(other, "hopsparse", 1.0), row(other, "cublas", 9.0)]
    gemm.print_table(rows, [CODED], ["hopsparse", "cublas"])
    text = capsys.readouterr().out
    assert "int8 rows" in text
    assert "geometric mean of cublas / hopsparse: 2.500 (1 problems" in text


def test_rivals_of_codes_are_those_that_were_asked_for() -> None:
    options = argparse.Namespace(dtype="float8_e4m3fn", split_k=False, rivals="cublas,torch_class")
    ours = ["hopsparse_fast", "hopsparse_promoted"]
    assert [way.name for way in gemm.coded_ways(options)] == [*ours, "cublas"]
    options.rivals = ""
    assert [way.name for way in gemm.coded_ways(options)] == ours
