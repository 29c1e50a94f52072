"""Models on texts, as `evaluate` and `compare` run them and show what they found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .console import stderr, stdout
from .progress import progress_shown

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


def check_float_dtype(name: str) -> None:
    """Refuse a dtype that no model computes in."""
    from ..errors import ArgumentError

    if name not in DTYPES:
        raise ArgumentError(f"dtype {name!r}", need="one of " + ", ".join(DTYPES), hint="float32")


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
    check_float_dtype(options.dtype)
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
    table = results_table(
        "text", "windows", "reference ppl", "ppl", "ratio (95 %)", "top-1", "KL, nats"
    )
    for row in rows:
        low, high = row["ratio_low"], row["ratio_high"]
        sure = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
        error = row["kl_standard_error"]
        table.add_row(
            row["text"],
            str(row["model"]["windows"]),
            perplexity_text(row["reference"]),
            perplexity_text(row["model"]),
            number_text(row["ratio"], ".3f") + sure,
            f"{100 * row['agreement']:.1f} %",
            number_text(row["kl"], ".4f") + ("" if error is None else f" ± {error:.4f}"),
        )
    console.print(table)
    console.print(
        "\n± is one standard error over windows; the interval of the ratio is of paired windows."
    )


def results_table(first: str, *others: str) -> Any:
    """An empty table; columns but the first are numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def perplexity_text(row: dict[str, Any]) -> str:
    """The perplexity in what `quality_json` made, with its standard error."""
    value, error = row["perplexity"], row["nll_standard_error"]
    if value is None:
        return "infinite"
    return f"{value:.3f}" + ("" if error is None else f" ± {value * error:.3f}")


def number_text(value: float | None, how: str) -> str:
    """A number as JSON holds it, where null is what overflowed."""
    return "infinite" if value is None else format(value, how)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
