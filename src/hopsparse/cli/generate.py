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

    from ..models.generate import Generator, Sampling
    from ..models.opened import open_model

    check_float_dtype(options.dtype)
    sampling = Sampling(options.temperature, options.top_k, options.seed)
    opened = open_model(options.model, device=options.device, dtype=getattr(torch, options.dtype))
    ids: list[int] = opened.tokenizer(options.prompt)["input_ids"]
    writer = Generator(opened, len(ids) + max(1, options.max_new_tokens), options.fuse)
    if not options.json:
        sys.stdout.write(options.prompt)
    pieces, times, started = [], [], time.monotonic()
    found = writer.text(options.prompt, max_new_tokens=options.max_new_tokens, sampling=sampling)
    for piece in found:
        times.append(time.monotonic() - started)
        pieces.append(piece)
        if not options.json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    text = "".join(pieces)
    report = {
        "model": opened.name,
        "prompt": options.prompt,
        "text": text,
        "prompt_tokens": len(ids),
        "new_tokens": writer.written,
        "first_s": round(times[0], 3) if times else None,
        "seconds": round(time.monotonic() - started, 3),
        "fused_layers": len(writer.fused.fused) if writer.fused else 0,
        "left": writer.fused.left if writer.fused else {},
    }
    if options.json:
        print_json(report)
    else:
        sys.stdout.write("\n")
        _tell(report)


def _tell(report: dict[str, Any]) -> None:
    rest = report["seconds"] - (report["first_s"] or 0)
    rate = f"{(report['new_tokens'] - 1) / rest:.1f} a second after that, " if rest > 0 else ""
    first = "" if report["first_s"] is None else f"text after {report['first_s']:.2f} s, "
    stderr().print(
        f"{report['new_tokens']} tokens, {first}{rate}{report['fused_layers']} layers fused",
        soft_wrap=True,
    )


GENERATE = command(Generate, run, name="generate")
