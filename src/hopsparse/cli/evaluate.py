"""`hopsparse evaluate`: how good a model is on texts, alone or against the dense one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import bytes_text, print_json, seconds_text, stderr, stdout
from .judging import (
    MODEL_HELP,
    comparison_json,
    judging,
    number_text,
    perplexity_text,
    print_comparison,
    quality_json,
    results_table,
    settings_json,
)
from .options import command

if TYPE_CHECKING:
    from ..models.opened import OpenedModel


@dataclass(frozen=True)
class Evaluate:
    """Options of `hopsparse evaluate`."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="UTF-8 text; repeatable; two bundled ones if left out."),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(metavar="DENSE", help="Reference model: adds ratio, agreement and KL."),
    ] = None
    windows: Annotated[int, typer.Option(help="Most windows of each text.")] = 16
    window_tokens: Annotated[int, typer.Option(help="Tokens a window.")] = 512
    device: Annotated[str, typer.Option(help="Where models run.")] = "cpu"
    dtype: Annotated[str, typer.Option(help="Of the arithmetic: float32, bfloat16 or float16.")] = (
        "float32"
    )
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Tasks of lm-evaluation-harness, separated by commas; it fetches their data.",
        ),
    ] = None
    task_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with task files of your own.")
    ] = None
    limit: Annotated[int | None, typer.Option(help="Most examples of each task.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: Evaluate) -> None:
    """Measure perplexity with its standard error; against DENSE also ratio, agreement and KL."""
    started = time.monotonic()
    names = _task_names(options)
    with judging(options) as bench:
        model = bench.open(options.model)
        dense = bench.open(options.against) if options.against else None
        if dense:
            compared = bench.compare(dense, model)
            texts = [comparison_json(name, found) for name, found in compared.items()]
        else:
            qualities = bench.evaluate(model)
            texts = [{"text": name} | quality_json(found) for name, found in qualities.items()]
    tasks = {}
    for opened in (model, *([dense] if dense else [])):
        if names:
            tasks[opened.name] = _run_tasks(opened, names, options)
    report = {
        "model": model.to_json(),
        "against": dense.to_json() if dense else None,
        **settings_json(options),
        "texts": texts,
        "tasks": tasks,
        "seconds": round(time.monotonic() - started, 1),
    }
    if options.json:
        print_json(report)
        return
    if dense:
        print_comparison(report["texts"], dense.name, model.name)
    else:
        _print_alone(report)
    for name, found in tasks.items():
        _print_tasks(name, found)


def _print_alone(report: dict[str, Any]) -> None:
    console, model = stdout(), report["model"]
    console.print(
        f"{model['name']}: {model['kind']}, {bytes_text(model['bytes'])}\n",
        markup=False,
        soft_wrap=True,
    )
    table = results_table("text", "windows", "tokens", "perplexity", "nll, nats a token")
    for row in report["texts"]:
        error = row["nll_standard_error"]
        table.add_row(
            row["text"],
            str(row["windows"]),
            f"{row['tokens']:,}",
            perplexity_text(row),
            number_text(row["nll"], ".4f") + ("" if error is None else f" ± {error:.4f}"),
        )
    console.print(table)
    console.print(f"\n± is one standard error over windows; {seconds_text(report['seconds'])}")


def _print_tasks(model: str, found: dict[str, dict[str, float]]) -> None:
    console = stdout()
    console.print(f"\ntasks of {model}", markup=False, soft_wrap=True)
    table = results_table("task", "metric", "value", "±")
    for task, metrics in found.items():
        for metric, value in metrics.items():
            if "_stderr" in metric:
                continue
            error = metrics.get(metric.replace(",", "_stderr,", 1))
            shown = "" if error is None else f"{error:.4f}"
            table.add_row(task, metric, f"{value:.4f}", shown)
    console.print(table)


def _task_names(options: Evaluate) -> list[str]:
    """The tasks asked for, looked up before a model is loaded."""
    names = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
    if names:
        from ..models.lm_eval import check_tasks

        check_tasks(names, task_path=options.task_path, limit=options.limit)
    return names


def _run_tasks(
    opened: OpenedModel, names: list[str], options: Evaluate
) -> dict[str, dict[str, float]]:
    from ..models.lm_eval import run_tasks

    stderr().print(f"tasks of {opened.name}: {', '.join(names)}", markup=False)
    return run_tasks(
        opened.model, opened.tokenizer, names, task_path=options.task_path, limit=options.limit
    )


EVALUATE = command(Evaluate, run, name="evaluate")
