"""`hopsparse generate`: text from a model, as it comes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from .console import print_json, stderr
from .judging import MODEL_HELP, check_float_dtype
from .options import command


@dataclass(frozen=True)
class Generate:
    """Options of `hopsparse generate`."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
    prompt: Annotated[str, typer.Option(help="What the text starts with.")]
    max_new_tokens: Annotated[int, typer.Option(help="It ends there, if not before.")] = 64
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; above, tokens are drawn.")
    ] = 0.0
    top_k: Annotated[int, typer.Option(help="Draw from so many of the likeliest; 0: all.")] = 0
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0
    fuse: Annotated[
        bool,
        typer.Option("--fuse/--no-fuse", help="One product for layers that share their inputs."),
    ] = True
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu"
    dtype: Annotated[str, typer.Option(help="Of the arithmetic: float32, bfloat16 or float16.")] = (
        "float32"
    )
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False


def run(options: Generate) -> None:
    """Write what follows a prompt, as it comes; times and the number of tokens go to stderr."""
    import torch

    from ..models.generate import Generator, Sampling, prompt_ids
    from ..models.opened import open_model

    check_float_dtype(options.dtype)
    sampling = Sampling(options.temperature, options.top_k, options.seed)
    opened = open_model(options.model, device=options.device, dtype=getattr(torch, options.dtype))
    ids = prompt_ids(opened, options.prompt)
    writer = Generator(opened, len(ids) + max(1, options.max_new_tokens), options.fuse)
    pieces, first, started = [], None, time.monotonic()
    found = writer.text(options.prompt, max_new_tokens=options.max_new_tokens, sampling=sampling)
    show = _silent if options.json else _shown
    show(options.prompt)
    for piece in found:
        if first is None:
            first = time.monotonic() - started, writer.written
        pieces.append(piece)
        show(piece)
    text = "".join(pieces)
    report = {
        "model": opened.name,
        "prompt": options.prompt,
        "text": text,
        "prompt_tokens": len(ids),
        "new_tokens": writer.written,
        "first_s": round(first[0], 3) if first else None,
        "first_tokens": first[1] if first else 0,
        "seconds": round(time.monotonic() - started, 3),
        "fused_layers": len(writer.fused.fused) if writer.fused else 0,
        "left": writer.fused.left if writer.fused else {},
    }
    if options.json:
        print_json(report)
    else:
        _shown("\n")
        _tell(report)


def _shown(text: str) -> None:
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # A terminal that is not of UTF-8.
        sys.stdout.write(text.encode("ascii", "replace").decode())
    sys.stdout.flush()


def _silent(text: str) -> None:
    """For --json, which prints all of it at the end."""


def _tell(report: dict[str, Any]) -> None:
    rest = report["seconds"] - (report["first_s"] or 0)
    later = report["new_tokens"] - report["first_tokens"]
    rate = f"{later / rest:.1f} a second after that, " if rest > 0 and later else ""
    first = "" if report["first_s"] is None else f"text after {report['first_s']:.2f} s, "
    stderr().print(
        f"{report['new_tokens']} tokens, {first}{rate}{report['fused_layers']} layers fused",
        soft_wrap=True,
    )


GENERATE = command(Generate, run, name="generate")
