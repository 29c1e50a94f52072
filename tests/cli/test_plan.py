from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsparse.plan import ModelPlan
from hopsparse.prune import Recipe
from tests.cli.conftest import Run, start

FORMS = "dense,6:8,2:4,2:4+int8,dense+int4"
SMALL = ("--windows", "6", "--window-tokens", "32")


@pytest.fixture
def arguments(dense_model: Path, text_file: Path, tmp_path: Path) -> tuple[Any, ...]:
    plan = tmp_path / "plan.json"
    options = ("--calibration", text_file, "--forms", FORMS, "--objective", "bytes", *SMALL)
    return ("plan", dense_model, "-o", plan, *options)


def test_a_plan_is_written_next_to_its_costs_and_plot(
    run_json: Callable[..., Any], arguments: tuple[Any, ...], tmp_path: Path, dense_model: Path
) -> None:
    found = run_json(*arguments, "--plot", tmp_path / "plot.png", "--quality-budget", "1.001")
    plan = ModelPlan.read(tmp_path / "plan.json")
    assert plan.to_json() == found["plan"]
    assert (plan.model, plan.objective, plan.budget) == (str(dense_model), "bytes", 1.001)
    assert len(plan.layers) == 14
    assert set(plan.layers.values()) <= {"dense", "6:8", "2:4", "2:4+int8", "dense+int4:64"}
    assert plan.predicted["weight_bytes"] < plan.predicted["dense_weight_bytes"]
    assert found["pareto"]["measured"] is False
    assert found["pareto"]["chosen"]["perplexity_ratio"] <= 1.001
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "plan.costs.json").read_text())["layers"]) == 14
    assert len(Recipe(forms=plan.forms()).forms) == 15


def test_the_table_shows_front_uniform_forms_and_shares(
    run: Run, arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    for words in ("predicted, not measured", "front", "all 2:4+int8", "budget 1.05", "% "):
        assert words in result.stdout
    assert f"plan    {tmp_path / 'plan.json'}" in result.stdout
    assert "sensitivity 2/2" in result.stderr
    assert "sensitivity" not in result.stdout


def test_a_note_that_many_layers_share_is_shown_once(run: Run, arguments: tuple[Any, ...]) -> None:
    result = run(*arguments, "--method", "wanda")
    notes = [line for line in result.stdout.splitlines() if line.startswith("note")]
    assert notes == ["note    14 layers: output error from every 16th token"]


def test_another_budget_needs_no_new_measurement(
    run: Run, arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    assert run(*arguments).exit_code == 0
    first = (tmp_path / "plan.json").read_text()
    again = run(*arguments, "--quality-budget", "1", "--overwrite", "--context", "64")
    assert again.exit_code == 0
    assert "sensitivity" not in again.stderr
    assert ModelPlan.read(tmp_path / "plan.json").predicted["perplexity_ratio"] == 1
    assert (tmp_path / "plan.json").read_text() != first


def test_a_plan_that_may_have_been_edited_is_not_replaced(
    run_json: Callable[..., Any], arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text("mine")
    found = run_json(*arguments, exit_code=2)
    assert "--overwrite" in found["error"]["try"]
    assert (tmp_path / "plan.json").read_text() == "mine"


def test_fast_and_full_agree_on_what_was_measured_alone(
    run_json: Callable[..., Any], arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    full = run_json(*arguments)
    fast = run_json(*arguments[:3], tmp_path / "fast.json", *arguments[4:], "--fast")
    ratios = [
        {point["label"]: point["perplexity_ratio"] for point in each["pareto"]["uniform"]}
        for each in (full, fast)
    ]
    assert ratios[0]["2:4"] == ratios[1]["2:4"]
    assert ratios[0]["2:4+int8"] != ratios[1]["2:4+int8"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--quality-budget", "0.9"), "budget 0.9"),
        (("--quality-budget", "nan"), "budget nan"),
        (("--target", "b200"), "b200"),
        (("--batch", "0"), "batch 0"),
        (("--context", "0"), "context 0"),
        (("--objective", "joules"), "joules"),
        (("--forms", "2of4"), "2of4"),
        (("--forms", ""), "''"),
        (("--windows", "1"), "windows = 1"),
        (("--scale", "0"), "scale 0"),
        (("--plot", "plot.gif"), "plot.gif"),
        (("--plot", "no/such/plot.png"), "no/such"),
        (("--device", "abacus"), "abacus"),
        (("--method", "lottery"), "lottery"),
        (("--calibration", "no/such.txt"), "no/such.txt"),
        (("--forms", "2:4", "--quality-budget", "1"), "the best that these forms"),
    ],
)
def test_bad_options_are_refused_in_three_lines(
    run: Run, arguments: tuple[Any, ...], tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    result = run(*arguments, *options)
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["got", "need", "try"]
    assert words in lines[0]
    assert not (tmp_path / "plan.json").exists()


def test_a_folder_that_is_not_there_is_refused_at_once(run: Run, dense_model: Path) -> None:
    result = run("plan", dense_model, "-o", "no/such/plan.json")
    assert result.exit_code == 2
    assert "no/such is no folder" in result.stderr


def test_ctrl_c_keeps_what_is_measured(
    run: Run, arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    process = start(*arguments)
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if line.startswith("sensitivity 1/2"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130, seen + rest
    assert f"what is measured is in {tmp_path / 'plan.costs.json'}" in rest
    assert not (tmp_path / "plan.json").exists()
    result = run(*arguments)
    assert result.exit_code == 0
    assert "sensitivity 2/2" in result.stderr
