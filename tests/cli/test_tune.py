from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hopsparse.cli.console import _finite
from hopsparse.cli.problems import FOUR_BITS, four_bits_of, numbers_of
from hopsparse.cli.tune import Tune, _cells, _print, result
from hopsparse.cli.tune_problems import _kind_of, distinct, layers_of, problems_of
from hopsparse.errors import ArgumentError
from hopsparse.measure.suite import Int4Problem, Problem, SummedProblem
from hopsparse.models._entries import ModuleEntry
from hopsparse.ops.spmm_nm.cost import Problem as Sizes
from hopsparse.ops.spmm_nm.int4.plan import KINDS, Kind
from hopsparse.ops.spmm_nm.int4.tuning import named_int4_candidates
from hopsparse.ops.spmm_nm.kernel import Numbers
from hopsparse.ops.spmm_nm.plan import DENSE
from hopsparse.ops.spmm_nm.scaled.tuning import named_scaled_candidates
from hopsparse.ops.spmm_nm.tuning import named_candidates
from hopsparse.quant import quantize_matrix
from hopsparse.tune import Measured, Ranking, token_classes
from tests.cli.conftest import SMALL, Run


def test_without_a_gpu_it_says_what_is_missing(
    run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = run_json("tune", "--shape", "64x64", exit_code=2)["error"]
    assert error["kind"] == "UnsupportedError"
    assert "sees no GPU" in error["got"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "no layers"),
        (("--shape", "64x64", "--suite", "anchors"), "--shape and --suite"),
        (("--shape", "64"), "shape '64'"),
        (("--shape", "64x66"), "k = 66"),
        (("--shape", "64x64", "--tokens", "0"), "0 tokens"),
        (("--shape", "64x64", "--dtype", "float32"), "dtype 'float32'"),
        (("--shape", "64x64", "--dtype", "fp8/int4"), "try   --dtype float8_e4m3fn"),
        (("no-such-folder", "--dtype", "fp8"), "dtype 'fp8'"),
        (("--shape", "64x64", "--dtype", "int4:128/fp8"), "--dtype int4:128/float8_e4m3fn"),
        (("--shape", "64x64", "--sums", "fast"), "--sums fast of bfloat16"),
        (("--shape", "64x64", "--dtype", "int4:64/bfloat16", "--sums", "fast"), "--sums fast of"),
        (("--shape", "64x64", "--dtype", "float16", "--grouped"), "--grouped of float16"),
        (("--shape", "64x64", "--dtype", "int8", "--grouped"), "scales by group of int8"),
        (("--shape", "64x64", "--dtype", "float8_e4m3fn", "--sums", "exact"), "sums 'exact'"),
        (("no-such-folder", "--sums", "exact"), "sums 'exact'"),
        (("--shape", "64x64", "--dtype", "int8", "--sums", "fast"), "--sums fast of int8"),
        (("no-such-folder", "--sums", "fast"), "MODEL with --sums fast"),
        (("no-such-folder", "--grouped"), "MODEL with --sums promoted --grouped"),
        (("--shape", "64x64", "--tokens", "1,,2"), "tokens '1,,2'"),
        (("--shape", "64x64", "--budget-s", "-1"), "--budget-s -1"),
        (("--shape", "64x64", "--budget-s", "nan"), "--budget-s nan"),
        (("--suite", "gpt"), "suite 'gpt'"),
        (("no-such-folder",), "is no folder"),
    ],
)
def test_what_cannot_be_tuned_is_said_before_a_gpu_is_looked_for(
    run: Run, words: tuple[str, ...], told: str
) -> None:
    result = run("tune", *words)
    assert result.exit_code == 2
    assert told in result.stderr


