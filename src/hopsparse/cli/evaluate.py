"""`hopsparse evaluate`: how good a model is on texts, alone or against the dense one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from .console import bytes_text, print_json, seconds_text, stderr, stdout
from .options import command
from .sparsify import progress_shown

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.evaluate import Comparison, Quality
    from ..models.opened import OpenedModel
    from ..models.options import ProgressCallback
    from ..models.text import Text

DTYPES = ("float32", "bfloat16", "float16")
MODEL_HELP = "HF folder (dense or sparse), .gguf file, or smollm2-135m."


class Judging(Protocol):
    """The options that `evaluate` and `compare` share."""

    @property
    def text(self) -> list[Path] | None:
        """Text files; the bundled ones if None."""

    @property
    def windows(self) -> int:
        """Most windows of each text."""

    @property
    def window_tokens(self) -> int:
        """Tokens a window."""

    @property
    def device(self) -> str:
        """Where models run."""

    @property
    def dtype(self) -> str:
        """Of the arithmetic."""


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


class Bench:
    """Opens models and runs them over the texts that the options name."""

    def __init__(self, options: Judging, progress: ProgressCallback) -> None:
        self._options = options
        self._progress = progress
        self._texts = _read_texts(options)
        self._opened: dict[str, OpenedModel] = {}

    def open(self, name: str) -> OpenedModel:
        """Load a model; one that was named before is there already."""
        import torch

        from ..models.opened import open_model

        key = str(Path(name).resolve()) if Path(name).exists() else name
        if key not in self._opened:
            stderr().print(f"reading {name}", markup=False)
            dtype = getattr(torch, self._options.dtype)
            self._opened[key] = open_model(name, device=self._options.device, dtype=dtype)
        return self._opened[key]

    def evaluate(self, model: OpenedModel) -> dict[str, Quality]:
        """The quality on each text."""
        from ..models.evaluate import evaluate

        told = self._told(self._windows(model))
        return {name: evaluate(model.model, each) for name, each in told}

    def compare(self, a: OpenedModel, b: OpenedModel) -> dict[str, Comparison]:
        """Both models on each text."""
        from ..models.evaluate import compare
        from ..models.opened import check_alike

        check_alike(a, b, self._texts)
        self._windows(b)  # Its context may be the shorter one.
        told = self._told(self._windows(a))
        return {name: compare(a.model, b.model, each) for name, each in told}

    def _windows(self, model: OpenedModel) -> dict[str, list[Tensor]]:
        count, tokens = self._options.windows, self._options.window_tokens
        return {text.name: model.windows(text, count, tokens) for text in self._texts}

    def _told(self, texts: dict[str, list[Tensor]]) -> Iterator[tuple[str, Iterator[Tensor]]]:
        """Each text with its windows, which tell of their end when the next is asked for."""
        from ..models.options import StepClock

        total = sum(len(windows) for windows in texts.values())
        clock = StepClock("evaluate", total, self._progress)

        def told(name: str) -> Iterator[Tensor]:
            for window in texts[name]:
                yield window
                clock.step(name)

        for name in texts:
            yield name, told(name)


@contextmanager
def judging(options: Judging) -> Iterator[Bench]:
    """A bench whose progress is shown; options that mean nothing are refused first."""
    from ..errors import ArgumentError

    for name, least in (("windows", 1), ("window_tokens", 2)):
        value = getattr(options, name)
        if value < least:
            raise ArgumentError(f"{name} = {value}", need=f"at least {least}", hint=f"{least}")
    if options.dtype not in DTYPES:
        raise ArgumentError(
            f"dtype {options.dtype!r}", need="one of " + ", ".join(DTYPES), hint="float32"
        )
    with progress_shown() as progress:
        yield Bench(options, progress)


def settings_json(options: Judging) -> dict[str, Any]:
    """What makes numbers of two runs comparable."""
    return {
        "windows": options.windows,
        "window_tokens": options.window_tokens,
        "device": options.device,
        "dtype": options.dtype,
    }


def quality_json(quality: Quality) -> dict[str, Any]:
    """One model on one text; what overflows is null."""
    return {
        "windows": len(quality.window_nll),
        "tokens": quality.tokens,
        "perplexity": _finite(quality.perplexity),
        "nll": _finite(quality.mean_nll),
        "nll_standard_error": quality.standard_error,
    }


def comparison_json(text: str, found: Comparison) -> dict[str, Any]:
    """Two models on one text."""
    return {
        "text": text,
        "reference": quality_json(found.a),
        "model": quality_json(found.b),
        "ratio": _finite(found.ratio.value),
        "ratio_low": found.ratio.low,
        "ratio_high": found.ratio.high,
        "agreement": found.agreement,
        "kl": _finite(found.kl),
        "kl_standard_error": found.b.kl_standard_error,
    }


def print_comparison(rows: list[dict[str, Any]], reference: str, model: str) -> None:
    """A table of two models, a text a row."""
    console = stdout()
    console.print(f"{model} against {reference}\n", markup=False, soft_wrap=True)
    table = _table("text", "windows", "reference ppl", "ppl", "ratio (95 %)", "top-1", "KL, nats")
    for row in rows:
        low, high = row["ratio_low"], row["ratio_high"]
        sure = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
        error = row["kl_standard_error"]
        table.add_row(
            row["text"],
            str(row["model"]["windows"]),
            _perplexity_text(row["reference"]),
            _perplexity_text(row["model"]),
            _number(row["ratio"], ".3f") + sure,
            f"{100 * row['agreement']:.1f} %",
            _number(row["kl"], ".4f") + ("" if error is None else f" ± {error:.4f}"),
        )
    console.print(table)
    console.print(
        "\n± is one standard error over windows; the interval of the ratio is of paired windows."
    )


def _print_alone(report: dict[str, Any]) -> None:
    console, model = stdout(), report["model"]
    console.print(
        f"{model['name']}: {model['kind']}, {bytes_text(model['bytes'])}\n",
        markup=False,
        soft_wrap=True,
    )
    table = _table("text", "windows", "tokens", "perplexity", "nll, nats a token")
    for row in report["texts"]:
        error = row["nll_standard_error"]
        table.add_row(
            row["text"],
            str(row["windows"]),
            f"{row['tokens']:,}",
            _perplexity_text(row),
            _number(row["nll"], ".4f") + ("" if error is None else f" ± {error:.4f}"),
        )
    console.print(table)
    console.print(f"\n± is one standard error over windows; {seconds_text(report['seconds'])}")


def _print_tasks(model: str, found: dict[str, dict[str, float]]) -> None:
    console = stdout()
    console.print(f"\ntasks of {model}", markup=False, soft_wrap=True)
    table = _table("task", "metric", "value", "±")
    for task, metrics in found.items():
        for metric, value in metrics.items():
            if "_stderr" in metric:
                continue
            error = metrics.get(metric.replace(",", "_stderr,", 1))
            shown = "" if error is None else f"{error:.4f}"
            table.add_row(task, metric, f"{value:.4f}", shown)
    console.print(table)


def _read_texts(options: Judging) -> list[Text]:
    from ..errors import ArgumentError
    from ..models.text import HELD_OUT, bundled_text, read_text

    if not options.text:
        return [bundled_text(name) for name in HELD_OUT]
    texts = [read_text(path) for path in options.text]
    names = [text.name for text in texts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(
            f"two texts called {twice[0]!r}", need="names that differ", hint="rename one file"
        )
    return texts


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


def _table(first: str, *others: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _perplexity_text(row: dict[str, Any]) -> str:
    value, error = row["perplexity"], row["nll_standard_error"]
    if value is None:
        return "infinite"
    return f"{value:.3f}" + ("" if error is None else f" ± {value * error:.3f}")


def _number(value: float | None, how: str) -> str:
    return "infinite" if value is None else format(value, how)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


EVALUATE = command(Evaluate, run, name="evaluate")
