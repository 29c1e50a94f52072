"""`hopsparse bench --gate` and `--baseline` on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsparse.cli import gate_cases
from hopsparse.cli.gate_cases import Case

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]
FEW = ("--rounds", "10", "--limit", "1.5")


@pytest.fixture(autouse=True)
def two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small cases of a CPU, as a suite takes minutes on a machine that is shared."""
    cases = (Case("nm", 64, 128, 4), Case("decode", 64, 128))
    monkeypatch.setattr(gate_cases, "_ON_CPU", cases)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("hopsparse.measure.pairs._CHUNK_S", 5e-4)


def test_a_build_is_no_slower_than_itself(run_json: Run, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    found = run_json("bench", "--gate", ROOT, *FEW, "-o", out)
    assert [row["case"] for row in found["rows"]] == ["nm 64x128 4", "decode 64x128"]
    assert found["slower"] == []
    assert all(row["rounds"] >= 10 and row["error"] == "" for row in found["rows"])
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2


def test_a_baseline_is_written_once_and_compared_with(
    run: Run, run_json: Run, tmp_path: Path
) -> None:
    base = tmp_path / "base.jsonl"
    assert run("bench", "--baseline", base, "--rounds", "10").exit_code == 0
    assert "exists" in run_json("bench", "--baseline", base, exit_code=2)["error"]["got"]
    assert run_json("bench", "--gate", base, *FEW)["slower"] == []
    head, *rows = [json.loads(line) for line in base.read_text(encoding="utf-8").splitlines()]
    # As if everything had been twice as fast.
    fast = [{**row, "us": [us / 2 for us in row["us"]]} for row in rows]
    lines = [json.dumps(each) for each in (head, *fast)]
    base.write_text("\n".join(lines) + "\n", encoding="utf-8")
    slower = run_json("bench", "--gate", base, *FEW, exit_code=1)
    assert slower["slower"] == ["nm 64x128 4", "decode 64x128"]
    shown = run("bench", "--gate", base, *FEW)
    assert (shown.exit_code, shown.stdout.count("slower")) == (1, 2)
    other = [json.dumps({**head, "cpu": "another"}), *lines[1:]]
    base.write_text("\n".join(other) + "\n", encoding="utf-8")
    error = run_json("bench", "--gate", base, exit_code=2)["error"]
    assert "same cpu" in error["need"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gate", "no/such/folder"), "no hopsparse in it"),
        (("--gate", "x", "--shape", "64x64"), "--shape"),
        (("--gate", "x", "--baseline", "y"), "--baseline"),
        (("--gate", "x", "--suite", "anchors"), "--suite anchors"),
        (("--gate", "x", "--limit", "0.5"), "Limits"),
    ],
)
def test_bad_input_is_refused(words: tuple[str, ...], told: str, run_json: Run) -> None:
    assert told in run_json("bench", *words, exit_code=2)["error"]["got"]
