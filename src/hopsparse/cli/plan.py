"""`hopsparse plan`: which form each layer gets under a quality budget."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import bytes_text, print_json, stderr, stdout, time_text
from .options import INTERRUPTED_EXIT, command
from .progress import progress_shown

if TYPE_CHECKING:
    from ..models.budget import Problem
    from ..models.pareto import Pareto, ParetoPoint
    from ..models.sensitivity import Sensitivity
    from ..plan import ModelPlan


@dataclass(frozen=True)
class Plan:
    """Options of `hopsparse plan`; what for, then what from, then how to run."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="HF folder, .gguf file, or smollm2-135m.")
    ]
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Plan to write, JSON.")]
    quality_budget: Annotated[
        float, typer.Option(help="Allowed perplexity, as a multiple of the dense model's.")
    ] = 1.05
    target: Annotated[str, typer.Option(help="GPU to plan for: h200 or h100.")] = "h200"
    batch: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 1
    context: Annotated[int, typer.Option(help="Tokens in the cache of each.")] = 2048
    objective: Annotated[
        str,
        typer.Option(
            help="What is made small: time (predicted), floor (what no kernel can be faster than) "
            "or bytes (stored weights)."
        ),
    ] = "time"
    forms: Annotated[
        str | None,
        typer.Option(metavar="FORM,...", help="Forms to choose from; 20 if left out."),
    ] = None
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Add up costs of pattern and scheme instead of measuring."),
    ] = False
    scale: Annotated[float, typer.Option(help="Log-perplexity increase a nat of summed cost.")] = (
        1.0
    )
    method: Annotated[str, typer.Option(help="magnitude, wanda or sparsegpt.")] = "sparsegpt"
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Layers to keep dense, by full name; repeatable."),
    ] = None
    seed: Annotated[int, typer.Option(help="Draws the calibration windows.")] = 0
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to calibrate on; a bundled one if left out."),
    ] = None
    windows: Annotated[int, typer.Option(help="Windows drawn; every 5th is held out.")] = 24
    window_tokens: Annotated[int, typer.Option(help="Tokens a window.")] = 512
    device: Annotated[str, typer.Option(help="Where blocks are run and pruned.")] = "cpu"
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot to write, .png or .svg.")
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the plan that is at FILE.")
    ] = False
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Measure again what an earlier run measured.")
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False

    @property
    def costs(self) -> Path:
        """Where measured costs are kept, next to the plan."""
        return self.out.with_name(f"{self.out.stem}.costs.json")


def run(options: Plan) -> None:
    """Measure what each form costs each layer, and find the fastest plan within a budget.

    Nothing is built: perplexity and speed are predicted. Costs are kept next to the plan, so that
    another budget, target or objective is solved at once.
    """
    _check_early(options)
    try:
        sensitivity = _measure(options)
    except KeyboardInterrupt:
        kept = f"; what is measured is in {options.costs}" if options.costs.exists() else ""
        told = f"Interrupted{kept}. The same command goes on."
        stderr().print(told, markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED_EXIT) from None
    from ..models.budget import solve_within
    from ..models.pareto import pareto_of
    from ..report.pareto import save_pareto

    problem = _problem(options, sensitivity)
    plan, solution = solve_within(problem, options.quality_budget, options.scale)
    pareto = pareto_of(problem, solution, scale=options.scale, budget=options.quality_budget)
    plan.write(options.out)
    if options.plot:
        save_pareto(pareto, options.plot)
    if options.json:
        print_json(_document(options, plan, pareto, sensitivity))
    else:
        _print(options, plan, pareto, sensitivity)


def _check_early(options: Plan) -> None:
    """What can be refused is refused before the model is read."""
    from ..errors import CheckpointError
    from ..plan import ModelPlan

    ModelPlan(
        {},
        target=options.target,
        batch=options.batch,
        context=options.context,
        objective=options.objective,
        budget=options.quality_budget,
    )
    if options.out.exists() and not options.overwrite:
        raise CheckpointError(
            f"{options.out} exists, and may have been edited",
            need="a new name, or leave to replace it",
            hint="--overwrite; measured costs are kept",
        )
    for path in (options.out, options.plot):
        if path is not None and not path.parent.is_dir():
            raise CheckpointError(
                f"{path.parent} is no folder",
                need="an existing folder",
                hint=f"mkdir {path.parent}",
            )
    if options.plot:
        from ..report import check_extras
        from ..report.pareto import check_plot_name

        check_plot_name(options.plot)
        check_extras()