@pytest.mark.parametrize(
    ("content", "told"), [(None, "does not exist"), ("{", "cannot be read"), ("[]", "JSON object")]
)
def test_a_folder_that_is_no_checkpoint_is_refused(
    run_json: Callable[..., Any], tmp_path: Path, content: str | None, told: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    error = run_json("tune", tmp_path, exit_code=2)["error"]
    assert error["kind"] == "CheckpointError"
    assert told in error["got"] + error["need"]


def test_a_shape_is_tuned_once_for_each_class() -> None:
    problems = distinct(problems_of(Tune(shape=["4096x4096"])))
    assert [each.tokens for each in problems] == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert [each.measured for each in token_classes(4096)] == [each.tokens for each in problems]


def test_counts_of_one_class_are_one_problem() -> None:
    problems = distinct(problems_of(Tune(shape=["64x32", "64x32"], tokens="1,16,17,300,5000")))
    assert [each.tokens for each in problems] == [16, 32, 512, 16384]


def test_a_suite_has_each_shape_once_and_takes_other_tokens() -> None:
    problems = distinct(problems_of(Tune(suite="anchors")))
    assert len(problems) == 6 * 4 * 2
    few = distinct(problems_of(Tune(suite="anchors", tokens="1", dtype="float16")))
    assert [(each.tokens, each.dtype) for each in few] == [(16, "float16")] * 6
    assert few[0].layer == "llama-3-8b.qkv"


def test_a_model_has_each_shape_once(sparse_model: Path) -> None:
    layers = layers_of(sparse_model, "bfloat16")
    config = json.loads((sparse_model / "config.json").read_text())
    stored = config["quantization_config"]["modules"].values()
    assert {(out, k) for _, out, k, _ in layers} == {tuple(each["shape"]) for each in stored}
    assert len(layers) == len({layer[1:] for layer in layers}) < len(stored)


def test_a_model_in_float32_has_nothing_to_tune(sparse_model: Path) -> None:
    with pytest.raises(ArgumentError, match="--dtype bfloat16"):
        layers_of(sparse_model, "float32")


def test_a_dense_model_has_nothing_to_tune(dense_model: Path) -> None:
    with pytest.raises(ArgumentError, match="2:4 layers of 16-bit values, of 8-bit codes"):
        layers_of(dense_model, "bfloat16")


def test_codes_have_their_sums_with_them() -> None:
    options = Tune(shape=["64x32"], dtype="float8_e4m3fn", sums="fast", tokens="1")
    assert problems_of(options) == [SummedProblem("", 64, 32, 1, "float8_e4m3fn", sums="fast")]
    few = distinct(problems_of(Tune(suite="anchors", tokens="1,2", dtype="int8")))
    assert [(each.tokens, each.dtype) for each in few] == [(16, "int8")] * 6


def test_a_model_of_codes_has_what_its_layers_multiply(
    dense_model: Path, text_file: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "codes"
    texts = ("--calibration", text_file, "--eval", text_file)
    plan = ("--quant", "int8", "--method", "magnitude")
    assert run("sparsify", dense_model, "-o", out, *plan, *texts, *SMALL).exit_code == 0
    layers = layers_of(out, None)
    assert layers
    assert {layer[3] for layer in layers} == {"int8"}
    assert layers_of(out, "float16") == layers_of(out, "int8") == layers
    with pytest.raises(ArgumentError, match="without a layer"):
        layers_of(out, "float8_e4m3fn")
    problems = problems_of(Tune(model=out, tokens="16"))
    assert {(type(each), each.dtype) for each in problems} == {(SummedProblem, "int8")}
    assert numbers_of(problems[0]) == Numbers("int8", "int8", "bfloat16")


@pytest.mark.parametrize(
    ("scheme", "kinds"),
    [
        ("int4:64", {None: "bfloat16", "float16": "float16", "int4:64/float16": "float16"}),
        ("int4:128/fp8", dict.fromkeys((None, "float16"), "float8_e4m3fn")),
        ("int4:128/int8:static", dict.fromkeys((None, "int4:128/int8"), "int8")),
    ],
)
def test_a_model_of_4_bit_weights_has_what_its_layers_multiply(
    scheme: str,
    kinds: dict[str | None, str],
    dense_model: Path,
    text_file: Path,
    tmp_path: Path,
    run: Run,
) -> None:
    out = tmp_path / "codes"
    texts = ("--calibration", text_file, "--eval", text_file)
    plan = ("--quant", scheme, "--method", "magnitude")
    assert run("sparsify", dense_model, "-o", out, *plan, *texts, *SMALL).exit_code == 0
    group = scheme.partition("/")[0]
    for dtype, x in kinds.items():
        assert {layer[3] for layer in layers_of(out, dtype)} == {f"{group}/{x}"}
        problems = problems_of(Tune(model=out, tokens="16", dtype=dtype))
        assert {type(each) for each in problems} == {Int4Problem}
        assert four_bits_of(problems[0]) == Kind.parse(f"{group}/{x}")
        assert numbers_of(problems[0]) is None
    for other in ("int8", "int4:32/bfloat16"):
        with pytest.raises(ArgumentError, match="without a layer"):
            layers_of(out, other)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("int4:64", "float32"), ("int4:64/int8", None), ("int4:0", None), ("int4:128/int4", None)],
)
def test_a_layer_of_4_bits_that_is_decoded_has_nothing_to_tune(
    scheme: str, dtype: str | None
) -> None:
    def entry(scheme: str) -> ModuleEntry:
        dense = torch.ones(16, 64).bfloat16() * torch.tensor([1, 0, 0, 1] * 16)
        return ModuleEntry.of(quantize_matrix(dense, f"2:4+{scheme}"))

    assert _kind_of(entry(scheme), dtype) is None
    assert _kind_of(entry("int4:128"), "float16") == "int4:128/float16"
    assert _kind_of(entry("int4:32"), None) == "int4:32/bfloat16"


