"""`hopsparse bench model`: tokens per second of whole models, ours and as users run them today."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from .console import bytes_text, print_json, stderr, stdout
from .judging import results_table
from .options import command

if TYPE_CHECKING:
    from torch import nn

    from ..models.throughput import Found, Phase

_FIRST = "dense, compiled"  # what others are compared with, where it ran


@dataclass(frozen=True)
class BenchModel:
    """Options of `hopsparse bench model`."""

    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Dense HF folder, .gguf file, or smollm2-135m."),
    ] = None
    config: Annotated[
        str | None,
        typer.Option(help="Random weights instead: llama-3-8b, qwen3-8b or smollm2-135m."),
    ] = None
    ways: Annotated[
        str | None, typer.Option(metavar="NAME;NAME", help="How it runs; all if left out.")
    ] = None
    prefill: Annotated[
        str, typer.Option(metavar="NxN,NxN", help="Batches of prompts; empty for none.")
    ] = "1x2048,8x2048"
    decode: Annotated[
        str, typer.Option(metavar="NxN,NxN", help="Batches behind a context; empty for none.")
    ] = "1x512,8x512,64x512"
    rounds: Annotated[int, typer.Option(help="Timed runs of each; the median counts.")] = 10
    seconds: Annotated[
        float | None, typer.Option(help="What begins later is left out, and says so.")
    ] = None
    layers: Annotated[
        int | None, typer.Option(help="With --config: so many blocks, for a quick look.")
    ] = None
    device: Annotated[str, typer.Option(help="Where it runs.")] = "cuda"
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Append rows, as JSON lines.")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: BenchModel) -> None:
    """Time prefill and decode of a whole model: dense, dense fp8, PyTorch's 2:4, and ours."""
    import torch

    from ..measure.record import append, check_can_append, environment
    from ..models.contenders import ways_named
    from ..models.load import check_device
    from ..models.throughput import race

    started = time.monotonic()
    if (options.model is None) == (options.config is None):
        both = "both MODEL and --config" if options.model else "neither MODEL nor --config"
        raise ArgumentError(both, need="one of them", hint="--config llama-3-8b")
    if options.rounds < 1:
        raise ArgumentError(f"--rounds {options.rounds}", need="at least 1", hint="--rounds 10")
    if options.layers is not None and (options.layers < 1 or options.config is None):
        what = f"--layers {options.layers}" + ("" if options.config else " with a MODEL")
        raise ArgumentError(what, need="1 and more, with --config", hint="--layers 4")
    if options.seconds is not None and not options.seconds > 0:
        raise ArgumentError(f"--seconds {options.seconds}", need="above 0", hint="--seconds 120")
    ways, phases = ways_named(options.ways), _phases(options)
    device = torch.device(check_device(options.device))
    if options.out is not None:
        check_can_append(options.out)
    facts: dict[str, Any] = environment(device) if device.type == "cuda" else {"device": "cpu"}
    facts["model"] = options.config or options.model
    if options.layers is not None:
        facts["model"] = f"{options.config}, {options.layers} layers"
    found: list[Found] = []
    total = len(ways) * len(phases)
    limits: dict[str, Any] = {"rounds": options.rounds, "seconds": options.seconds}
    for each in race(_maker(options, device), ways, phases, **limits):
        found.append(each)
        elapsed = time.monotonic() - started
        left = elapsed / len(found) * (total - len(found))
        stderr().print(
            f"{len(found)}/{total} {each.way}: {each.phase}, about {left:.0f} s left", markup=False
        )
        if options.out is not None:
            append(options.out, asdict(each) | facts)
    if options.json:
        seconds = round(time.monotonic() - started, 1)
        rows = [asdict(each) for each in found]
        print_json({"environment": facts, "rows": rows, "seconds": seconds})
    else:
        _print(found, str(facts["model"]))


def _maker(options: BenchModel, device: Any) -> Callable[[], nn.Module]:
    import torch

    if options.config is not None:
        from ..models.contenders import CONFIGS, random_model

        config = options.config
        if config not in CONFIGS:
            known, like = ", ".join(CONFIGS), "--config llama-3-8b"
            raise ArgumentError(f"--config {config}", need=f"one of {known}", hint=like)

        def random() -> nn.Module:
            torch.manual_seed(0)
            return random_model(config, device=device, layers=options.layers)

        return random
    from ..models.opened import open_model

    model = str(options.model)

    def opened() -> nn.Module:
        network = open_model(model, device=str(device), dtype=torch.bfloat16).model
        return network.requires_grad_(False)

    return opened


def _phases(options: BenchModel) -> list[Phase]:
    from ..models.throughput import Phase

    found = []
    for kind in ("prefill", "decode"):
        for text in filter(None, getattr(options, kind).split(",")):
            sizes = text.strip().split("x")
            if len(sizes) != 2 or not all(re.fullmatch("[0-9]{1,9}", size) for size in sizes):
                raise ArgumentError(
                    f"--{kind} {text.strip()!r}", need="BATCHxTOKENS", hint=f"--{kind} 8x512"
                )
            found.append(Phase(kind, *map(int, sizes)))
    if not found:
        raise ArgumentError("nothing to time", need="a prefill or a decode", hint="--decode 8x512")
    return found


def _print(found: list[Found], model: str) -> None:
    console = stdout()
    console.print(f"{model}, bfloat16 but for what a way says\n", markup=False)
    first = {each.phase: each.ms for each in found if each.way == _FIRST and not each.error}
    table = results_table("phase", "way", "ms", "tokens/s", f"x {_FIRST}", "memory", "W")
    for each in sorted(found, key=lambda each: [other.phase for other in found].index(each.phase)):
        if each.error:
            table.add_row(each.phase, each.way, "none", "", "", "", "")
            continue
        ratio = f"{first[each.phase] / each.ms:.2f}" if each.phase in first else ""
        watts = "" if each.watts is None else f"{each.watts:.0f}"
        memory = bytes_text(each.memory_bytes) if each.memory_bytes else ""
        speed = f"{each.tokens_per_s:,.0f}"
        table.add_row(each.phase, each.way, f"{each.ms:.2f}", speed, ratio, memory, watts)
    console.print(table)
    for each in filter(lambda each: each.error, found):
        # In a cell, a long one would leave no room for numbers.
        console.print(f"{each.phase}, {each.way}: {each.error}", markup=False, soft_wrap=True)


BENCH_MODEL = command(BenchModel, run, name="model")
