from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hopsparse.cli.bench import Bench
from hopsparse.cli.energy import Setting, _print, _row, cells_of, compared, setting_of
from hopsparse.measure.clock import Timing
from hopsparse.measure.contest import Result
from hopsparse.measure.energy import Energy, Turn
from tests.cli.conftest import Run


def test_without_a_gpu_it_says_what_is_missing(
    run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = run_json("bench", "--energy", exit_code=2)["error"]
    assert error["kind"] == "UnsupportedError"
    assert "sees no GPU" in error["got"]
    assert "hopsparse doctor" in error["try"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--suite", "anchors"), "--suite anchors with --energy"),
        (("--dtype", "int8"), "--dtype int8 with --energy"),
        (("--shape", "64x64", "--shape", "32x32"), "2 shapes and 1 token counts"),
        (("--tokens", "16,32"), "1 shapes and 2 token counts"),
        (("--shape", "64"), "shape '64'"),
        (("--shape", "64x66"), "k = 66"),
        (("--tokens", "0"), "0 tokens"),
        (("--tokens", ""), "tokens ''"),
        (("--scaling", ""), "scaling ''"),
        (("--scaling", "row"), "scaling 'row'"),
        (("--rounds", "0"), "0 rounds"),
        (("--seconds", "0.1"), "0.1 seconds"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_gpu_is_looked_for(
    run: Run, arguments: tuple[str, ...], told: str
) -> None:
    result = run("bench", "--energy", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_left_out_is_one_large_layer_without_scales() -> None:
    assert setting_of(Bench(energy=True)) == Setting(8192, 8192, 8192, "none", 3, 2.0)
    asked = Bench(energy=True, shape=["64x32"], tokens="5", scaling="rows", rounds=1, seconds=4.0)
    assert setting_of(asked) == Setting(64, 32, 5, "rows", 1, 4.0)


def rows() -> list[dict[str, Any]]:
    """1 TFLOP a call, in 1 ms: TFLOP/J is 1000 over watts."""
    setting = Setting(5000, 10000, 10000)
    assert setting.flops == 10**12

    def row(dtype: str, name: str, *watts: float) -> dict[str, Any]:
        energy = Energy(
            name, tuple(Turn(1000.0, each, 1500.0, 60.0, ("power cap",)) for each in watts)
        )
        return _row(setting, dtype, Result(Timing(name), 0.5, "a plan"), energy)

    wrong = Result(Timing("hopsparse_fast", error="wrong: twice"), float("inf"))
    return compared(
        [
            row("float16", "cublas", 500.0, 250.0, 1000.0),
            row("int8", "cublas", 200.0),
            row("int8", "hopsparse", 125.0),
            _row(setting, "float8_e4m3fn", wrong, None),
        ]
    )


def test_rows_are_json_with_operations_per_joule() -> None:
    found = rows()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [row["tflop_per_joule"] for row in found] == pytest.approx([2.0, 5.0, 8.0, None])
    assert [row["sparsity"] for row in found] == ["dense", "dense", "2:4", "2:4"]
    assert (found[0]["least_tflop_per_joule"], found[0]["most_tflop_per_joule"]) == (1.0, 4.0)
    assert found[0]["limits"] == ["power cap"]
    assert found[0]["rounds"] == 3
    assert found[3]["error"] == "wrong: twice"
    assert found[3]["excess"] is None


def test_ratios_are_to_dense_of_the_dtype_and_of_float16() -> None:
    assert [row["to_dense"] for row in rows()] == pytest.approx([1.0, 1.0, 1.6, None])
    assert [row["to_float16"] for row in rows()] == pytest.approx([1.0, 2.5, 4.0, None])


def test_the_table_has_a_line_for_each_and_names_what_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cells_of(rows()[2]) == [
        *("int8", "2:4", "hopsparse", "a plan"),
        *("1000.0", "1000", "125", "8.000", "1.60", "4.00"),
    ]
    assert cells_of(rows()[3])[3:] == ["-"] * 7
    _print(rows(), {"gpu": "H200", "driver": "580", "torch": "2.11"})
    text = capsys.readouterr().out
    assert "10000 tokens, 5000x10000, scaling none" in text
    assert "float8_e4m3fn hopsparse_fast: wrong: twice" in text
