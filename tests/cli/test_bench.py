from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hopsparse.cli.bench import Bench, _cells, _problems, is_ours, ways_for
from hopsparse.errors import ArgumentError
from hopsparse.measure.suite import CodedProblem, Problem
from tests.cli.conftest import Run


def test_without_a_gpu_it_says_what_is_missing(
    run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = run_json("bench", "--shape", "64x64", exit_code=2)["error"]
    assert error["kind"] == "UnsupportedError"
    assert "sees no GPU" in error["got"]
    assert "hopsparse doctor" in error["try"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "neither --shape nor --suite"),
        (("--shape", "64x64", "--suite", "anchors"), "both --shape and --suite"),
        (("--shape", "64"), "shape '64'"),
        (("--shape", "64x66"), "k = 66"),
        (("--shape", "0x64"), "positive"),
        (("--shape", "64x64", "--tokens", "1,,2"), "tokens '1,,2'"),
        (("--shape", "64x64", "--tokens", "0"), "0 tokens"),
        (("--shape", "64x64", "--dtype", "int4"), "dtype 'int4'"),
        (("--shape", "64x64", "--dtype", "fp8"), "try   --dtype float8_e4m3fn"),
        (("--shape", "64x64", "--scaling", "rows"), "--scaling rows of bfloat16"),
        (("--shape", "64x64", "--dtype", "float16", "--scaling", "none"), "--scaling none of"),
        (("--shape", "64x64", "--dtype", "int8", "--scaling", "row"), "scaling 'row'"),
        (("--suite", "gpt", "--dtype", "int8"), "suite 'gpt'"),
        (("--suite", "anchors", "--dtype", "int8", "--tokens", "1"), "a dtype that the suite has"),
        (("--shape", "64x64", "--seconds", "2"), "--seconds 2 without --energy"),
        (("--shape", "64x64", "--rounds", "0"), "--rounds 0"),
        (("--suite", "gpt"), "suite 'gpt'"),
        (("--suite", "anchors", "--tokens", "1"), "tokens and a dtype that the suite has"),
    ],
)
def test_what_cannot_be_timed_is_said_before_a_gpu_is_looked_for(
    run: Run, arguments: tuple[str, ...], told: str
) -> None:
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_shapes_are_timed_with_all_tokens_of_one_layer_in_a_row() -> None:
    problems = _problems(Bench(shape=["64x32", "8x4"], tokens="5,1", dtype="float16"))
    assert list(problems) == [
        Problem("", 64, 32, 5, "float16"),
        Problem("", 64, 32, 1, "float16"),
        Problem("", 8, 4, 5, "float16"),
        Problem("", 8, 4, 1, "float16"),
    ]


def test_a_suite_is_narrowed_by_tokens_and_dtype() -> None:
    problems = _problems(Bench(suite="anchors", tokens="256,4096", dtype="float16"))
    assert len(problems) == 6 * 2
    assert {(each.tokens, each.dtype) for each in problems} == {
        (256, "float16"),
        (4096, "float16"),
    }


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_shapes_and_suites_are_timed_in_8_bits_too(dtype: str) -> None:
    shaped = _problems(Bench(shape=["64x32"], tokens="5", dtype=dtype, scaling="rows"))
    assert shaped == [CodedProblem("", 64, 32, 5, dtype, "rows")]
    suite = _problems(Bench(suite="anchors", tokens="256,4096", dtype=dtype))
    assert len(suite) == 6 * 2
    assert {(each.dtype, getattr(each, "scaling", "")) for each in suite} == {(dtype, "none")}


@pytest.mark.parametrize(
    ("problem", "names"),
    [
        (Problem("", 64, 64, 1), ["hopsparse", "cublas"]),
        (CodedProblem("", 64, 64, 1, "int8"), ["hopsparse", "cublas"]),
        (CodedProblem("", 64, 64, 1), ["hopsparse_fast", "hopsparse_promoted", "cublas"]),
    ],
)
def test_ours_come_first_and_peers_that_can_run_behind(
    problem: Problem, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [way.name for way in ways_for(problem)] == names
    assert [is_ours({"contender": name}) for name in names] == [True] * (len(names) - 1) + [False]


def test_tokens_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ArgumentError, match="--tokens 1,256"):
        _problems(Bench(shape=["64x64"], tokens="many"))


def test_a_rival_that_failed_leaves_dashes() -> None:
    facts: dict[str, Any] = {"layer": "o", "out": 64, "k": 32, "tokens": 1, "dtype": "bfloat16"}
    ours = {**facts, "plan": "nm", "us": 2.0, "tflops": 800.4, "watts": None, "ratio": 1.0}
    found = {"hopsparse": ours, "cublas": {"us": 3.0, "ratio": 1.5}}
    found["cusparselt"] = {"us": None, "ratio": None}
    cells = ["o 64x32", "bfloat16", "nm", "1", "2.0", "800", "-", "3.0", "1.50", "-", "-"]
    assert _cells(found, ["cublas", "cusparselt"]) == cells
    found["hopsparse"]["scaling"] = "rows"
    assert _cells(found, [])[1] == "bfloat16 rows"
