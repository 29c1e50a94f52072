"""`hopsparse compile`: kernels compiled ahead of their first call; it needs no GPU."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from ..units import duration_text
from .console import bytes_text, print_error, print_json, stderr, stdout
from .options import FAILED_EXIT, command

if TYPE_CHECKING:
    from ..compiler import Built, KernelCache
    from ..plan import KernelSpec


@dataclass(frozen=True)
class Compile:
    """Options of `hopsparse compile`."""

    op: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Kernels of this operator; repeatable.")
    ] = None
    all: Annotated[bool, typer.Option("--all", help="Kernels of every operator.")] = False
    workers: Annotated[
        int, typer.Option(min=0, help="Kernels compiled at a time; 0 is one a processor.")
    ] = 0
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: Compile) -> None:
    """Compile kernels into the cache, so that no later call has to; exit 1 if one fails."""
    from ..compiler import KernelCache, nvrtc_version

    specs = _chosen(options)
    cache, nvrtc, started = KernelCache.default(), nvrtc_version(), time.monotonic()
    built = _compiled(cache, specs, options.workers)
    seconds = time.monotonic() - started
    if options.json:
        print_json(
            {
                "cache": str(cache.folder),
                "nvrtc": nvrtc,
                "seconds": round(seconds, 3),
                "kernels": [_facts(each) for each in built],
            }
        )
    else:
        _print(built)
        cached = sum(each.was_cached for each in built)
        told = f"{len(built)} kernels in {duration_text(seconds)}, {cached} of them cached"
        held = f"{len(cache.entries())} kernels, {bytes_text(cache.size_bytes())}"
        stdout().print(f"{told}; NVRTC {nvrtc}", markup=False, soft_wrap=True)
        stdout().print(f"cache {cache.folder}: {held}", markup=False, soft_wrap=True)
    if any(each.error for each in built):
        raise typer.Exit(FAILED_EXIT)


def _chosen(options: Compile) -> list[KernelSpec]:
    from ..ops.plans import every_spec, plans

    known = list(plans())
    wanted = known if options.all else list(dict.fromkeys(options.op or []))
    if bool(options.op) == options.all:
        raise ArgumentError(
            "--op and --all together" if options.all else "no operator",
            need="--op NAME or --all",
            hint="--all",
        )
    for op in wanted:
        if op not in known:
            names = ", ".join(known) or "none yet"
            raise ArgumentError(f"operator {op!r}", need=f"one with kernels: {names}", hint="--all")
    return [spec for op in wanted for spec in every_spec(op)]


def _compiled(cache: KernelCache, specs: list[KernelSpec], workers: int) -> list[Built]:
    """Compile all, and say how far it is; Ctrl-C lets those end that have begun."""
    from ..models.options import Progress
    from .progress import progress_shown

    started = time.monotonic()
    done: dict[KernelSpec, Built] = {}
    try:
        with closing(cache.compile_all(specs, workers)) as running, progress_shown() as show:
            for built in running:
                done[built.spec] = built
                left = (time.monotonic() - started) / len(done) * (len(specs) - len(done))
                label = f"{built.spec.op}/{built.spec.name}"
                show(Progress("compile", len(done), len(specs), label, left))
    except KeyboardInterrupt:
        told = f"{len(done)} of {len(specs)} kernels were ready and stay in {cache.folder}."
        stderr().print(told, markup=False, soft_wrap=True)
        raise
    return [done[spec] for spec in specs]


def _facts(built: Built) -> dict[str, Any]:
    """One kernel as JSON values."""
    from .options import error_json

    spec, cubin = built.spec, built.cubin
    facts: dict[str, Any] = {
        "op": spec.op,
        "name": spec.name,
        "threads": spec.threads,
        "smem_bytes": spec.smem_bytes,
        "cached": built.was_cached,
        "error": error_json(built.error) if built.error else None,
    }
    if cubin is not None:
        for name in ("registers", "stack_bytes", "spill_bytes", "static_smem_bytes", "advice"):
            facts[name] = getattr(cubin, name)
        facts["compile_ms"] = round(cubin.compile_ms, 1)
        facts["cubin_bytes"] = len(cubin.image)
    return facts


def _print(all_built: list[Built]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("kernel", "registers", "shared memory", "spills", "compiled in", ""):
        numeric = title not in ("kernel", "")
        table.add_column(title, justify="right" if numeric else "left", no_wrap=numeric)
    for built in all_built:
        spec, cubin = built.spec, built.cubin
        name = escape(f"{spec.op}/{spec.name}")
        if cubin is None:
            table.add_row(name, "", "", "", "", "[red]does not compile[/red]")
            continue
        table.add_row(
            name,
            f"{cubin.registers} x {spec.threads}",
            bytes_text(spec.smem_bytes + cubin.static_smem_bytes),
            bytes_text(cubin.spill_bytes) if cubin.spill_bytes else "none",
            f"{cubin.compile_ms:.0f} ms",
            "cached" if built.was_cached else "",
        )
    stdout().print(table)
    for built in all_built:
        if built.error is not None:
            print_error(built.error)


COMPILE = command(Compile, run, name="compile")
