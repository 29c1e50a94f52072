"""A plan within a quality budget, found by building plans and measuring them on held-out text."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, CheckpointError, UnsupportedError
from ..measure import Workload
from ..plan import ModelPlan, target
from ..prune import Activations
from ._files import read_json, write_json
from ._prune_job import PLAN_NAME, REPORT_NAME, Job
from .budget import Outcome, Problem, Round, meet_budget, solve_within
from .options import Progress, ProgressCallback
from .pareto import Pareto, pareto_of
from .sensitivity import (
    DEFAULT_FORMS,
    Sensitivity,
    SensitivityOptions,
    check_forms,
    measure_sensitivity,
    split_windows,
)

#: Name of the held-out windows among the texts of a trial.
HELD_OUT = "held-out calibration"
_ROUNDS_NAME = "rounds.json"


@dataclass(frozen=True)
class QualityBudget:
    """How much quality a plan may cost, and what it is to gain for that.

    Attributes:
        ratio: Allowed perplexity, as a multiple of the dense model's; above 1.
        target: Name of the GPU to plan for.
        batch: Sequences decoded at once.
        context: Tokens in the cache of each.
        objective: What is made small: `time`, `floor` or `bytes` (docs/plan.md).
        forms: Forms to choose from, as text.
        additive: Add up costs of patterns and schemes instead of measuring both together.

    Raises:
        ArgumentError: A value that cannot mean anything.

    Example:
        >>> QualityBudget(1.05, objective="bytes", forms=("dense", "2:4+int4")).forms
        ('dense', '2:4+int4:64')
    """

    ratio: float
    target: str = "h200"
    batch: int = 1
    context: int = 2048
    objective: str = "time"
    forms: tuple[str, ...] = DEFAULT_FORMS
    additive: bool = False

    def __post_init__(self) -> None:
        facts = {"batch": self.batch, "context": self.context, "objective": self.objective}
        ModelPlan({}, target=self.target, budget=self.ratio, **facts)  # type: ignore[arg-type]
        if self.ratio <= 1:
            raise ArgumentError(
                f"a quality budget of {self.ratio:g}",
                need="perplexity as a multiple of the dense model's, above 1",
                hint="1.05",
            )
        object.__setattr__(self, "forms", check_forms(self.forms))

    def command_words(self) -> list[str]:
        """The options of `hopsparse sparsify` that say the same."""
        words = ["--quality-budget", repr(self.ratio), "--target", self.target]
        words += ["--batch", str(self.batch), "--context", str(self.context)]
        words += ["--objective", self.objective]
        if self.forms != DEFAULT_FORMS:
            words += ["--forms", ",".join(self.forms)]
        return [*words, "--fast"] if self.additive else words

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"forms": list(self.forms)}

    def problem(self, sensitivity: Sensitivity, model: str) -> Problem:
        """What a solver is given."""
        workload = Workload(self.batch, self.context)
        return Problem(sensitivity, workload, target(self.target), self.objective, model)


def costs_path(out: Path | str) -> Path:
    """Where costs measured for the checkpoint `out` are kept: beside it, for other budgets.

    Example:
        >>> print(costs_path("models/small"))
        models/small.costs.json
    """
    return Path(out).with_name(f"{Path(out).name}.costs.json")


class Search:
    """Looks for the best plan within a budget: measures, solves, builds and corrects.

    Args:
        model: As the user named it.
        job: The model, opened; the forms of its recipe are not used.
        budget: The budget.
        out: The checkpoint that is made in the end.
        folder: Where plans are built; what an earlier run built there is taken over.
        progress: Called after each step.
    """

    def __init__(
        self,
        model: str,
        job: Job,
        budget: QualityBudget,
        out: Path,
        folder: Path,
        progress: ProgressCallback,
    ) -> None:
        self._model, self._budget, self._out = model, budget, out
        self._folder, self._progress = folder, progress
        # A trial is a run of its own: it continues what it finds, and its samples nobody sees.
        inner = replace(job.options, samples=False, resume=True, overwrite=False)
        kept, self._held_out = split_windows(job.texts.calibration)
        evaluation = {HELD_OUT: self._held_out} | job.texts.evaluation
        texts = replace(job.texts, calibration=kept, evaluation=evaluation)
        self._overwrite = job.options.overwrite
        self._job = replace(job, texts=texts, options=inner)
        self._dense = Activations()
        self._built: list[dict[str, Any]] = []
        path = folder / _ROUNDS_NAME
        self._earlier: list[dict[str, Any]] = (
            read_json(path).get("rounds", []) if path.exists() else []
        )

    def run(self) -> tuple[Path, dict[str, Any]]:
        """The folder of the best plan's checkpoint, and the report that belongs into it.

        Raises:
            UnsupportedError: No plan but the dense model is within the budget.
            CheckpointError: The measured costs beside the checkpoint are of something else.
        """
        problem = self._budget.problem(self._measure(), self._model)
        outcome = meet_budget(problem, self._build, self._budget.ratio)
        row = next((r for r in self._built if r["layers"] == dict(outcome.plan.layers)), None)
        if row is None:
            raise _nothing_gained(self._budget, outcome)
        folder = self._folder / row["folder"]
        outcome.plan.write(folder / PLAN_NAME)
        report = read_json(folder / REPORT_NAME)
        report["evaluation"] = [each for each in report["evaluation"] if each["text"] != HELD_OUT]
        report["pareto"] = _pareto(problem, outcome, self._budget.ratio).to_json()
        report["budget"] = self._summary(row, outcome)
        return folder, report

    def _measure(self) -> Sensitivity:
        options = self._job.options
        path = costs_path(self._out)
        settings = SensitivityOptions(
            calibration=options.calibration,
            windows=options.windows,
            window_tokens=options.window_tokens,
            additive=self._budget.additive,
            device=options.device,
        )

        def measured(settings: SensitivityOptions) -> Sensitivity:
            recipe, forms = self._job.recipe, self._budget.forms
            return measure_sensitivity(
                self._model, recipe, forms, options=settings, path=path, progress=self._progress
            )

        try:
            return measured(settings)
        except CheckpointError as error:
            if "--remeasure" not in error.hint:
                raise
            if self._overwrite:
                return measured(replace(settings, remeasure=True))
            hint = f"--overwrite to measure again, another -o, or delete {path.name}"
            raise CheckpointError(error.got, need=error.need, hint=hint) from None

    def _build(self, plan: ModelPlan) -> float:
        """Perplexity on held-out windows as a multiple of the dense model's."""
        row = self._known(plan) or self._trial(plan)
        self._built.append(row)
        write_json(self._folder / _ROUNDS_NAME, {"rounds": self._built})
        ratio = math.inf if row["ratio"] is None else float(row["ratio"])
        if ratio > self._budget.ratio:
            # It can never become the result.
            shutil.rmtree(self._folder / row["folder"], ignore_errors=True)
        return ratio

    def _known(self, plan: ModelPlan) -> dict[str, Any] | None:
        """What an interrupted run measured of this plan."""
        index = len(self._built)
        row = self._earlier[index] if index < len(self._earlier) else None
        return row if row is not None and row["layers"] == dict(plan.layers) else None

    def _trial(self, plan: ModelPlan) -> dict[str, Any]:
        name = f"plan-{len(self._built) + 1}"
        folder = self._folder / name

        def told(step: Progress) -> None:
            phase = f"plan {len(self._built) + 1}: {step.phase}"
            self._progress(replace(step, phase=phase))

        if folder.exists():
            # Finished just before an interruption, and not recorded.
            report = read_json(folder / REPORT_NAME)
        else:
            job = self._job.with_forms(plan.forms())
            report = job.run(folder, command="", progress=told, dense=self._dense)
        row = next(each for each in report["evaluation"] if each["text"] == HELD_OUT)
        dense, sparse = row["dense"]["perplexity"], row["sparse"]["perplexity"]
        ratio = sparse / dense
        return {
            "folder": name,
            "layers": dict(plan.layers),
            "ratio": ratio if math.isfinite(ratio) else None,
            "dense": dense,
            "sparse": sparse if math.isfinite(sparse) else None,
        }

    def _summary(self, row: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
        facts = self._budget.to_json()
        del facts["ratio"]
        return facts | {
            "asked": self._budget.ratio,
            "reached": row["ratio"],
            "held_out": {
                "windows": len(self._held_out),
                "window_tokens": self._held_out[0].shape[1],
                "dense_perplexity": row["dense"],
                "sparse_perplexity": row["sparse"],
            },
            "scale": outcome.scale,
            "rounds": [_round_json(each, outcome.plan) for each in outcome.rounds],
        }


def _round_json(each: Round, kept: ModelPlan) -> dict[str, Any]:
    wanted = ("perplexity_ratio", "speedup", "floor_speedup", "weight_bytes", "dense_weight_bytes")
    return {
        "reached": each.ratio if math.isfinite(each.ratio) else None,
        "predicted": {key: each.plan.predicted[key] for key in wanted},
        "cost_nats": each.cost,
        "scale": each.scale,
        "layers_by_form": dict(Counter(each.plan.layers.values())),
        "kept": each.plan.layers == kept.layers,
    }


def _pareto(problem: Problem, outcome: Outcome, budget: float) -> Pareto:
    """The front under the factor that the builds have shown, with the plan that was kept."""
    layers = outcome.plan.layers
    scale = next(each.scale for each in outcome.rounds if each.plan.layers == layers)
    _, solution = solve_within(problem, budget, scale)
    chosen = replace(solution, choice=layers)
    return pareto_of(problem, chosen, scale=outcome.scale, budget=budget)


def _nothing_gained(budget: QualityBudget, outcome: Outcome) -> UnsupportedError:
    built = [each for each in outcome.rounds if set(each.plan.layers.values()) != {"dense"}]
    if built:
        best = min(each.ratio for each in built)
        got = f"of {len(built)} plans that were built the best has {best:.4g}"
        need = f"a budget of at least {best:.4g}"
    else:
        got = f"the smallest {budget.objective} within it is that of the dense model"
        need = "a form that gains something within the budget"
    others = " or ".join(name for name in ("floor", "bytes") if name != budget.objective)
    return UnsupportedError(
        f"a quality budget of {budget.ratio:g} times the dense perplexity: {got}",
        need=need,
        hint=f"a larger budget, more --forms, a larger --batch, or --objective {others}",
    )
