"""`hopsparse tune --matrix`: what is tuned, what is refused, and how a ranking is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hopsparse.cli.tune_blocks import as_blocks, block_row, print_blocks
from hopsparse.errors import ArgumentError
from hopsparse.formats import BSR, CSR, write_matrices
from hopsparse.ops.spmm_bsr.choose import DENSE
from hopsparse.ops.spmm_bsr.schedule import Problem
from hopsparse.ops.spmm_bsr.tuning import named_candidates
from hopsparse.plan import TARGETS
from hopsparse.quant import quantize_matrix
from hopsparse.tune import Measured, Ranking
from tests.cli.conftest import Run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    write_matrices(path, {"w": BSR.from_dense(torch.eye(64).bfloat16(), (32, 32))})
    return path


def test_without_a_gpu_it_says_what_is_missing(
    run_json: Callable[..., Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = run_json("tune", file, "--matrix", "w", exit_code=2)["error"]
    assert error["kind"] == "UnsupportedError"
    assert "sees no GPU" in error["got"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--matrix", "w", "--shape", "64x64"), "--matrix 'w' with --shape"),
        (("--matrix", "w"), "--matrix 'w' with no file"),
    ],
)
def test_matrices_are_those_of_a_file(run: Run, words: tuple[str, ...], told: str) -> None:
    done = run("tune", *words)
    assert done.exit_code == 2
    assert told in done.stderr


def test_other_words_are_refused_before_a_gpu_is_looked_for(run: Run, file: Path) -> None:
    for words, told in (
        (("--matrix", "v"), "--matrix 'v'"),
        (("--matrix", "w", "--dtype", "int8"), "--matrix with --dtype int8"),
        (("--matrix", "w", "--tokens", "0"), "--tokens 0"),
        (("--matrix", "w", "--budget-s", "-1"), "--budget-s -1"),
    ):
        done = run("tune", file, *words)
        assert done.exit_code == 2
        assert told in done.stderr


def test_matrices_are_tuned_in_their_own_blocks_or_in_16() -> None:
    dense = torch.block_diag(torch.ones(40, 30), torch.ones(20, 30))
    own = as_blocks("w", BSR.from_dense(dense, (32, 32)), None)
    assert (own.block, own.dtype) == ((32, 32), torch.bfloat16)
    cut = as_blocks("w", CSR.from_dense(dense.half()), None)
    assert (cut.block, cut.dtype) == ((16, 16), torch.float16)
    assert as_blocks("w", cut, "bfloat16").dtype == torch.bfloat16
    assert torch.equal(cut.to_dense().float(), dense)
    codes = quantize_matrix(torch.tensor([[1.0, 2.0, 0.0, 0.0]] * 16), "2:4+int8")
    with pytest.raises(ArgumentError, match="whose values are codes"):
        as_blocks("w", codes, None)


def test_rows_say_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    w = BSR.from_dense(torch.eye(4096).bfloat16(), (64, 64))
    found = named_candidates(w, Problem(2048, 4096, 4096), TARGETS["h200"], few=3)
    first, dense, second, third = found.by_name
    assert dense == DENSE
    measured = {
        first: Measured(4.0, 4.0, 4.0),
        dense: Measured(8.0, 8.0, 8.0),
        second: Measured(2.0, 2.0, 2.0),
        third: Measured.wrong("wrong: an error of 7 times the bound"),
    }
    row = block_row("w", w, 2048, found, Ranking(measured, (second,)))
    assert [each["us"] for each in row["tiles"][:2]] == [2.0, 4.0]
    assert row["runs"] == row["tiles"][0]["tile"] == second.split(" ")[0].rstrip(",")
    assert (row["tiles"][0]["ratio_to_dense"], row["tiles"][0]["ratio_to_model"]) == (4.0, 2.0)
    assert [each["is_new"] for each in row["tiles"]] == [True, False, False]
    assert row["tiles"][1]["is_first_choice"]
    print_blocks([row])
    told = capsys.readouterr().out
    assert "model's choice" in told
    assert "WRONG" in told
