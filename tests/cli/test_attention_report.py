from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, start
from tests.helpers.tiny_llama import write_tiny_llama

SIZES = ("--context", 160, "--budget", 48, "--page", 16, "--windows", 2, "--samples", 5)
STEPS = 2 * 2 + 2 * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("dense") / "tiny", max_position_embeddings=256)


def arguments(model: Path, text: Path, out: Path, *more: object) -> tuple[object, ...]:
    return ("attention-report", model, "--text", text, "-o", out, *SIZES, *more)


def test_numbers_plots_and_the_table(
    run: Run, model: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    more = ("--context", 250, "--budget", 64, "--needles", 1)
    result = run(*arguments(model, text_file, out, *more))
    assert result.exit_code == 0, result.output
    assert "attention 1/" in result.stderr
    assert "left" in result.stderr
    report = json.loads((out / "report.json").read_text())
    rows = {(row["context"], row["budget"]): row for row in report["contexts"]}
    assert set(rows) == {(c, b) for c in (160, 250) for b in (None, 48, 64)}
    assert rows[160, None]["ratio"] == 1
    assert rows[160, 48]["ratio"] != 1
    assert all(row["needles"] == 1 for row in rows.values())
    layers = report["layers"]
    assert len(layers) == 2 * 2 * 2
    for row in layers:
        assert 0 < row["recall_p1"] <= row["recall"] <= 1
        assert row["error"] > 0
        assert row["attended"] <= row["budget"]
        assert row["bound_broken"] == 0
        assert row["recall"] >= 1 - row["bound"] - 1e-6
        assert row["queries"] == 2 * 5 * 2
    for name in ("recall", "error", "perplexity", "needles"):
        assert (out / f"{name}.svg").read_text().startswith("<svg")
    assert "0 of 160 queries" in result.stdout


def test_a_budget_of_the_whole_context_loses_nothing(
    run_json: Any, model: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    found = run_json(*arguments(model, text_file, out, "--budget", 160, "--needles", 0))
    assert [row["budget"] for row in found["contexts"]] == [None, 48]
    assert not (out / "needles.svg").exists()


def test_interrupted_and_resumed_it_is_the_same(
    run_json: Any, model: Path, text_file: Path, tmp_path: Path
) -> None:
    whole = run_json(*arguments(model, text_file, tmp_path / "whole", "--needles", 2))
    out, partial = tmp_path / "cut", tmp_path / "cut.partial"
    process = start(*arguments(model, text_file, out, "--needles", 2))
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("attention 3/"):
            process.send_signal(signal.SIGINT)
            break
    _, told = process.communicate()
    assert process.returncode == 130
    assert "--resume" in told
    state = json.loads((partial / "run-state.json").read_text())
    assert 3 <= len(state["done"]) < STEPS
    again = arguments(model, text_file, out, "--needles", 2)
    assert "holds an interrupted run" in run_json(*again, exit_code=2)["error"]["got"]
    other = run_json(*again, "--resume", "--samples", 6, exit_code=2)
    assert "another run" in other["error"]["got"]
    resumed = run_json(*again, "--resume")
    assert not partial.exists()
    for key in ("contexts", "layers"):
        assert resumed[key] == whole[key]
    assert "exists" in run_json(*again, exit_code=2)["error"]["got"]
    assert run_json(*again, "--overwrite")["layers"] == whole["layers"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--budget", 50), "budget=50"),
        (("--page", 8), "page=8"),
        (("--mode", "best"), "mode='best'"),
        (("--context", 300), "300 tokens"),
        (("--windows", 0), "windows = 0"),
        (("--context", 8), "contexts"),
        (("--resume", "--overwrite"), "together"),
        (("--needles", 1, "--context", 40), "needles"),
    ],
)
def test_what_means_nothing_is_refused(
    run_json: Any, model: Path, text_file: Path, tmp_path: Path, more: tuple[Any, ...], told: str
) -> None:
    out = tmp_path / "report"
    found = run_json(*arguments(model, text_file, out, *more), exit_code=2)
    assert told in found["error"]["got"]
    assert not out.exists()
