"""Budgets on a model that has learned something, so that pruning costs it something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import hopsparse
from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.models._stream import BlockStream
from hopsparse.models.evaluate import evaluate
from hopsparse.models.options import Progress, SparsifyOptions
from hopsparse.models.quality_budget import QualityBudget
from hopsparse.models.sensitivity import split_windows
from hopsparse.models.staged import plan_and_sparsify, sparsify_and_recover
from hopsparse.models.text import random_windows, read_text
from hopsparse.plan import ModelPlan
from hopsparse.prune import Recipe
from tests.helpers.tiny_llama import write_taught_llama

FORMS = ("dense", "2:4", "1:4", "unstructured:0.9")
# What this budget takes under this recipe: two plans that cost too much, and a third that does not.
RECIPE = Recipe(fit_to="layer")
BUDGET = QualityBudget(1.5, objective="bytes", forms=FORMS)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that knows the calibration text."""
    return write_taught_llama(tmp_path_factory.mktemp("taught"))


@pytest.fixture
def options(dense: Path) -> SparsifyOptions:
    return SparsifyOptions(
        calibration=dense.parent / "text.txt",
        evaluate=dense.parent / "eval.txt",
        windows=10,
        window_tokens=32,
        eval_windows=2,
        samples=False,
    )


def held_out_windows(dense: Path, options: SparsifyOptions) -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(dense)
    assert options.calibration is not None
    text = read_text(options.calibration)
    drawn = random_windows(text, tokenizer, options.windows, options.window_tokens, 0)
    return split_windows(drawn)[1]


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def stop_at(phase: str, done: int) -> Callable[[Progress], None]:
    def told(step: Progress) -> None:
        if (step.phase, step.done) == (phase, done):
            raise KeyboardInterrupt

    return told


