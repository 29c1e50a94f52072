"""`hopsparse sparsify`: a dense model in, a sparse checkpoint and its report out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from .console import bytes_text, print_json, seconds_text, stderr, stdout, time_text
from .options import INTERRUPTED_EXIT, command

if TYPE_CHECKING:
    from ..models.options import Progress, ProgressCallback
    from ..report import Predicted

REPORT_PAGE = "report.html"


@dataclass(frozen=True)
class Sparsify:
    """Options of `hopsparse sparsify`; the recipe first, then texts, then how to run."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="HF folder, .gguf file, or smollm2-135m.")
    ]
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="Folder to make.")]
    pattern: Annotated[
        str, typer.Option(help="N:M, unstructured:F or block:RxC[:F]; F is the part made zero.")
    ] = "2:4"
    quant: Annotated[
        str | None,
        typer.Option(metavar="SCHEME", help="Round kept weights: int8, fp8, int4:64, fp8/int4."),
    ] = None
    form: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB=FORM",
            help="Another form for layers by full name: dense, 6:8, 2:4+int8, dense+fp8; "
            "repeatable, the first that matches counts.",
        ),
    ] = None
    method: Annotated[str, typer.Option(help="magnitude, wanda or sparsegpt.")] = "sparsegpt"
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Layers to keep dense, by full name; repeatable."),
    ] = None
    seed: Annotated[int, typer.Option(help="Draws the calibration windows.")] = 0
    damping: Annotated[
        float, typer.Option(help="SparseGPT: added to the Hessian's diagonal, as part of its mean.")
    ] = 0.01
    refit: Annotated[
        int, typer.Option(help="SparseGPT: steps that refit the kept weights; 0 is the paper's.")
    ] = 10
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to calibrate on; a bundled one if left out."),
    ] = None
    evaluate: Annotated[
        Path | None,
        typer.Option(
            "--eval", metavar="FILE", help="Text to evaluate on; two bundled ones if left out."
        ),
    ] = None
    windows: Annotated[int, typer.Option(help="Calibration windows.")] = 24
    window_tokens: Annotated[int, typer.Option(help="Tokens a window.")] = 512
    eval_windows: Annotated[int, typer.Option(help="Windows of each evaluation text.")] = 8
    samples: Annotated[bool, typer.Option(help="Generate short samples with both models.")] = True
    device: Annotated[str, typer.Option(help="Where blocks are run and pruned.")] = "cpu"
    report: Annotated[bool, typer.Option(help=f"Write OUT/{REPORT_PAGE}.")] = True
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that hopsparse wrote.")
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead.")] = False


def run(options: Sparsify) -> None:
    """Prune a model, write a sparse checkpoint, and show quality, size and predicted speed."""
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


def _prepare_and_sparsify(options: Sparsify) -> dict[str, Any]:
    from ..prune import Recipe

    # What can be refused is refused before torch and the model are loaded.
    if options.report:
        from ..report import check_extras

        check_extras()
    recipe = Recipe(
        pattern=options.pattern,
        method=options.method,
        scheme=options.quant,
        forms=dict(_glob_and_form(text) for text in options.form or ()),
        keep=tuple(options.keep or ()),
        seed=options.seed,
        damping=options.damping,
        refit=options.refit,
    )
    from ..models.load import check_device

    check_device(options.device)
    return _sparsify(options, recipe)


def _glob_and_form(text: str) -> tuple[str, str]:
    glob, equals, form = text.rpartition("=")
    if not (equals and glob):
        raise ArgumentError(
            f"--form {text!r}", need="GLOB=FORM", hint="--form '*.down_proj=6:8+int8'"
        )
    return glob, form


def _sparsify(options: Sparsify, recipe: Any) -> dict[str, Any]:
    from ..models.checkpoint import CheckpointWriter
    from ..models.options import SparsifyOptions
    from ..models.sparsify import sparsify_checkpoint

    settings = SparsifyOptions(
        calibration=options.calibration,
        evaluate=options.evaluate,
        windows=options.windows,
        window_tokens=options.window_tokens,
        eval_windows=options.eval_windows,
        samples=options.samples,
        device=options.device,
        resume=options.resume,
        overwrite=options.overwrite,
    )
    # Made and not entered, it only looks whether OUT can be written: before the model is read.
    CheckpointWriter(options.out, overwrite=options.overwrite, resume=options.resume)
    with progress_shown() as progress:
        return sparsify_checkpoint(
            options.model, options.out, recipe, options=settings, progress=progress
        )


def _print_interrupted(options: Sparsify) -> None:
    console = stderr()
    partial = options.out.parent / (options.out.name + ".partial")
    if not partial.exists():
        console.print("Interrupted; nothing was written.")
        return
    words = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
    console.print(f"Interrupted. {options.out} was not written; finished blocks are in {partial}.")
    console.print("To continue:", markup=False)
    console.print(f"  hopsparse {shlex.join([*words, '--resume'])}", markup=False, soft_wrap=True)


@contextmanager
def progress_shown() -> Iterator[ProgressCallback]:
    """Show progress on standard error: a live bar on a terminal, one line a step elsewhere."""
    console = stderr()
    if not console.is_terminal:
        yield lambda step: console.print(progress_line(step), markup=False)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.fields[phase]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("[dim]{task.description}"),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("reading", phase="read", left="", total=None)

        def show(step: Progress) -> None:
            left = "" if step.seconds_left is None else f"{seconds_text(step.seconds_left)} left"
            bars.update(
                task,
                completed=step.done,
                total=step.total,
                description=step.label,
                phase=step.phase,
                left=left,
            )

        yield show


def progress_line(step: Progress) -> str:
    """One step as a line of a log."""
    left = "" if step.seconds_left is None else f", {seconds_text(step.seconds_left)} left"
    return f"{step.phase} {step.done}/{step.total} {step.label}{left}"


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


SPARSIFY = command(Sparsify, run, name="sparsify")
