from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hopsparse.report
from hopsparse.cli import sparsify
from hopsparse.cli.console import print_json
from tests.cli.conftest import SMALL, Run, start


def test_json_is_the_report_with_predictions(sparse_json: dict[str, Any]) -> None:
    assert sparse_json["schema"] == 1
    assert len(sparse_json["layers"]) == 14
    assert {layer["format"] for layer in sparse_json["layers"]} == {"nm"}
    assert [row["tokens"] for row in sparse_json["predicted"]["totals"]] == [1, 16, 256, 4096]
    assert sparse_json["predicted"]["measured"] is False
    (row,) = sparse_json["evaluation"]
    assert row["dense"]["perplexity"] > 1
    assert 0 <= row["sparse"]["agreement"] <= 1


def test_checkpoint_holds_both_reports(sparse_json: dict[str, Any], sparse_model: Path) -> None:
    stored = json.loads((sparse_model / "report.json").read_text(encoding="utf-8"))
    assert stored["layers"] == sparse_json["layers"]
    page = (sparse_model / "report.html").read_text(encoding="utf-8")
    assert stored["command"].split()[0] in page
    assert Path(sparse_json["report"]) == sparse_model / "report.html"


def test_table_shows_quality_bytes_prediction_and_the_command(
    run: Run, dense_model: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    texts = ("--calibration", text_file, "--eval", text_file)
    options = ("--method", "magnitude", "--keep", "*.q_proj", "--keep", "*.k_proj")
    result = run("sparsify", dense_model, "-o", out, *texts, *options, *SMALL)
    assert result.exit_code == 0, result.output
    for words in ("text.txt", "sparse ppl", "top-1 agreement", "bytes", "not measured", "4,096"):
        assert words in result.stdout
    assert f"report  {out / 'report.html'}" in result.stdout
    repeat = next(line for line in result.stdout.splitlines() if line.startswith("repeat"))
    assert "--method magnitude" in repeat
    assert "--keep '*.q_proj'" in repeat
    # Progress is a line a step where nobody watches, and stays off standard output.
    assert "prune 2/2" in result.stderr
    assert "prune" not in result.stdout.replace("--", "")
    stored = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert len(stored["layers"]) == 10
    assert len(stored["kept_dense"]) == 5


def test_no_report_leaves_no_page(
    run_json: Callable[..., Any], dense_model: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    texts = ("--calibration", text_file, "--eval", text_file, "--method", "magnitude")
    found = run_json("sparsify", dense_model, "-o", out, *texts, *SMALL, "--no-report")
    assert found["report"] is None
    assert not (out / "report.html").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pattern", "2of4"), "2of4"),
        (("--pattern", "unstructured:1.5"), "1.5"),
        (("--method", "lottery"), "lottery"),
        (("--damping", "-1"), "damping"),
        (("--device", "abacus"), "abacus"),
        (("--device", "cuda:77"), "cuda:77"),
        (("--windows", "0"), "windows = 0"),
        (("--resume", "--overwrite"), "resume and overwrite"),
        (("--calibration", "no/such/file.txt"), "no/such/file.txt"),
        (("--keep", "*"), "without any layer to prune"),
    ],
)
def test_bad_options_are_refused_in_three_lines(
    run: Run,
    dense_model: Path,
    text_file: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    words: str,
) -> None:
    out = tmp_path / "out"
    texts = ("--calibration", text_file, "--eval", text_file)
    result = run("sparsify", dense_model, "-o", out, *texts, *SMALL, *options)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["got", "need", "try"]
    assert words in lines[0]
    assert not out.exists()
    assert result.stdout == ""


def test_calibration_in_another_encoding_is_named(
    run: Run, dense_model: Path, tmp_path: Path
) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("caf\xe9 ".encode("latin-1") * 400)
    result = run("sparsify", dense_model, "-o", tmp_path / "out", "--calibration", latin, *SMALL)
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr
    assert "0xe9" in result.stderr


def test_empty_calibration_is_refused(run: Run, dense_model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    result = run("sparsify", dense_model, "-o", tmp_path / "out", "--calibration", empty, *SMALL)
    assert result.exit_code == 2
    assert "is empty" in result.stderr


def test_missing_model_is_refused(run: Run, tmp_path: Path) -> None:
    result = run("sparsify", tmp_path / "nowhere", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr


def test_existing_output_is_refused_and_kept(run: Run, dense_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    for extra in ((), ("--overwrite",)):
        result = run("sparsify", dense_model, "-o", out, *SMALL, *extra)
        assert result.exit_code == 2
        assert "exists" in result.stderr
    assert (out / "mine.txt").read_text() == "precious"


def test_json_errors_are_json(run_json: Callable[..., Any], tmp_path: Path) -> None:
    found = run_json("sparsify", tmp_path / "nowhere", "-o", tmp_path / "out", exit_code=2)
    assert set(found["error"]) == {"kind", "got", "need", "try"}


@pytest.mark.parametrize("command", ["sparsify", "plan"])
def test_a_name_that_is_too_long_is_refused(
    run_json: Callable[..., Any], dense_model: Path, text_file: Path, tmp_path: Path, command: str
) -> None:
    words = ("--calibration", text_file, "--windows", "2", "--window-tokens", "32")
    error = run_json(command, dense_model, "-o", tmp_path / ("a" * 252), *words, exit_code=2)
    assert "File name too long" in error["error"]["got"]


def test_json_has_null_where_a_number_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"perplexity": float("inf"), "rows": [float("nan"), 1.5, (2,)], "ok": True})
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"perplexity": None, "rows": [None, 1.5, [2]], "ok": True}


