"""`hopsparse bench model` on a CPU: the whole way, in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsparse.cli.bench_model import _print
from hopsparse.models.throughput import Found
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


def test_errors_in_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    error = "RuntimeError: [/usr/lib/x.so], shape [m, k]"
    _print([Found("way", "phase", error=error)], "model")
    assert error in " ".join(capsys.readouterr().out.split())


def test_options_before_the_word_are_not_lost(run: Run) -> None:
    result = run("bench", "--tokens", 7, "model", "--config", "llama-3-8b")
    assert result.exit_code == 2
    assert "--tokens belongs behind model" in " ".join(result.stderr.split())


def test_what_is_no_dense_model_is_refused(run: Run, sparse_model: Path) -> None:
    result = run("bench", "model", "/nowhere/at/all", *SMALL)
    assert result.exit_code == 2
    found = run("bench", "model", sparse_model, "--ways", "dense, eager", *SMALL)
    assert "a model whose blocks hold no dense layers" in " ".join(found.stdout.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "neither MODEL nor --config"),
        (("somewhere", "--config", "llama-3-8b"), "both MODEL and --config"),
        (("--config", "llama-4", "--device", "cpu"), "--config llama-4"),
        (("--config", "llama-3-8b", "--ways", "2:5"), "the way '2:5'"),
        (("--config", "llama-3-8b", "--decode", "8"), "--decode '8'"),
        (("--config", "llama-3-8b", "--prefill", "\u00b2x8"), "--prefill '\u00b2x8'"),
        (("--config", "llama-3-8b", "--prefill", "1x" + "9" * 5000), "--prefill '1x9"),
        (("--config", "llama-3-8b", "--decode", "", "--prefill", ""), "nothing to time"),
        (("--config", "llama-3-8b", "--rounds", 0), "--rounds 0"),
        (("--config", "llama-3-8b", "--device", "nowhere"), "device 'nowhere'"),
    ],
)
def test_words_that_mean_nothing_are_named(run: Run, words: tuple[Any, ...], told: str) -> None:
    result = run("bench", "model", *words)
    assert result.exit_code == 2
    assert told in result.stderr
