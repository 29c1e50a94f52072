"""Pages about runs that were made: a budget with recovery, low rank that stops early, blocks."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from hopsparse.models.options import SparsifyOptions
from hopsparse.models.quality_budget import QualityBudget
from hopsparse.models.recover import recover_checkpoint
from hopsparse.models.recover_texts import RecoverTexts
from hopsparse.models.sparsify import sparsify_checkpoint
from hopsparse.models.staged import plan_and_sparsify
from hopsparse.prune import Recipe
from hopsparse.recover import RecoverOptions
from hopsparse.report import write_report
from hopsparse.report.figures import TIMES
from tests.helpers.look_at_report import VIEWS, chromium, find_chromium, look
from tests.helpers.tiny_llama import write_taught_llama
from tests.unit.test_report import read

BUDGET = QualityBudget(1.5, objective="bytes", forms=("dense", "2:4", "1:4", "unstructured:0.9"))
RECOVERIES: dict[str, dict[str, Any]] = {
    "blocks": {"level": "layer-wise", "steps": 20, "evaluate_every": 10, "hidden": 1.0},
    # At this rate the loss rises at once.
    "early": {"lora_rank": 4, "steps": 40, "evaluate_every": 5, "patience": 2, "lr": 10.0},
    "blind": {"steps": 2},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint for each run."""
    folder = tmp_path_factory.mktemp("made")
    dense = str(write_taught_llama(folder))
    texts: dict[str, Any] = {
        "calibration": folder / "text.txt",
        "evaluate": folder / "eval.txt",
        "eval_windows": 2,
    }
    options = SparsifyOptions(**texts, windows=10, window_tokens=32, samples=False)
    plan_and_sparsify(
        dense,
        folder / "budget",
        Recipe(fit_to="layer"),
        BUDGET,
        options=options,
        recover_steps=60,
    )
    sparse = folder / "sparse"
    sparsify_checkpoint(dense, sparse, Recipe("1:4", method="magnitude"), options=options)
    for name, changes in RECOVERIES.items():
        recover_checkpoint(
            sparse,
            folder / name,
            teacher=dense,
            options=RecoverOptions(window_tokens=32, **changes),
            texts=RecoverTexts(
                **texts, windows=16, held_out=0 if name == "blind" else 4, eval_tokens=32
            ),
        )
    for name in ("budget", *RECOVERIES):
        write_report(report_of(folder, name), folder / f"{name}.html")
    return folder


def report_of(made: Path, name: str) -> Any:
    return json.loads((made / name / "report.json").read_text())


def words_of(made: Path, name: str) -> str:
    return words(made / f"{name}.html")


def words(page: Path) -> str:
    """What a page says, its cells apart."""
    body = page.read_text(encoding="utf-8").partition("<body>")[2]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_recovery_is_shown(made: Path) -> None:
    report, said = report_of(made, "budget"), words_of(made, "budget")
    recover = report["recover"]
    first, best = recover["curve"][0]["held_out_loss"], recover["best"]
    assert best["held_out_loss"] < first
    for wanted in (
        f"held-out loss {first:.4f} → {best['held_out_loss']:.4f} at step {best['step']}",
        "trained kept weights of the pruned layers",
        "steps 60 ",
        "tokens 7,680: 4 windows of 32 a step",
        "text text.txt, 256 windows, 8 held out",
    ):
        assert wanted in said, wanted
    (row,) = recover["evaluation"]
    before, after = row["before"], row["after"]
    assert f"{before['perplexity']:.2f} {after['perplexity']:.2f}" in said
    assert f"{before['kl']:.3f} → {after['kl']:.3f}" in said
    assert "stopped early" not in said
    assert "low rank" not in said


