"""`hopsparse bench model` on a CPU: the whole way, in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

RunJson = Callable[..., Any]
SMALL = ("--device", "cpu", "--prefill", "2x8", "--decode", "1x4", "--rounds", 1)


def test_ways_of_a_real_folder_side_by_side(
    run: Run, run_json: RunJson, dense_model: Path, tmp_path: Path
) -> None:
    words = ("bench", "model", dense_model, "--ways", "dense, eager; 2:4", *SMALL)
    rows = tmp_path / "rows.jsonl"
    found = run_json(*words, "--out", rows)
    named = [(row["way"], row["phase"], row["error"]) for row in found["rows"]]
    assert named == [
        (way, phase, "")
        for way in ("dense, eager", "2:4")
        for phase in ("prefill 2 x 8", "decode 1 x 4")
    ]
    stored = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["ms"] for row in stored] == [row["ms"] for row in found["rows"]]
    result = run(*words)
    assert result.exit_code == 0
    assert "tokens/s" in result.stdout
    assert "4/4 2:4: decode 1 x 4, about 0 s left" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "neither MODEL nor --config"),
        (("somewhere", "--config", "llama-3-8b"), "both MODEL and --config"),
        (("--config", "llama-4", "--device", "cpu"), "--config llama-4"),
        (("--config", "llama-3-8b", "--ways", "2:5"), "the way '2:5'"),
        (("--config", "llama-3-8b", "--decode", "8"), "--decode '8'"),
        (("--config", "llama-3-8b", "--decode", "", "--prefill", ""), "nothing to time"),
        (("--config", "llama-3-8b", "--rounds", 0), "--rounds 0"),
        (("--config", "llama-3-8b", "--device", "nowhere"), "device 'nowhere'"),
    ],
)
def test_words_that_mean_nothing_are_named(run: Run, words: tuple[Any, ...], told: str) -> None:
    result = run("bench", "model", *words)
    assert result.exit_code == 2
    assert told in result.stderr
