"""`hopsparse bench`: what a 2:4 layer takes on this GPU, beside the dense one and cuSPARSELt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from .bench_comm import BENCH_COMM
from .bench_model import BENCH_MODEL
from .console import number_text, print_json, stderr, stdout
from .options import FAILED_EXIT, command, unless_subcommand
from .problems import check_dtype, shape_of, tokens_of

if TYPE_CHECKING:
    from ..measure.contest import Way
    from ..measure.suite import Problem

Row = dict[str, Any]

_TOKENS = "1,16,256"
_ROUNDS = 25
_COLUMNS = (("us", 1), ("tflops", 0), ("watts", 0))


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
        str | None,
        typer.Option(
            help="bfloat16, float16, int8 or float8_e4m3fn; bfloat16, or those of the suite."
        ),
    ] = None
    scaling: Annotated[
        str | None, typer.Option(help="Scales of 8-bit codes: none, tensor or rows; none.")
    ] = None
    rounds: Annotated[
        int | None, typer.Option(help=f"Samples of each time; {_ROUNDS}, or 3 turns of energy.")
    ] = None
    energy: Annotated[
        bool, typer.Option("--energy", help="Operations per joule of every dtype instead.")
    ] = False
    seconds: Annotated[float | None, typer.Option(help="Length of each turn of --energy; 2.")] = (
        None
    )
    gate: Annotated[
        str | None,
        typer.Option(metavar="BASE", help="Exit 1 if slower than this build or baseline."),
    ] = None
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a baseline for --gate.")
    ] = None
    limit: Annotated[float, typer.Option(help="Of --gate: time over that of the base.")] = 1.02
    floor_us: Annotated[
        float | None, typer.Option(help="Of --gate: least difference; 0.3, of a CPU 2.")
    ] = None
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Append rows, as JSON lines.")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: Bench) -> None:
    """Time 2:4 layers side by side with dense ones; exit 1 if a result of ours is wrong."""
    if options.gate is not None or options.baseline is not None:
        from .gate import run_gate

        run_gate(options)
    elif options.energy:
        from .energy import run_energy

        run_energy(options)
    else:
        _run_times(options)


def _run_times(options: Bench) -> None:
    from ..measure.clock import gpu
    from ..measure.record import append, check_can_append, environment

    started = time.monotonic()
    problems = _problems(options)
    rounds = _ROUNDS if options.rounds is None else options.rounds
    if rounds < 1:
        raise ArgumentError(f"--rounds {rounds}", need="at least 1", hint=f"--rounds {_ROUNDS}")
    device = gpu()
    if options.out is not None:
        check_can_append(options.out)
    facts = environment(device)
    rows: list[Row] = []
    for found in _measured(problems, rounds):
        rows += found
        stderr().print(f"{len(rows)} times after {time.monotonic() - started:.0f} s")
        if options.out is not None:
            for row in found:
                append(options.out, row | facts)
    show_rows(options, rows, facts, started, _print)


def show_rows(
    options: Bench, rows: list[Row], facts: Row, started: float, table: Callable[..., None]
) -> None:
    """Print what was measured since `started`; exit 1 if a product of ours was wrong."""
    if options.json:
        seconds = round(time.monotonic() - started, 1)
        print_json({"environment": facts, "rows": rows, "seconds": seconds})
    else:
        table(rows, facts)
    if any(is_ours(row) and row["error"] for row in rows):
        raise typer.Exit(FAILED_EXIT)


def is_ours(row: Row) -> bool:
    """Whether a row is of a product of ours."""
    return str(row["contender"]).startswith("hopsparse")


def _problems(options: Bench) -> Sequence[Problem]:
    """What to time, layer by layer.

    Raises:
        ArgumentError: Neither or both of shapes and a suite, options that do not go together, or a
            text that is no such thing.
    """
    from ..measure.suite import CodedProblem, Problem

    if (options.shape is None) == (options.suite is None):
        raise ArgumentError(
            "both --shape and --suite" if options.suite else "neither --shape nor --suite",
            need="one of them",
            hint="hopsparse bench --shape 4096x4096",
        )
    if options.seconds is not None:
        raise ArgumentError(
            f"--seconds {options.seconds:g} without --energy",
            need="a measurement of energy",
            hint="--rounds, for times",
        )
    check_dtype(options.dtype, tuple(CodedProblem.DTYPES))
    coded = options.dtype in CodedProblem.DTYPES
    if options.scaling is not None and not coded:
        raise ArgumentError(
            f"--scaling {options.scaling} of {options.dtype or 'bfloat16'}",
            need="codes of 8 bits",
            hint="--dtype float8_e4m3fn",
        )
    if options.suite is not None:
        return _of_suite(options.suite, options, coded)
    sides = [
        (*shape_of(text), tokens)
        for text in options.shape or ()
        for tokens in tokens_of(options.tokens or _TOKENS)
    ]
    if coded:
        assert options.dtype is not None
        scaling = options.scaling or "none"
        return [CodedProblem("", *each, dtype=options.dtype, scaling=scaling) for each in sides]
    return [Problem("", *each, dtype=options.dtype or "bfloat16") for each in sides]


def _of_suite(name: str, options: Bench, coded: bool) -> Sequence[Problem]:
    from ..measure.suite import coded_suite, read_suite

    tokens = None if options.tokens is None else tokens_of(options.tokens)
    every: Sequence[Problem]
    if coded:
        assert options.dtype is not None
        every = coded_suite(name, options.dtype, options.scaling or "none")
    else:
        every = read_suite(name)
    problems = [
        each
        for each in every
        if (tokens is None or each.tokens in tokens)
        and (options.dtype is None or each.dtype == options.dtype)
    ]
    if not problems:
        raise ArgumentError(
            f"suite {name} with --tokens {options.tokens} and --dtype {options.dtype}",
            need="tokens and a dtype that the suite has",
            hint="the suite alone",
        )
    return problems


def ways_for(problem: Problem) -> list[Way]:
    """Ours first, then what can run here of the peers."""
    from ..measure import coded_peers
    from ..measure.contest import Way
    from ..measure.peers import PEERS
    from ..measure.suite import CodedProblem
    from ..ops.spmm_nm import contenders

    if isinstance(problem, CodedProblem):
        dtype = problem.torch_dtype
        return [*contenders.coded_ways(dtype), *coded_peers.coded_ways(dtype)]
    return [our_way(), *(Way.of(peer) for peer in PEERS if peer.available() is None)]


def our_way() -> Way:
    """Ours in 16 bits, as models run it."""
    from ..formats import NM
    from ..measure.contest import Way
    from ..nn import SparseLinear
    from ..ops.spmm_nm.contenders import OURS

    return Way(
        OURS,
        lambda weight, bias: SparseLinear(NM.from_dense(weight), bias),
        lambda product, x: product.plan(x).name,
    )


def _measured(problems: Sequence[Problem], rounds: int) -> Iterator[list[Row]]:
    """The rows of one problem after the other; weights are made once for all tokens."""
    from ..measure.coded_contest import layer_for
    from ..measure.contest import as_rows

    for _, group in groupby(problems, lambda each: (each.out, each.k, each.dtype)):
        layer = None
        for problem in group:
            if layer is None:
                layer = layer_for(problem, ways_for(problem))
            yield as_rows(problem, layer.contest(problem.tokens, rounds=rounds))


def _print(rows: Sequence[Row], facts: Row) -> None:
    from rich.markup import escape
    from rich.table import Table

    ours, *rivals = list(dict.fromkeys(row["contender"] for row in rows))
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
    console.print(f"ratio: how many times faster {ours} is; device time, weights not in cache")
    for row in rows:
        if row["error"]:
            told = f"{row['contender']}, {row['out']}x{row['k']}, {row['tokens']} tokens"
            console.print(f"{told}: {row['error']}", markup=False, soft_wrap=True)


def _problem_of(row: Row) -> tuple[Any, ...]:
    return row["layer"], row["out"], row["k"], row["tokens"], row["dtype"]


def _cells(found: dict[str, Row], rivals: Sequence[str]) -> list[str]:
    ours = next(iter(found.values()))
    name = f"{ours['layer']} {ours['out']}x{ours['k']}".strip()
    dtype = f"{ours['dtype']} {ours['scaling']}" if "scaling" in ours else ours["dtype"]
    cells = [name, dtype, ours["plan"] or "-", str(ours["tokens"])]
    cells += [number_text(ours[key], digits) for key, digits in _COLUMNS]
    for rival in rivals:
        cells += [number_text(found[rival]["us"], 1), number_text(found[rival]["ratio"], 2)]
    return cells


#: A command, and what it holds: `hopsparse bench comm` and `hopsparse bench model`.
BENCH = typer.Typer(invoke_without_command=True)
BENCH.callback()(unless_subcommand(command(Bench, run, name="bench")))
BENCH.command("comm")(BENCH_COMM)
BENCH.command("model")(BENCH_MODEL)
