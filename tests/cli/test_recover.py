from __future__ import annotations

import json
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hopsparse.models.checkpoint import CheckpointReader
from tests.cli.conftest import Run, start

SMALL = ("--window-tokens", "32", "--windows", "6", "--held-out", "2", "--batch-windows", "2")
JUDGED = ("--eval-windows", "2", "--eval-tokens", "32")


@pytest.fixture
def command(
    sparse_model: Path, dense_model: Path, text_file: Path, tmp_path: Path
) -> tuple[object, ...]:
    judged = tmp_path / "eval.txt"
    judged.write_text("Another text, that nobody has trained on. " * 20)
    texts = ("--calibration", text_file, "--eval", judged)
    models = ("recover", sparse_model, "-o", tmp_path / "out", "--teacher", dense_model)
    return (*models, *texts, *SMALL, *JUDGED)


def test_recover_shows_what_it_won(run: Run, command: tuple[object, ...], tmp_path: Path) -> None:
    result = run(*command, "--steps", "8", "--evaluate-every", "4", "--lr", "1e-3")
    assert result.exit_code == 0, result.output
    assert "eval.txt" in result.stdout
    looks = [line for line in result.stdout.splitlines() if "held-out loss" in line]
    assert [line.split()[1] for line in looks] == ["0", "4", "8"]
    assert f"written   {tmp_path / 'out'}" in result.stdout
    assert "recover 8/8 loss" in result.stderr
    assert run("verify", tmp_path / "out").exit_code == 0


def test_recover_json_is_the_report(
    run_json: Callable[..., Any], command: tuple[object, ...], tmp_path: Path
) -> None:
    found = run_json(*command, "--steps", "2", "--lora-rank", "2", "--hidden", "0.5")
    assert found["out"] == str(tmp_path / "out")
    assert found["steps"] == 2
    assert found["options"]["hidden"] == 0.5
    assert found["low_rank"]["bytes"] > 0
    assert {row["text"] for row in found["evaluation"]} == {"eval.txt"}


def test_the_page_is_about_the_recovered_model(
    run: Run, run_json: Callable[..., Any], command: tuple[object, ...], tmp_path: Path
) -> None:
    out, page = tmp_path / "out", tmp_path / "out" / "report.html"
    options = ("--steps", "4", "--evaluate-every", "2", "--lr", "1e-3", "--cache-teacher")
    found = run_json(*command, *options)
    assert found["report"] == str(page)
    assert "<h2>Recovery</h2>" in page.read_text()
    report = json.loads((out / "report.json").read_text())
    assert report["evaluation"][0]["sparse"] == found["evaluation"][0]["after"]
    # The second command repeats the recovery; --report is all that it does not say.
    pruning, again = report["command"].splitlines()
    assert pruning.startswith("hopsparse sparsify ")
    shards = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    repeated = run(*shlex.split(again)[1:], "--overwrite", "--no-report")
    assert repeated.exit_code == 0, repeated.output
    assert not page.exists()
    assert shards == {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    assert json.loads((out / "report.json").read_text())["command"] == report["command"]


def test_a_checkpoint_without_a_report_gets_no_page(
    run: Run, command: tuple[object, ...], sparse_model: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(sparse_model, tmp_path / "other"))
    (other / "report.json").unlink()
    (other / "report.html").unlink()
    words = tuple(other if word == sparse_model else word for word in command)
    result = run(*words, "--steps", "1")
    assert result.exit_code == 0, result.output
    assert "report.html" not in result.stdout
    assert list((tmp_path / "out").glob("report.*")) == []


def test_interrupt_tells_how_to_resume_and_resuming_gives_the_same_bytes(
    run: Run, command: tuple[object, ...], tmp_path: Path
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    steps = ("--steps", "40", "--evaluate-every", "40")
    process = start(*command, *steps)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("recover 2/40"):
            process.send_signal(signal.SIGINT)
            break
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    assert not out.exists()
    assert "--resume" in told
    result = run(*command, *steps, "--resume")
    assert result.exit_code == 0, result.output
    uninterrupted = tuple(whole if word == out else word for word in command)
    assert run(*uninterrupted, *steps).exit_code == 0
    with CheckpointReader(out) as one, CheckpointReader(whole) as other:
        assert one.names() == other.names()
        assert all(torch.equal(one.load(name), other.load(name)) for name in one.names())


def test_the_teacher_is_asked_for(run: Run, sparse_model: Path, tmp_path: Path) -> None:
    result = run("recover", sparse_model, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "--teacher MODEL" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "0"), "steps=0"),
        (("--masks", "grow"), "masks='grow'"),
        (("--lr", "-1"), "lr=-1"),
        (("--device", "tpu"), "device 'tpu'"),
        (("--resume", "--overwrite"), "resume and overwrite"),
        (("--held-out", "9999"), "more than 9999 windows"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    run: Run, command: tuple[object, ...], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    result = run(*command, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_dense_models_have_nothing_to_recover(run: Run, dense_model: Path, tmp_path: Path) -> None:
    result = run("recover", dense_model, "-o", tmp_path / "out", "--teacher", dense_model)
    assert result.exit_code == 2
    assert "is a dense checkpoint" in result.stderr


@pytest.mark.parametrize("key", ["bytes", "seconds", "command", "layers", "peak_memory_bytes"])
def test_a_damaged_report_is_refused_before_training(
    run: Run, command: tuple[object, ...], damaged: Path, tmp_path: Path, key: str
) -> None:
    path = damaged / "report.json"
    report = json.loads(path.read_text())
    report[key] = None
    path.write_text(json.dumps(report))
    result = run(command[0], damaged, *command[2:], "--steps", "2")
    assert result.exit_code == 2, result.output
    assert f"report.json is damaged: {key}" in result.stderr
    assert "loss" not in result.stderr
    assert not (tmp_path / "out").exists()