def test_plans_are_corrected_until_one_is_within_the_budget(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    """What the report says was reached is what the checkpoint has, on windows it did not see."""
    report = plan_and_sparsify(str(dense), tmp_path / "out", RECIPE, BUDGET, options=options)
    reached = [each["reached"] for each in report["budget"]["rounds"]]
    assert len(reached) == 3
    assert reached[0] > 1.5
    assert reached[1] > 1.5
    assert report["budget"]["reached"] == reached[2] <= 1.5
    assert [each["kept"] for each in report["budget"]["rounds"]] == [False, False, True]
    plan = ModelPlan.read(tmp_path / "out" / "plan.json").layers
    shares = report["budget"]["rounds"][2]["layers_by_form"]
    assert shares == {form: list(plan.values()).count(form) for form in set(plan.values())}
    windows = held_out_windows(dense, options)
    before = LlamaForCausalLM.from_pretrained(dense, dtype=torch.float32)
    after = hopsparse.load(tmp_path / "out", dtype=torch.float32)
    ratio = evaluate(after, windows).perplexity / evaluate(before, windows).perplexity
    assert ratio == pytest.approx(reached[2], rel=1e-4)
    assert ModelPlan.read(tmp_path / "out" / "plan.json").predicted["measured_ratio"] == reached[2]
    assert report["pareto"]["scale"] == report["budget"]["scale"] != 1
    assert not (tmp_path / "out.partial").exists()


def test_the_best_of_the_plans_that_met_the_budget_is_kept(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    """Of two plans one is within 1.1, by sums whose roundings decide which: it is the result."""
    budget = replace(BUDGET, ratio=1.1)
    report = plan_and_sparsify(str(dense), tmp_path / "out", Recipe(), budget, options=options)
    reached = [each["reached"] for each in report["budget"]["rounds"]]
    (met,) = [ratio for ratio in reached if ratio <= 1.1]
    assert len(reached) == 2
    assert report["budget"]["reached"] == met


def test_evaluation_texts_decide_nothing(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Words that are neither here nor there, in any number. " * 20)
    first = plan_and_sparsify(str(dense), tmp_path / "a", RECIPE, BUDGET, options=options)
    judged = replace(options, evaluate=other)
    second = plan_and_sparsify(str(dense), tmp_path / "b", RECIPE, BUDGET, options=judged)
    assert first["evaluation"] != second["evaluation"]
    assert first["budget"] == second["budget"]
    assert shards(tmp_path / "a") == shards(tmp_path / "b")


def test_the_dense_model_is_run_once(
    dense: Path, options: SparsifyOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[int] = []
    run = BlockStream.run

    def counted(self: BlockStream, *args: Any) -> Any:
        known.append(len(args[-1]))
        return run(self, *args)

    monkeypatch.setattr(BlockStream, "run", counted)
    plan_and_sparsify(str(dense), tmp_path / "out", RECIPE, BUDGET, options=options)
    # Two held-out and two evaluation windows, from the first plan on.
    assert known == [0, 4, 4]


def test_a_plan_that_was_measured_is_not_built_again(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    whole = plan_and_sparsify(str(dense), tmp_path / "whole", RECIPE, BUDGET, options=options)
    with pytest.raises(KeyboardInterrupt):
        plan_and_sparsify(
            str(dense),
            tmp_path / "out",
            RECIPE,
            BUDGET,
            options=options,
            progress=stop_at("plan 3: prune", 1),
        )
    # Plans that were over the budget can never become the result.
    left = sorted(path.name for path in (tmp_path / "out.partial").glob("plan-*"))
    assert left == ["plan-3.partial"]
    phases: list[str] = []
    again = plan_and_sparsify(
        str(dense),
        tmp_path / "out",
        RECIPE,
        BUDGET,
        options=replace(options, resume=True),
        progress=lambda step: phases.append(step.phase),
    )
    assert {phase for phase in phases if phase.endswith("prune")} == {"plan 3: prune"}
    assert again["budget"] == whole["budget"]
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")


def test_a_budget_below_every_form_says_the_best_that_was_built(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    budget = replace(BUDGET, ratio=1.02, forms=("1:4", "unstructured:0.9"))
    with pytest.raises(UnsupportedError, match=r"the best (of|that)") as caught:
        plan_and_sparsify(str(dense), tmp_path / "out", Recipe(), budget, options=options)
    assert caught.value.need.startswith("a budget of at least")
    assert not (tmp_path / "out.partial").exists()


def test_recovery_wins_back_what_pruning_cost(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    chosen = replace(options, samples=True)
    report = sparsify_and_recover(
        str(dense), tmp_path / "out", Recipe("1:4", method="magnitude"), 100, options=chosen
    )
    curve = report["recover"]["curve"]
    assert curve[-1]["held_out_loss"] < 0.9 * curve[0]["held_out_loss"]
    assert len(report["samples"]) == 3
    assert all(row["sparse"] != row["dense"] for row in report["samples"])
    windows = held_out_windows(dense, options)
    pruned = tmp_path / "pruned"
    plain = hopsparse.sparsify_checkpoint(
        str(dense), pruned, Recipe("1:4", method="magnitude"), options=options
    )
    # Evaluation rows say the same with and without recovery.
    (row,), (own,), (recovered,) = (
        found["evaluation"] for found in (plain, report["recover"], report)
    )
    assert recovered.keys() == row.keys()
    assert own["before"].keys() == recovered["sparse"].keys() == row["sparse"].keys()
    # One has its logits from a run block by block, the other from hidden states that were kept:
    # the same float32 sums in another order, and their exponential.
    assert own["before"] == pytest.approx(row["sparse"], rel=1e-5)
    assert recovered["sparse"] == own["after"]
    before, after = (hopsparse.load(f, dtype=torch.float32) for f in (pruned, tmp_path / "out"))
    assert evaluate(after, windows).perplexity < 0.9 * evaluate(before, windows).perplexity


def test_kept_layers_stay_dense_under_a_budget(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    report = plan_and_sparsify(
        str(dense), tmp_path / "out", Recipe(keep=("*.0.*",)), BUDGET, options=options
    )
    assert all(".1." in row["name"] for row in report["layers"])
    assert "--keep '*.0.*'" in report["command"]


def test_a_plan_and_a_budget_are_refused(options: SparsifyOptions, tmp_path: Path) -> None:
    both = replace(options, plan=tmp_path / "plan.json")
    with pytest.raises(ArgumentError, match="a quality budget with the plan"):
        plan_and_sparsify("nowhere", tmp_path / "out", RECIPE, BUDGET, options=both)