def test_missing_report_extra_is_found_before_any_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopsparse.report, "find_spec", lambda name: None)
    result = run("sparsify", tmp_path / "nowhere", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "pip install 'hopsparse[report]'" in result.stderr


def test_interrupt_tells_how_to_resume_and_resuming_gives_the_same_bytes(
    dense_model: Path, sparse_model: Path, text_file: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    texts = ("--calibration", text_file, "--eval", text_file)
    command = ("sparsify", dense_model, "-o", out, *texts, *SMALL)
    process = start(*command)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("prune 1/2"):
            process.send_signal(signal.SIGINT)
            break
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert not out.exists()
    assert "--resume" in told
    result = run(*command, "--resume")
    assert result.exit_code == 0, result.output
    shards = sorted(path.name for path in sparse_model.glob("*.safetensors"))
    assert shards == sorted(path.name for path in out.glob("*.safetensors"))
    for name in shards:
        assert (out / name).read_bytes() == (sparse_model / name).read_bytes()


@pytest.mark.parametrize("when", ["_prepare_and_sparsify", "_sparsify"])
def test_interrupt_before_any_block(
    run: Run, dense_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sparsify, when, interrupt)
    result = run("sparsify", dense_model, "-o", tmp_path / "out")
    assert result.exit_code == 130
    assert "Interrupted; nothing was written." in result.stderr


@pytest.mark.parametrize("out", ["", ".", "/"])
def test_output_without_a_name_is_refused_before_the_model_is_read(run: Run, out: str) -> None:
    result = run("sparsify", "nowhere", "-o", out)
    assert result.exit_code == 2
    assert "need  a path that ends in a new name" in result.stderr


def test_repeat_command_keeps_no_report(
    run: Run, dense_model: Path, text_file: Path, tmp_path: Path
) -> None:
    texts = ("--calibration", text_file, "--eval", text_file)
    options = (*texts, *SMALL, "--method", "magnitude", "--no-report")
    result = run("sparsify", dense_model, "-o", tmp_path / "out", *options)
    repeat = next(line for line in result.stdout.splitlines() if line.startswith("repeat"))
    assert repeat.endswith("--no-report")


def test_help_loads_nothing_heavy_beyond_the_package() -> None:
    program = (
        "import sys, hopsparse\n"
        "before = set(sys.modules)\n"
        "import hopsparse.cli\n"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib', 'jinja2', 'safetensors'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.strip() == "[]"


def test_help_lists_the_commands(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in ("doctor", "sparsify", "inspect", "convert", "verify"):
        assert name in result.stdout


def test_schemes_and_forms_by_option(
    run: Run, run_json: Callable[..., Any], dense_model: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    texts = ("--calibration", text_file, "--eval", text_file, "--method", "magnitude")
    forms = ("--form", "*.1.mlp.*=dense", "--form", "*.1.*=dense+int4:32")
    words = ("sparsify", dense_model, "-o", out, *texts, *SMALL, "--quant", "int8", *forms)
    report = run_json(*words)
    assert {(row["pattern"], row["scheme"]) for row in report["layers"]} == {
        ("2:4", "int8"),
        ("dense", "int4:32"),
    }
    assert report["kept_dense"]["model.layers.1.mlp.up_proj"] == "dense by plan"
    assert "mixed forms by magnitude" in (out / "report.html").read_text()
    assert "nm 2:4+int8" in (out / "report.html").read_text()
    repeated = [*shlex.split(report["command"])[1:], "--overwrite"]
    again = run(*repeated)
    assert again.exit_code == 0, again.output
    shown = run_json("inspect", out)
    rows = {(row["format"], row["pattern"], row["scheme"], row["dtype"]) for row in shown["layers"]}
    assert rows == {("nm", "2:4", "int8", "bfloat16"), ("dense", "dense", "int4:32", "bfloat16")}
    text = run("inspect", out).output
    assert "scheme" in text
    assert "int4:32" in text
    assert run("verify", out).exit_code == 0
    refused = run("convert", out, "-o", tmp_path / "plain", "--to", "dense")
    assert refused.exit_code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--quant", "int9"), "int9"),
        (("--quant", "int4:48"), "48"),
        (("--form", "6:8"), "GLOB=FORM"),
        (("--form", "*=7:8+"), "''"),
        (("--form", "*nothing=6:8"), "*nothing"),
    ],
    ids=str,
)
def test_schemes_and_forms_that_mean_nothing(
    run: Run, dense_model: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    result = run("sparsify", dense_model, "-o", tmp_path / "out", *words)
    assert result.exit_code == 2
    assert said in result.output
    assert not (tmp_path / "out").exists()
