"""`hopsparse sparsify` with plans, quality budgets and recovery."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsparse.models.checkpoint import CheckpointReader
from hopsparse.plan import ModelPlan
from tests.cli.conftest import Run, start

FORMS = "dense,6:8,2:4,2:4+int8,dense+int4"
SIZES = ("--windows", "6", "--window-tokens", "32", "--eval-windows", "2", "--no-samples")
BUDGET = ("--quality-budget", "1.05", "--objective", "bytes", "--forms", FORMS)


@pytest.fixture
def texts(text_file: Path, tmp_path: Path) -> tuple[object, ...]:
    judged = tmp_path / "eval.txt"
    judged.write_text("Another text, that nobody has trained on. " * 20)
    return ("--calibration", text_file, "--eval", judged)


@pytest.fixture
def words(dense_model: Path, tmp_path: Path, texts: tuple[object, ...]) -> tuple[object, ...]:
    return ("sparsify", dense_model, "-o", tmp_path / "out", *texts, *SIZES)


def stored_forms(folder: Path) -> dict[str, str]:
    """Pattern and scheme of each stored weight."""
    with CheckpointReader(folder) as reader:
        assert reader.sparse is not None
        return {
            name: f"{entry.attributes.get('pattern', 'dense')}"
            + (f"+{entry.scheme}" if entry.scheme else "")
            for name, entry in reader.sparse.modules.items()
        }


def same_bytes(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.glob("*.safetensors"))
    assert names == sorted(path.name for path in other.glob("*.safetensors"))
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def interrupt(words: tuple[object, ...], line_start: str) -> str:
    """Press Ctrl-C at a line of progress; what was said after it."""
    process = start(*words)
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if line.startswith(line_start):
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=120)[1]
    assert process.returncode == 130, seen + rest
    return rest


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        (("--search", "admm"), {"search": "admm"}),
        (("--fit-to", "layer"), {"fit_to": "layer"}),
        (("--fit-to", "input"), {"fit_to": "input"}),
        (("--order", "activation"), {"order": "activation"}),
        (("--damping", "search"), {"damping": "search"}),
        (("--permute",), {"permute": True}),
        (("--damping", "0.1", "--refit", "0"), {"damping": 0.1, "refit": 0}),
    ],
)
def test_ways_of_pruning_round_trip_through_the_command(
    run: Run,
    run_json: Callable[..., Any],
    words: tuple[object, ...],
    tmp_path: Path,
    options: tuple[str, ...],
    changed: dict[str, Any],
) -> None:
    report = run_json(*words, *options)
    assert {key: report["recipe"][key] for key in changed} == changed
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors")}
    repeated = run(*shlex.split(report["command"])[1:], "--overwrite")
    assert repeated.exit_code == 0, repeated.output
    again = json.loads((tmp_path / "out" / "report.json").read_text())
    assert again["recipe"] == report["recipe"]
    assert again["command"] == report["command"]
    assert first == {
        path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors")
    }


@pytest.mark.parametrize(
    ("options", "both"),
    [
        (("--plan", "p.json", *BUDGET), ("--plan", "--quality-budget")),
        (("--plan", "p.json", "--pattern", "2:4"), ("--plan", "--pattern")),
        (("--plan", "p.json", "--quant", "int8"), ("--plan", "--quant")),
        (("--plan", "p.json", "--form", "*=6:8"), ("--plan", "--form")),
        (("--plan", "p.json", "--keep", "*.0.*"), ("--plan", "--keep")),
        ((*BUDGET, "--pattern", "2:4"), ("--quality-budget", "--pattern")),
        ((*BUDGET, "--quant", "int8"), ("--quality-budget", "--quant")),
        ((*BUDGET, "--form", "*=6:8"), ("--quality-budget", "--form")),
        (("--target", "h100"), ("--target", "--quality-budget")),
        (("--batch", "8"), ("--batch", "--quality-budget")),
        (("--context", "8"), ("--context", "--quality-budget")),
        (("--objective", "bytes"), ("--objective", "--quality-budget")),
        (("--forms", "2:4"), ("--forms", "--quality-budget")),
        (("--fast",), ("--fast", "--quality-budget")),
        (("--search", "admm", "--method", "wanda"), ("--search admm", "--method wanda")),
        (("--fit-to", "input", "--method", "wanda"), ("--fit-to input", "--method wanda")),
        (("--damping", "search", "--method", "magnitude"), ("--damping search", "magnitude")),
        (("--search", "admm", "--order", "activation"), ("--search admm", "--order activation")),
        (("--resume", "--overwrite"), ("resume", "overwrite")),
    ],
    ids=" ".join,
)
def test_options_that_exclude_each_other_are_both_named_before_the_model_is_read(
    run: Run, tmp_path: Path, options: tuple[str, ...], both: tuple[str, str]
) -> None:
    result = run("sparsify", tmp_path / "nowhere", "-o", tmp_path / "out", *options)
    assert result.exit_code == 2
    got = result.stderr.splitlines()[-3]
    assert got.startswith("got")
    assert all(name in got for name in both), got


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--search", "lottery"), "lottery"),
        (("--fit-to", "moon"), "moon"),
        (("--order", "random"), "random"),
        (("--damping", "much"), "much"),
        (("--damping", "nan"), "nan"),
        (("--recover", "0"), "steps=0"),
        ((*BUDGET[:1], "1", *BUDGET[2:]), "budget of 1"),
        ((*BUDGET[:1], "nan", *BUDGET[2:]), "nan"),
        ((*BUDGET, "--target", "b200"), "b200"),
        ((*BUDGET, "--batch", "0"), "batch 0"),
        ((*BUDGET, "--objective", "joules"), "joules"),
        ((*BUDGET, "--forms", "2of4"), "2of4"),
        ((*BUDGET, "--windows", "1"), "1 windows"),
        (("--plan", "no/such.json"), "no/such.json"),
        (("--recover", "2", "--device", "meta"), "meta"),
    ],
    ids=str,
)
def test_values_that_mean_nothing(
    run: Run, words: tuple[object, ...], tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    result = run(*words, *options)
    assert result.exit_code == 2, result.output
    assert said in result.stderr.splitlines()[-3]
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_an_edited_plan_gives_exactly_its_forms(
    run: Run, run_json: Callable[..., Any], words: tuple[object, ...], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    forms = {
        "model.layers.0.self_attn.q_proj": "2:4+int8",
        "model.layers.0.mlp.down_proj": "6:8",
        "model.layers.1.mlp.up_proj": "dense",
    }
    ModelPlan(forms).write(path)
    report = run_json(*words, "--plan", path)
    sparse = {name: form for name, form in forms.items() if form != "dense"}
    assert stored_forms(tmp_path / "out") == sparse
    # By hand: another form, and a layer that the plan did not name.
    text = path.read_text().replace('"6:8"', '"dense+int4"')
    edited = text.replace(
        '"layers": {', '"layers": {\n    "model.layers.1.self_attn.v_proj": "2:4",'
    )
    path.write_text(edited)
    again = run(*shlex.split(report["command"])[1:], "--overwrite")
    assert again.exit_code == 0, again.output
    assert stored_forms(tmp_path / "out") == {
        "model.layers.0.self_attn.q_proj": "2:4+int8",
        "model.layers.0.mlp.down_proj": "dense+int4:64",
        "model.layers.1.self_attn.v_proj": "2:4",
    }
    assert ModelPlan.read(tmp_path / "out" / "plan.json") == ModelPlan.read(path)
    command = json.loads((tmp_path / "out" / "report.json").read_text())["command"]
    assert f"--plan {path}" in command
    assert "--form " not in command


def test_a_plan_of_another_model_names_the_line(
    run: Run, words: tuple[object, ...], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    ModelPlan({"model.layers.0.mlp.up_proj": "2:4", "model.layers.7.mlp.up_proj": "2:4"}).write(
        path
    )
    line = next(
        number for number, text in enumerate(path.read_text().splitlines(), 1) if ".7." in text
    )
    result = run(*words, "--plan", path)
    assert result.exit_code == 2
    assert f"{path}, line {line}: layer 'model.layers.7.mlp.up_proj'" in result.stderr
    assert "model.layers.1.mlp.up_proj" in result.stderr.splitlines()[-1]


def test_a_form_that_does_not_fit_its_layer_is_refused(
    run: Run, words: tuple[object, ...], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    ModelPlan({"model.layers.0.mlp.up_proj": "2:4", "model.layers.0.mlp.down_proj": "5:7"}).write(
        path
    )
    result = run(*words, "--plan", path)
    assert result.exit_code == 2
    assert "model.layers.0.mlp.down_proj as 5:7: k = 64 is not a multiple of 7" in result.stderr


def test_a_budget_gives_a_checkpoint_with_its_plan_and_front(
    run: Run, run_json: Callable[..., Any], words: tuple[object, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = run_json(*words, *BUDGET)
    budget = report["budget"]
    assert budget["asked"] == 1.05
    assert budget["reached"] <= 1.05
    held_out = budget["held_out"]
    assert (held_out["windows"], held_out["window_tokens"]) == (1, 32)
    ratio = held_out["sparse_perplexity"] / held_out["dense_perplexity"]
    assert budget["reached"] == pytest.approx(ratio)
    assert [row["text"] for row in report["evaluation"]] == ["eval.txt"]
    assert report["calibration"]["windows"] == 5
    plan = ModelPlan.read(out / "plan.json")
    assert plan.predicted["measured_ratio"] == budget["reached"]
    forms = {name: form for name, form in plan.layers.items() if form != "dense"}
    assert stored_forms(out) == forms
    assert report["pareto"]["chosen"]["layers_by_form"] == {
        form: list(plan.layers.values()).count(form) for form in set(plan.layers.values())
    }
    assert "for a budget of 1.05" in (out / "report.html").read_text()
    assert json.loads((out / "report.json").read_text())["pareto"] == report["pareto"]
    assert not (tmp_path / "out.partial").exists()
    assert len(json.loads((tmp_path / "out.costs.json").read_text())["layers"]) == 14
    assert run("verify", out).exit_code == 0
    # The same command again measures nothing anew, and gives the same.
    repeated = run(*shlex.split(report["command"])[1:], "--overwrite", "--no-report")
    assert repeated.exit_code == 0, repeated.output
    assert "sensitivity" not in repeated.stderr
    assert "budget  1.05 times the dense perplexity" in repeated.stdout
    assert json.loads((out / "report.json").read_text())["budget"] == budget


def test_a_budget_that_cannot_be_met_says_the_best(
    run: Run, words: tuple[object, ...], tmp_path: Path
) -> None:
    options = ("--objective", "bytes", "--forms", "unstructured:0.98", "--quality-budget")
    result = run(*words, *options, "1.0000001")
    assert result.exit_code == 2
    got, need, _ = result.stderr.splitlines()[-3:]
    assert "a budget of 1 times the dense perplexity; the best" in got
    assert "need  a budget of at least" in need
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_budget_that_only_the_dense_model_meets_says_why(
    run: Run, words: tuple[object, ...], tmp_path: Path
) -> None:
    options = ("--objective", "time", "--forms", "dense,2:4", "--quality-budget", "1.05")
    result = run(*words, *options)
    assert result.exit_code == 2
    assert "the smallest time within it is that of the dense model" in result.stderr
    assert "--objective floor or bytes" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("line", ["sensitivity 1/2", "plan 1: prune 1/2", "recover 2/12"])
def test_interrupted_in_any_phase_it_resumes_to_the_same_bytes(
    run: Run, words: tuple[object, ...], tmp_path: Path, line: str
) -> None:
    whole = tmp_path / "whole"
    command = (*words, *BUDGET, "--recover", "12")
    told = interrupt(command, line)
    assert not (tmp_path / "out").exists()
    assert "--resume" in told
    result = run(*command, "--resume")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "out.partial").exists()
    uninterrupted = tuple(whole if word == tmp_path / "out" else word for word in command)
    assert run(*uninterrupted).exit_code == 0
    assert same_bytes(tmp_path / "out", whole)
    reports = [json.loads((f / "report.json").read_text()) for f in (tmp_path / "out", whole)]
    for key in ("budget", "evaluation", "pareto"):
        assert reports[0][key] == reports[1][key]
    assert reports[0]["recover"]["curve"] == reports[1]["recover"]["curve"]


def test_recovery_is_reported_and_what_it_reports_is_stored(
    run: Run, run_json: Callable[..., Any], words: tuple[object, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = run_json(*words, "--recover", "4")
    (row,) = report["recover"]["evaluation"]
    assert row["before"]["perplexity"] != row["after"]["perplexity"]
    assert report["evaluation"][0]["sparse"] == row["after"]
    assert [look["step"] for look in report["recover"]["curve"]] == [0, 4]
    assert report["recover"]["seconds"]["training"] >= 0
    assert sorted(path.name for path in out.glob("re*")) == ["report.html", "report.json"]
    assert not (tmp_path / "out.partial").exists()
    found = run_json(
        "evaluate", out, "--text", tmp_path / "eval.txt", "--windows", "2", "--window-tokens", "32"
    )
    assert row["after"]["perplexity"] == pytest.approx(found["texts"][0]["perplexity"], rel=1e-6)
    repeated = run(*shlex.split(report["command"])[1:], "--overwrite", "--no-report")
    assert repeated.exit_code == 0, repeated.output
    assert "recover eval.txt: " in repeated.stdout
    assert json.loads((out / "report.json").read_text())["evaluation"] == report["evaluation"]


def test_recovery_on_its_own_evaluation_text_is_refused_before_pruning(
    run: Run, dense_model: Path, text_file: Path, tmp_path: Path
) -> None:
    same = ("--calibration", text_file, "--eval", text_file)
    result = run("sparsify", dense_model, "-o", tmp_path / "out", *same, *SIZES, "--recover", "2")
    assert result.exit_code == 2
    assert "as evaluation text too" in result.stderr
    assert "prune" not in result.stderr


def test_an_interrupted_run_is_not_continued_as_another(
    run: Run, words: tuple[object, ...], tmp_path: Path
) -> None:
    interrupt((*words, "--recover", "40"), "recover 2/40")
    for other, said in (
        (("--recover", "41", "--resume"), "recover = 40"),
        (("--resume",), "with a quality budget or recovery"),
        (("--recover", "40", "--seed", "1", "--resume"), "recipe"),
        (("--recover", "40"), "holds an interrupted run"),
    ):
        result = run(*words, *other)
        assert result.exit_code == 2
        assert said in result.stderr
    assert (tmp_path / "out.partial" / "pruned" / "config.json").exists()
    result = run(*words, "--overwrite")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "out.partial").exists()


def test_a_plain_run_is_not_continued_with_recovery(
    run: Run, words: tuple[object, ...], tmp_path: Path
) -> None:
    interrupt(words, "prune 1/2")
    result = run(*words, "--recover", "2", "--resume")
    assert result.exit_code == 2
    assert "without a quality budget or recovery" in result.stderr


def test_costs_of_something_else_are_measured_again_only_when_told(
    run: Run, words: tuple[object, ...], tmp_path: Path
) -> None:
    assert run(*words, *BUDGET, "--no-report").exit_code == 0
    other = run(*words[:3], tmp_path / "out", *words[4:], *BUDGET, "--seed", "3", "--overwrite")
    assert other.exit_code == 0, other.output
    assert "sensitivity 2/2" in other.stderr
    (tmp_path / "moved").mkdir()
    (tmp_path / "out").rename(tmp_path / "moved" / "out")
    refused = run(*words, *BUDGET)
    assert refused.exit_code == 2
    assert "out.costs.json was measured with" in refused.stderr
    assert "delete out.costs.json" in refused.stderr