def test_every_plan_that_was_built_is_shown(made: Path) -> None:
    report, said = report_of(made, "budget"), words_of(made, "budget")
    budget = report["budget"]
    assert len(budget["rounds"]) == 3
    results = ["over", "over", "kept"]
    for number, (each, result) in enumerate(zip(budget["rounds"], results, strict=True), 1):
        predicted = each["predicted"]
        row = f"{number} {predicted['perplexity_ratio']:.3f}{TIMES} {each['reached']:.3f}{TIMES} "
        row += f"{each['scale']:.3g} {predicted['speedup']:.2f}{TIMES}"
        assert row in said, row
        assert re.search(re.escape(row) + rf" \S+ \S+ kB {result}\b", said)
    assert f"all plans together say {budget['scale']:.3g}" in said
    assert f"has {budget['reached']:.3f}{TIMES} on 2 held-out windows, before recovery" in said
    for wanted in ("% unstructured:0.9", f"Asked for at most 1.5{TIMES} the dense perplexity"):
        assert wanted in said, wanted


def test_an_early_stop_and_what_low_rank_costs_are_shown(made: Path) -> None:
    report, said = report_of(made, "early"), words_of(made, "early")
    recover = report["recover"]
    assert recover["stopped_early"]
    assert recover["steps"] < 40
    assert f"steps {recover['steps']} of 40: stopped early, no better in 2 looks" in said
    assert f"tokens {recover['steps'] * 4 * 32:,}: " in said
    assert "trained a product of rank 4 beside each pruned layer" in said
    cost = recover["low_rank"]
    assert f"{cost['bytes'] / 1000:.1f} kB more, and {cost['time_us']:.1f} µs a step" in said
    assert "Plans for the budget" not in said
    assert "hopsparse recover" in said


def test_blocks_are_shown_one_after_another(made: Path) -> None:
    curve, said = report_of(made, "blocks")["recover"]["curve"], words_of(made, "blocks")
    assert "steps 20 for each of 2 blocks" in said
    assert "tokens 5,120: " in said
    for stage in (0, 1):
        losses = [each["held_out_loss"] for each in curve if each["stage"] == stage]
        assert f"{stage} 20 {losses[0]:.4f} {min(losses):.4f}" in said


def test_without_held_out_windows_there_is_no_curve(made: Path) -> None:
    said = words_of(made, "blind")
    assert "No window was kept from training" in said
    assert "tokens 256: " in said
    assert "held-out loss" not in said


@pytest.mark.parametrize("name", ["budget", *RECOVERIES])
def test_pages_stay_self_contained(made: Path, name: str) -> None:
    page = read(made / f"{name}.html")
    assert "script" not in page.tags
    assert [link for link in page.links if not link.startswith(("data:", "#"))] == []
    assert len(page.ids) == len(set(page.ids))
    # Errors and predicted times, and where there is one a curve and a front; wide and narrow.
    assert len(page.paths_in_svg) == {"budget": 8, "blind": 4}.get(name, 6)
    assert min(page.paths_in_svg) > 4


def test_a_loss_that_was_not_finite_leaves_a_gap(made: Path, tmp_path: Path) -> None:
    report = report_of(made, "budget")
    for later in report["recover"]["curve"][1:]:
        later["held_out_loss"] = None
    report["budget"]["rounds"][0]["reached"] = None
    said = words(write_report(report, tmp_path / "page.html"))
    first = report["recover"]["curve"][0]["held_out_loss"]
    assert f"{first:.4f} → {first:.4f} at step 0" in said
    assert "not finite" in said


def test_reports_of_older_versions_have_less(made: Path, tmp_path: Path) -> None:
    report = report_of(made, "budget")
    for each in report["budget"]["rounds"]:
        del each["kept"], each["layers_by_form"]
    for role in ("before", "after"):
        del report["recover"]["evaluation"][0][role]["kl"]
    del report["recover"]["tokens"], report["recover"]["low_rank"]
    del report["evaluation"][0]["sparse"]["kl"]
    said = words(write_report(report, tmp_path / "page.html"))
    assert "KL" not in said
    assert re.search(r"kB within\b", said)


@pytest.mark.skipif(find_chromium() is None, reason="needs a machine with Chromium")
def test_every_view_of_every_page_is_without_fault(made: Path) -> None:
    program = find_chromium()
    assert program is not None
    with chromium(program) as browser:
        browser.attach()
        for name in ("budget", *RECOVERIES):
            faults = {view: look(browser, made / f"{name}.html", view, None) for view in VIEWS}
            assert faults == {view: [] for view in VIEWS}, name
