"""`hopsparse bench`: what a 2:4 layer takes on this GPU, beside the dense one and cuSPARSELt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from .console import print_json, stderr, stdout
from .options import FAILED_EXIT, command
from .problems import shape_of, tokens_of

if TYPE_CHECKING:
    from ..measure.contest import Way
    from ..measure.suite import Problem

Row = dict[str, Any]

_TOKENS = "1,16,256"
_OURS = "hopsparse"


@dataclass(frozen=True)
class Bench:
    """Options of `hopsparse bench`."""

    shape: Annotated[
        list[str] | None, typer.Option(metavar="OUTxK", help="Layer to time; repeatable.")
    ] = None
    suite: Annotated[
        str | None, typer.Option(help="Named layers instead: anchors, llama-3-8b, ..., llm.")
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(metavar="N,N", help=f"Rows of x; {_TOKENS}, or those of the suite."),
    ] = None
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float16; bfloat16, or those of the suite.")
    ] = None
    rounds: Annotated[int, typer.Option(help="Samples of each time.")] = 25
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Append rows, as JSON lines.")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: Bench) -> None:
    """Time 2:4 layers side by side with dense ones; exit 1 if a result of ours is wrong."""
    from ..measure.clock import gpu
    from ..measure.record import append, check_can_append, environment

    started = time.monotonic()
    problems = _problems(options)
    if options.rounds < 1:
        raise ArgumentError(f"--rounds {options.rounds}", need="at least 1", hint="--rounds 25")
    device = gpu()
    if options.out is not None:
        check_can_append(options.out)
    facts = environment(device)
    rows: list[Row] = []
    for found in _measured(problems, _ways(), options.rounds):
        rows += found
        stderr().print(f"{len(rows)} times after {time.monotonic() - started:.0f} s")
        if options.out is not None:
            for row in found:
                append(options.out, row | facts)
    if options.json:
        seconds = round(time.monotonic() - started, 1)
        print_json({"environment": facts, "rows": rows, "seconds": seconds})
    else:
        _print(rows, facts)
    if any(row["contender"] == _OURS and row["error"] for row in rows):
        raise typer.Exit(FAILED_EXIT)


def _problems(options: Bench) -> Sequence[Problem]:
    """What to time, layer by layer.

    Raises:
        ArgumentError: Neither or both of shapes and a suite, or a text that is no such thing.
    """
    from ..measure.suite import Problem, read_suite

    if (options.shape is None) == (options.suite is None):
        raise ArgumentError(
            "both --shape and --suite" if options.suite else "neither --shape nor --suite",
            need="one of them",
            hint="hopsparse bench --shape 4096x4096",
        )
    if options.suite is not None:
        tokens = None if options.tokens is None else tokens_of(options.tokens)
        problems = [
            each
            for each in read_suite(options.suite)
            if (tokens is None or each.tokens in tokens)
            and (options.dtype is None or each.dtype == options.dtype)
        ]
        if not problems:
            raise ArgumentError(
                f"suite {options.suite} with --tokens {options.tokens} and --dtype {options.dtype}",
                need="tokens and a dtype that the suite has",
                hint="the suite alone",
            )
        return problems
    return [
        Problem("", *shape_of(text), tokens=tokens, dtype=options.dtype or "bfloat16")
        for text in options.shape or ()
        for tokens in tokens_of(options.tokens or _TOKENS)
    ]


def _ways() -> list[Way]:
    """Ours first, then what can run here of the peers."""
    from ..formats import NM
    from ..measure.contest import Way
    from ..measure.peers import PEERS
    from ..nn import SparseLinear

    ours = Way(
        _OURS,
        lambda weight, bias: SparseLinear(NM.from_dense(weight), bias),
        lambda product, x: product.plan(x).name,
    )
    return [ours, *(Way.of(peer) for peer in PEERS if peer.available() is None)]


def _measured(problems: Sequence[Problem], ways: Sequence[Way], rounds: int) -> Iterator[list[Row]]:
    """The rows of one problem after the other; weights are made once for all tokens."""
    from ..measure.contest import Layer, as_rows

    for _, group in groupby(problems, lambda each: (each.out, each.k, each.dtype)):
        layer = None
        for problem in group:
            if layer is None:
                layer = Layer.random((problem.out, problem.k), problem.torch_dtype, ways)
            yield as_rows(problem, layer.contest(problem.tokens, rounds=rounds))


def _print(rows: Sequence[Row], facts: Row) -> None:
    from rich.markup import escape
    from rich.table import Table

    rivals = list(dict.fromkeys(row["contender"] for row in rows if row["contender"] != _OURS))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("layer", "dtype", "plan"):
        table.add_column(title)
    for title in ("tokens", "us", "TFLOP/s", "watts"):
        table.add_column(title, justify="right")
    for name in rivals:
        table.add_column(f"{name} us", justify="right")
        table.add_column("ratio", justify="right")
    for _, group in groupby(rows, _problem_of):
        found = {row["contender"]: row for row in group}
        table.add_row(*_cells(found, rivals))
    console = stdout()
    console.print(escape(f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}"))
    console.print(table)
    console.print("ratio: how many times faster hopsparse is; device time, weights not in cache")
    for row in rows:
        if row["error"]:
            told = f"{row['contender']}, {row['out']}x{row['k']}, {row['tokens']} tokens"
            console.print(f"{told}: {row['error']}", markup=False, soft_wrap=True)


def _problem_of(row: Row) -> tuple[Any, ...]:
    return row["layer"], row["out"], row["k"], row["tokens"], row["dtype"]


def _cells(found: dict[str, Row], rivals: Sequence[str]) -> list[str]:
    ours = found[_OURS]
    name = f"{ours['layer']} {ours['out']}x{ours['k']}".strip()
    cells = [name, ours["dtype"], ours["plan"] or "-", str(ours["tokens"])]
    cells += [_number(ours["us"], 1), _number(ours["tflops"], 0), _number(ours["watts"], 0)]
    for rival in rivals:
        cells += [_number(found[rival]["us"], 1), _number(found[rival]["ratio"], 2)]
    return cells


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


BENCH = command(Bench, run, name="bench")