def _measure(options: Plan) -> Sensitivity:
    from ..models.load import check_device
    from ..models.sensitivity import DEFAULT_FORMS, SensitivityOptions, measure_sensitivity
    from ..prune import Recipe

    check_device(options.device)
    settings = SensitivityOptions(
        calibration=options.calibration,
        windows=options.windows,
        window_tokens=options.window_tokens,
        additive=options.fast,
        device=options.device,
        remeasure=options.remeasure,
    )
    recipe = Recipe(method=options.method, keep=tuple(options.keep or ()), seed=options.seed)
    with progress_shown() as progress:
        return measure_sensitivity(
            options.model,
            recipe,
            options.forms.split(",") if options.forms is not None else DEFAULT_FORMS,
            options=settings,
            path=options.costs,
            progress=progress,
        )


def _problem(options: Plan, sensitivity: Sensitivity) -> Problem:
    from ..measure import Workload
    from ..models.budget import Problem
    from ..plan import target

    return Problem(
        sensitivity,
        Workload(options.batch, options.context),
        target(options.target),
        options.objective,
        options.model,
    )


def _document(
    options: Plan, plan: ModelPlan, pareto: Pareto, sensitivity: Sensitivity
) -> dict[str, Any]:
    return {
        "out": str(options.out),
        "costs": str(options.costs),
        "plot": str(options.plot) if options.plot else None,
        "plan": plan.to_json(),
        "pareto": pareto.to_json(),
        "notes": sensitivity.notes,
        "kept_dense": dict(sensitivity.kept_dense),
    }


def _print(options: Plan, plan: ModelPlan, pareto: Pareto, sensitivity: Sensitivity) -> None:
    from rich.table import Table

    console = stdout()
    head = f"{options.model} on {plan.target.upper()}, batch {plan.batch:,}"
    console.print(f"{head}, context {plan.context:,}: predicted, not measured", markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("plan")
    step = "floor" if plan.objective == "floor" else "step"
    for title in ("perplexity", _GAINS[plan.objective], step, "weights"):
        table.add_column(title, justify="right")
    table.add_column("layers", overflow="fold")
    for point in pareto.milestones():
        table.add_row("front", *_cells(point, plan.objective))
    for point in pareto.uniform:
        table.add_row(f"all {point.label}", *_cells(point, plan.objective)[:-1])
    assert pareto.chosen is not None
    title = f"[bold]budget {options.quality_budget:g}[/bold]"
    table.add_row(title, *_cells(pareto.chosen, plan.objective))
    console.print(table)
    console.print(f"\n{_summary(plan.predicted)}", markup=False)
    by_note: dict[str, list[str]] = {}
    for name, note in sensitivity.notes.items():
        by_note.setdefault(note, []).append(name)
    for note, names in by_note.items():
        whose = names[0] if len(names) == 1 else f"{len(names)} layers"
        console.print(f"note    {whose}: {note}", markup=False, soft_wrap=True)
    for label, path in (("plan", options.out), ("costs", options.costs), ("plot", options.plot)):
        if path is not None:
            console.print(f"{label:<7} {path}", markup=False, soft_wrap=True)
    words = ["hopsparse", "sparsify", options.model, "-o", "OUT", "--plan", str(options.out)]
    console.print(f"next    {shlex.join(words)}", markup=False, soft_wrap=True)


_GAINS = {"time": "speed", "floor": "floor speed", "bytes": "smaller"}


def _cells(point: ParetoPoint, objective: str) -> list[str]:
    from ..models.pareto import share_text

    step = "" if objective == "bytes" else time_text(point.value)
    ratio = f"{point.ratio:.3f}x" if point.ratio < 1000 else "> 1000x"
    weights = bytes_text(point.weight_bytes)
    return [ratio, f"{point.gain:.2f}x", step, weights, share_text(point.shares)]


def _summary(predicted: Mapping[str, float]) -> str:
    return (
        f"step {time_text(predicted['dense_time_us'])} -> {time_text(predicted['time_us'])} "
        f"({predicted['speedup']:.2f}x); floor {time_text(predicted['dense_floor_us'])} -> "
        f"{time_text(predicted['floor_us'])} ({predicted['floor_speedup']:.2f}x); at most "
        f"{100 * predicted['gap_to_bound']:.2f} % above the best of these forms"
    )


PLAN = command(Plan, run, name="plan")
