"""`hopsparse sparsify`: a dense model in, a sparse checkpoint and its report out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .console import bytes_text, print_json, seconds_text, stdout, time_text
from .options import INTERRUPTED_EXIT, REPORT_PAGE, command
from .progress import print_interrupted, progress_shown
from .sparsify_options import Sparsify

if TYPE_CHECKING:
    from rich.console import Console

    from ..models.options import SparsifyOptions
    from ..models.quality_budget import QualityBudget
    from ..prune import Recipe
    from ..report import Predicted


def run(options: Sparsify) -> None:
    """Prune a model, write a sparse checkpoint, and show quality, size and predicted speed.

    With --quality-budget the form of each layer is searched for, built and measured; with
    --recover kept weights are then trained. Ctrl-C and --resume work in every phase.
    """
    try:
        report = _prepare_and_sparsify(options)
    except KeyboardInterrupt:
        _print_interrupted(options)
        raise typer.Exit(INTERRUPTED_EXIT) from None
    from ..report import predict_layers, write_report

    predicted = predict_layers(report["layers"])
    page = write_report(report, options.out / REPORT_PAGE) if options.report else None
    if options.json:
        paths = {"out": str(options.out), "report": str(page) if page else None}
        print_json({**report, "predicted": predicted.to_json(), **paths})
    else:
        repeat = report["command"] + ("" if options.report else " --no-report")
        _print({**report, "command": repeat}, predicted, page)
        if "recover" not in report:
            _print_next(options)


def _prepare_and_sparsify(options: Sparsify) -> dict[str, Any]:
    # What can be refused is refused before the model is loaded.
    options.check_together()
    if options.report:
        from ..report import check_extras

        check_extras()
    recipe, budget, settings = options.recipe(), options.budget(), options.settings()
    if options.recover is not None:
        from ..recover import RecoverOptions

        RecoverOptions(steps=options.recover)
    from ..models.load import check_device

    check_device(options.device)
    return _sparsify(options, recipe, budget, settings)


def _sparsify(
    options: Sparsify, recipe: Recipe, budget: QualityBudget | None, settings: SparsifyOptions
) -> dict[str, Any]:
    from ..models.checkpoint import CheckpointWriter, StagedWriter
    from ..models.sparsify import sparsify_checkpoint
    from ..models.staged import plan_and_sparsify, sparsify_and_recover

    model, out, steps = options.model, options.out, options.recover
    # Made and not entered, a writer only looks whether OUT can be written: before the model is
    # read.
    if budget is None and steps is None:
        CheckpointWriter(out, overwrite=options.overwrite, resume=options.resume)
    else:
        StagedWriter(out, {}, overwrite=options.overwrite, resume=options.resume)
    with progress_shown() as progress:
        if budget is not None:
            return plan_and_sparsify(
                model,
                out,
                recipe,
                budget,
                options=settings,
                recover_steps=steps or 0,
                progress=progress,
            )
        if steps is not None:
            return sparsify_and_recover(
                model, out, recipe, steps, options=settings, progress=progress
            )
        return sparsify_checkpoint(model, out, recipe, options=settings, progress=progress)


def _print_interrupted(options: Sparsify) -> None:
    from ..models.checkpoint import partial_of
    from ..models.quality_budget import costs_path

    costs, partial = costs_path(options.out), partial_of(options.out)
    kept = None
    if partial.exists():
        kept = f"finished blocks are in {partial}"
    elif options.quality_budget is not None and costs.exists():
        kept = f"what is measured is in {costs}"
    print_interrupted(options.out, kept)


def _print(report: dict[str, Any], predicted: Predicted, page: Path | None) -> None:
    from rich.table import Table

    console = stdout()
    style: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 3, 0, 0)}
    if report["evaluation"]:
        quality = Table(**style)
        quality.add_column("text")
        for title in ("dense ppl", "sparse ppl", "ratio", "top-1 agreement"):
            quality.add_column(title, justify="right")
        for row in report["evaluation"]:
            dense, sparse = row["dense"]["perplexity"], row["sparse"]["perplexity"]
            quality.add_row(
                row["text"],
                f"{dense:.2f}",
                f"{sparse:.2f}",
                f"{sparse / dense:.2f}",
                f"{100 * row['sparse']['agreement']:.1f} %",
            )
        console.print(quality)
    _print_phases(console, report)
    stored = report["bytes"]
    console.print(f"\nbytes   {bytes_text(stored['dense'])} -> {bytes_text(stored['sparse'])}")
    times = Table(**style)
    for title in ("tokens", "dense", "sparse or dense", "gain", "layers run sparse"):
        times.add_column(title, justify="right")
    for total in predicted.totals:
        times.add_row(
            f"{total.tokens:,}",
            time_text(total.dense_us),
            time_text(total.chosen_us),
            f"{total.speedup:.2f}x",
            f"{total.sparse_layers} of {total.layers}",
        )
    name = predicted.target.name.upper()
    console.print(f"\nPredicted {name} time of these layers (not measured)")
    console.print(times)
    for note in predicted.notes:
        console.print(f"  {note}", markup=False)
    if page:
        console.print(f"\nreport  {page}", markup=False, soft_wrap=True)
    console.print(f"repeat  {report['command']}", markup=False, soft_wrap=True)


def _print_next(options: Sparsify) -> None:
    better = options.out.with_name(f"{options.out.name}-recovered")
    words = ["hopsparse", "recover", str(options.out), "-o", str(better)]
    line = shlex.join([*words, "--teacher", options.model, "--steps", "200"])
    stdout().print(f"next    {line}", markup=False, soft_wrap=True)


def _print_phases(console: Console, report: dict[str, Any]) -> None:
    """What became of the budget, and what recovery won."""
    if budget := report.get("budget"):
        windows, plans = budget["held_out"]["windows"], len(budget["rounds"])
        console.print(
            f"\nbudget  {budget['asked']:g} times the dense perplexity; reached "
            f"{budget['reached']:.3f} times on {windows} held-out windows; "
            f"{plans} {'plan' if plans == 1 else 'plans'} built"
        )
    if recover := report.get("recover"):
        console.print()
        seconds = seconds_text(recover["seconds"]["training"])
        for row in recover["evaluation"]:
            before, after = row["before"]["perplexity"], row["after"]["perplexity"]
            console.print(
                f"recover {row['text']}: {before:.2f} -> {after:.2f} in {recover['steps']} steps, "
                f"{seconds}",
                markup=False,
            )


SPARSIFY = command(Sparsify, run, name="sparsify")
