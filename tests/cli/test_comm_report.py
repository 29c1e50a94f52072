"""What `comm-report` shows of rows that counters wrote, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsparse.comm import Counters
from hopsparse.measure.record import append
from tests.cli.conftest import Run


def written(path: Path) -> Counters:
    counters = Counters()
    counters.count(1_000_000, ranks=2)
    counters.count(1_000_000, ranks=2)
    counters.sent_bytes, counters.select_ms, counters.communicate_ms = 500_000, 5.0, 61.0
    counters.write(path, rank=0, step=100)
    return counters


def test_rows_are_shown_as_they_were_written(
    tmp_path: Path, run: Run, run_json: Callable[..., Any]
) -> None:
    path = tmp_path / "rows.jsonl"
    counters = written(path)
    append(path, {"kind": "another"})
    (row,) = run_json("comm-report", path)["rows"]
    assert row == {"kind": "comm", "rank": 0, "step": 100, **counters.facts()}
    assert row["ratio"] == 16.0  # 4 bytes a value, twice a million, against half a megabyte
    text = run("comm-report", path).stdout
    words = text.splitlines()[1].split()
    assert words == [
        "0",
        "100",
        "2",
        "2000000",
        "8.0",
        "MB",
        "500.0",
        "kB",
        "16.0",
        "2.50",
        "0.00",
        "30.50",
        "0",
    ]


def test_several_files_are_one_table(tmp_path: Path, run_json: Callable[..., Any]) -> None:
    for name in ("0.jsonl", "1.jsonl"):
        written(tmp_path / name)
    rows = run_json("comm-report", tmp_path / "0.jsonl", tmp_path / "1.jsonl")["rows"]
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "is no file"),
        ("", "no row of kind comm"),
        ('{"kind": "comm", "calls": 1}\n', "row 1 of kind comm: no number for communicate_ms"),
        ("no JSON\n", "line 1: no JSON object"),
    ],
)
def test_other_files_are_refused(
    text: str | None, told: str, tmp_path: Path, run_json: Callable[..., Any]
) -> None:
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    error = run_json("comm-report", path, exit_code=2)["error"]
    assert error["kind"] == "CheckpointError"
    assert told in error["got"]
