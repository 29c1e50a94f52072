"""`hopsparse compare`: what a model lost against another, on the same texts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import bytes_text, print_json, stdout
from .judging import MODEL_HELP, comparison_json, judging, print_comparison, settings_json
from .options import command

if TYPE_CHECKING:
    from ..models.opened import OpenedModel


@dataclass(frozen=True)
class Compare:
    """Options of `hopsparse compare`."""

    a: Annotated[str, typer.Argument(metavar="A", help="The reference. " + MODEL_HELP)]
    b: Annotated[str, typer.Argument(metavar="B", help="What is compared with it.")]
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="UTF-8 text; repeatable; two bundled ones if left out."),
    ] = None
    windows: Annotated[int, typer.Option(help="Most windows of each text.")] = 16
    window_tokens: Annotated[int, typer.Option(help="Tokens a window.")] = 512
    device: Annotated[str, typer.Option(help="Where models run.")] = "cpu"
    dtype: Annotated[str, typer.Option(help="Of the arithmetic: float32, bfloat16 or float16.")] = (
        "float32"
    )
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: Compare) -> None:
    """Compare B with A: perplexity, ratio with interval, agreement, KL, bytes and forms."""
    started = time.monotonic()
    with judging(options) as bench:
        a, b = bench.open(options.a), bench.open(options.b)
        compared = bench.compare(a, b)
    rows = [comparison_json(name, found) for name, found in compared.items()]
    if options.json:
        print_json(
            {
                "a": a.to_json(),
                "b": b.to_json(),
                **settings_json(options),
                "texts": rows,
                "seconds": round(time.monotonic() - started, 1),
            }
        )
        return
    print_comparison(rows, a.name, b.name)
    console = stdout()
    console.print(f"\nbytes   {bytes_text(a.nbytes)} -> {bytes_text(b.nbytes)}")
    for opened in (a, b):
        console.print(f"{opened.name}: {_layers_text(opened)}", markup=False, soft_wrap=True)


def _layers_text(opened: OpenedModel) -> str:
    if opened.kind == "dense":
        return "dense"
    forms = [f"{count} x {form}" for form, count in opened.forms.items()]
    return ", ".join([*forms, f"{opened.kept_dense} kept dense"])


COMPARE = command(Compare, run, name="compare")
