"""SmolLM2-135M within a quality budget: what `--quality-budget` builds, and its anchors.

    PYTHONPATH=src python benchmarks/quality/plans.py --budget 1.1 1.5 --work plans --out r.jsonl

Costs are measured once, on calibration text alone; every budget is then planned, built, measured on
held-out calibration windows and corrected. Anchors are looked at when a checkpoint is finished.
Prints and appends one JSON row a budget, and keeps checkpoints and costs in the folder --work.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anchors
import texts
import torch

import hopsparse
from hopsparse.models.options import Progress, SparsifyOptions
from hopsparse.models.quality_budget import QualityBudget, costs_path
from hopsparse.models.sensitivity import (
    DEFAULT_FORMS,
    SensitivityOptions,
    check_forms,
    measure_sensitivity,
)
from hopsparse.prune import Recipe

MODEL = "smollm2-135m"
CHARACTERS = 295_000  # of each text: all of the shorter one's calibration part


def main() -> None:
    """Measure costs, then make one checkpoint a budget."""
    options = _options()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    calibration = options.work / "calibration.txt"
    calibration.write_text(texts.book()[:CHARACTERS] + texts.topics()[:CHARACTERS])
    forms = check_forms(options.forms.split(","))
    began = time.perf_counter()
    settings = SensitivityOptions(
        calibration=calibration,
        windows=options.windows,
        additive=options.fast,
        device=options.device,
    )
    costs, recipe = options.work / "costs.json", Recipe(search=options.search)
    measure_sensitivity(MODEL, recipe, forms, options=settings, path=costs, progress=_tell)
    measured = round(time.perf_counter() - began, 1)
    for ratio in options.budget:
        row = {"suite": "quality_plans", "sensitivity_seconds": measured}
        row |= _build(ratio, forms, recipe, calibration, options)
        print(json.dumps({k: v for k, v in row.items() if k != "pareto"}), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _build(
    ratio: float, forms: tuple[str, ...], recipe: Recipe, calibration: Path, options: Any
) -> dict[str, Any]:
    """Make the checkpoint of one budget, and say what became of every kind of layer."""
    budget = QualityBudget(
        ratio, objective=options.objective, forms=forms, additive=options.fast, batch=options.batch
    )
    out = options.work / f"budget-{ratio:g}-{options.objective}"
    shutil.copyfile(options.work / "costs.json", costs_path(out))
    settings = SparsifyOptions(
        calibration=calibration,
        windows=options.windows,
        samples=False,
        device=options.device,
        overwrite=True,
    )
    report = hopsparse.plan_and_sparsify(
        MODEL,
        out,
        recipe,
        budget,
        options=settings,
        recover_steps=options.recover,
        progress=_tell,
    )
    plan = json.loads((out / "plan.json").read_text())
    kinds: dict[str, Counter[str]] = {}
    for name, form in plan["layers"].items():
        kinds.setdefault(name.rpartition(".")[2], Counter())[form] += 1
    facts = {
        "budget": ratio,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "windows": options.windows,
        "recover": options.recover,
        "recipe": recipe.to_json(),
        "forms": {kind: dict(counts.most_common()) for kind, counts in kinds.items()},
        "plan": plan,
        "held_out": report["budget"],
        "pareto": report["pareto"],
        "seconds": report["seconds"],
        "bytes": report["bytes"],
    }
    return facts | _anchors(out, options.device)


def _anchors(folder: Path, device: str) -> dict[str, float]:
    """Perplexity of the checkpoint, and of the dense model, on every text."""
    dense, tokenizer = anchors.load_model()
    windows = anchors.evaluation_windows(tokenizer, ("anchors", "heldout", "other"), device)
    before = anchors.evaluate(dense.to(device), windows)
    after = anchors.evaluate(hopsparse.load(folder, device=device, dtype=torch.float32), windows)
    known = {f"ppl_{name}_dense": round(before[name][0], 3) for name in windows}
    return known | anchors.quality_columns(after, before)


def _tell(step: Progress) -> None:
    left = "" if step.seconds_left is None else f", {step.seconds_left:.0f} s left"
    print(f"{step.phase} {step.done}/{step.total} {step.label}{left}", file=sys.stderr, flush=True)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, nargs="+", default=[1.10, 1.5])
    parser.add_argument("--objective", default="floor", choices=["time", "floor", "bytes"])
    parser.add_argument("--forms", default=",".join(DEFAULT_FORMS))
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--batch", type=int, default=1, help="sequences decoded at once")
    parser.add_argument("--windows", type=int, default=64, help="every 5th is held out")
    parser.add_argument("--search", default="greedy")
    parser.add_argument("--recover", type=int, default=0, help="training steps behind the plan")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