def test_weights_of_4_bits_are_ranked_without_a_dense_product(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert FOUR_BITS == KINDS
    problem = Int4Problem("o", 1000, 1000, 16, "int4:128/int8")
    kind = Kind(128, "int8")
    names = list(named_int4_candidates(Sizes(16, 1000, 1000), kind.numbers, 132))
    times = {name: Measured(10.0 + place, 9, 12) for place, name in enumerate(reversed(names))}
    told = result(problem, Ranking(times, tuple(names)), 132)
    assert (told["dtype"], told["sums"]) == ("int4:128/int8", None)
    assert told["runs"] == told["tiles"][0]["tile"] == names[-1].split(" ")[0]
    assert told["regret"] == pytest.approx((9.0 + len(names)) / 10)
    assert _finite(told)["dense_us"] is None
    _print([told])
    assert "int4:128/int8" in capsys.readouterr().out


def test_codes_are_ranked_without_a_dense_product(capsys: pytest.CaptureFixture[str]) -> None:
    problem = SummedProblem("o", 1000, 1000, 16, "float8_e4m3fn")
    numbers = numbers_of(problem)
    assert numbers is not None
    names = list(named_scaled_candidates(Sizes(16, 1000, 1000), numbers, 132))
    times = {name: Measured(10.0 + place, 9, 12) for place, name in enumerate(reversed(names))}
    told = result(problem, Ranking(times, tuple(names)), 132)
    assert (told["dtype"], told["sums"]) == ("float8_e4m3fn", "promoted")
    assert told["runs"] == told["tiles"][0]["tile"] == names[-1].split(" ")[0]
    assert told["regret"] == pytest.approx((9.0 + len(names)) / 10)
    assert _finite(told)["dense_us"] is None
    assert _finite(told)["tiles"][0]["ratio_to_dense"] is None
    _print([told])
    assert "float8_e4m3fn promoted" in capsys.readouterr().out


def ranking_of(problem: Problem) -> tuple[Ranking, list[str]]:
    """The third candidate wins, the fourth is wrong, the fifth failed, the last has no time."""
    sizes = Sizes(problem.tokens, problem.out, problem.k)
    first, dense, third, wrong, failed, *rest = named_candidates(sizes, problem.dtype, 132)
    assert dense == DENSE
    times = {first: 20.0, dense: 30.0, third: 10.0}
    times |= {name: 40.0 + place for place, name in enumerate(rest[:-1])}
    measured = {name: Measured(us, us - 1, us + 1) for name, us in times.items()}
    measured[wrong] = Measured.wrong("wrong: an error of 9 times the bound")
    names = [name.split(" ")[0] for name in (first, third, wrong, failed, rest[-1])]
    return Ranking(measured, (third,), {failed: "DriverError: no"}, (rest[-1],)), names


def test_rows_say_times_ratios_and_what_runs() -> None:
    problem = Problem("o", 1000, 1000, 16, "float16")
    ranking, (first, third, wrong, failed, left) = ranking_of(problem)
    told = result(problem, ranking, 132)
    assert told["tokens"] == "1-16"
    assert (told["runs"], told["regret"], told["dense_us"]) == (third, 2.0, 30.0)
    rows = {row["tile"]: row for row in told["tiles"]}
    assert len(rows) == len(named_candidates(Sizes(16, 1000, 1000), "float16", 132)) - 1
    assert [row["tile"] for row in told["tiles"]][:2] == [third, first]
    best = rows[third]
    assert best["tflops"] == pytest.approx(2 * 16e6 / 10e-6 / 1e12)
    assert (best["ratio_to_dense"], best["ratio_to_model"], best["is_new"]) == (3.0, 2.0, True)
    assert best["spread"] == pytest.approx(0.2)
    assert rows[first]["is_first_choice"]
    assert "9 times" in rows[wrong]["wrong"]
    assert rows[failed]["failed"] == "DriverError: no"
    assert _finite(rows[left])["us"] is None
    assert _finite(rows[left])["tflops"] is None
    assert json.dumps(_finite(told), allow_nan=False)


@pytest.mark.parametrize(
    ("dense_us", "runs", "regret"),
    [(9.9, "tile", 2.0), (9.0, "dense", 20 / 9), (math.inf, "tile", 2)],
)
def test_dense_runs_where_it_is_faster_by_more_than_the_margin(
    dense_us: float, runs: str, regret: float, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = Problem("o", 1000, 1000, 16)
    ranking, (_, third, *_) = ranking_of(problem)
    times = {**ranking.measured, DENSE: Measured(dense_us, dense_us, dense_us)}
    told = result(problem, replace(ranking, measured=times), 132)
    assert told["runs"] == (third if runs == "tile" else "dense")
    assert told["regret"] == pytest.approx(regret)
    assert told["tiles"][0]["tile"] == third
    _print([told])
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    running = [words for words in said if words[-1] == "runs" and "model" not in words]
    assert [words for words in running if told["runs"] in words] == running
    assert len(running) == 1
    if runs == "dense":
        assert running[0][-7:] == ["dense", "9.0", "-", "4", "1.00", "2.22", "runs"]


def test_a_table_row_has_dashes_for_what_was_not_measured() -> None:
    problem = Problem("", 1000, 1000, 16)
    ranking, (_, third, wrong, _, _) = ranking_of(problem)
    rows = {row["tile"]: row for row in result(problem, ranking, 132)["tiles"]}
    cells = _cells(rows[third], runs=True)
    assert cells == [third, "10.0", "20.0 %", "3", "3.00", "2.00", "runs"]
    assert _cells(rows[wrong], runs=False) == [wrong, "-", "-", "-", "-", "-", "WRONG"]


def test_nothing_runs_where_nothing_was_measured() -> None:
    told = result(Problem("", 1000, 1000, 16), Ranking(), 132)
    assert told["runs"] is None
    assert told["regret"] is None
