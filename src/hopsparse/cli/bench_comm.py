"""`hopsparse bench comm`: gradients of two ranks and more over links of a given rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from .console import bytes_text, print_json, stderr, stdout
from .options import command
from .problems import tokens_of

if TYPE_CHECKING:
    from ..comm.race import Race

Row = dict[str, Any]

_MBIT, _RANKS, _STEPS = "100,1000,0", "2,4", 12
_METHODS = "dense,bf16,fp16,int4,int3.5,int3,sign,powersgd-2"
_MODEL = "mlp"
# What names a run: a file that has one is not asked for it again.
_KEYS = ("suite", "model", "ranks", "mbit", "method", "steps")
_SUITE = "bench_comm"


@dataclass(frozen=True)
class BenchComm:
    """Options of `hopsparse bench comm`."""

    ranks: Annotated[str, typer.Option(metavar="N,N", help="Processes.")] = _RANKS
    mbit: Annotated[
        str, typer.Option(metavar="N,N", help="Rates of the links in Mbit/s; 0 for any.")
    ] = _MBIT
    methods: Annotated[str, typer.Option(metavar="NAME,NAME", help="Ways to reduce gradients.")] = (
        _METHODS
    )
    model: Annotated[str, typer.Option(help="mlp, 4.2 M values, or bert, 109 M.")] = _MODEL
    steps: Annotated[int, typer.Option(help="Timed steps.")] = _STEPS
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="Append rows; what it has is not run again."
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: BenchComm) -> None:
    """Time ways to reduce gradients over links of a given rate, made on this machine; as root."""
    from ..comm.namespaces import require_namespaces
    from ..measure.record import check_can_append, done

    started = time.monotonic()
    races = races_of(options)
    require_namespaces()
    have: set[tuple[Any, ...]] = set()
    if options.out is not None:
        check_can_append(options.out)
        have = done(options.out, _KEYS)
    wanted = [each for each in races if tuple(_names(each).values()) not in have]
    if len(wanted) < len(races):
        stderr().print(f"{len(races) - len(wanted)} of {len(races)} runs are in {options.out}")
    rows = _raced(wanted, options)
    if options.json:
        print_json({"rows": rows, "seconds": round(time.monotonic() - started, 1)})
    else:
        _print(rows)


def races_of(options: BenchComm) -> list[Race]:
    """What to run, the slow links first.

    Raises:
        ArgumentError: A text that is no such thing.
    """
    from ..comm.race import Race

    ranks, rates = tokens_of(options.ranks), _rates(options.mbit)
    methods = [word.strip() for word in options.methods.split(",")]
    return [
        Race(method, options.model, count, mbit, options.steps)
        for count in ranks
        for mbit in rates
        for method in methods
    ]


def _rates(text: str) -> list[int]:
    """Mbit/s, comma-separated; 0 for any."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ArgumentError(
            f"--mbit {text!r}", need="numbers of Mbit/s, comma-separated; 0 for any", hint=_MBIT
        )
    return [int(word) for word in words]


def _names(race: Race) -> Row:
    of_race = {key: getattr(race, key) for key in _KEYS[1:]}
    return {"suite": _SUITE, **of_race}


def _raced(races: Sequence[Race], options: BenchComm) -> list[Row]:
    from ..comm.race import races as race_in_turn
    from ..measure.record import append, environment
    from ..models.options import Progress
    from .progress import progress_shown

    rows: list[Row] = []
    started = time.monotonic()
    with progress_shown() as show:
        for _, group in groupby(races, lambda each: (each.ranks, each.mbit)):
            wanted = list(group)
            with closing(race_in_turn(wanted)) as found:
                for each in wanted:
                    spent, number = time.monotonic() - started, len(rows)
                    left = None if number == 0 else spent / number * (len(races) - number)
                    show(Progress("bench comm", number, len(races), _label(each), left))
                    row = _names(each) | next(found)
                    rows.append(row)
                    if options.out is not None:
                        append(options.out, row | environment())
                for _ in found:  # to its end, where it says whether all ranks ended well
                    pass
        if races:
            show(Progress("bench comm", len(races), len(races), "done", 0.0))
    return rows


def _label(race: Race) -> str:
    return f"{race.ranks} ranks, {_rate(race.mbit)}, {race.method}"


def _rate(mbit: int) -> str:
    return f"{mbit} Mbit/s" if mbit else "any rate"


def _print(rows: Sequence[Row]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("model", "ranks", "link", "method"):
        table.add_column(title)
    for title in ("step ms", "least", "most", "sent a step", "times less than dense"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("model", "ranks")),
            _rate(row["mbit"]),
            row["method"],
            *(f"{row[key]:.1f}" for key in ("step_ms", "step_ms_least", "step_ms_most")),
            bytes_text(row["interface_bytes_a_step"]),
            _ratio(rows)(row),
        )
    stdout().print(table, markup=False)
    stdout().print("Bytes are those that the interface of rank 0 counted, headers too.")


def _ratio(rows: Sequence[Row]) -> Callable[[Row], str]:
    """How many times fewer bytes than the dense run of the same link and ranks."""
    same = ("model", "ranks", "mbit")
    dense = {tuple(r[k] for k in same): r for r in rows if r["method"] == "dense"}

    def told(row: Row) -> str:
        beside = dense.get(tuple(row[key] for key in same))
        if beside is None:
            return "-"
        return f"{beside['interface_bytes_a_step'] / row['interface_bytes_a_step']:.1f}"

    return told


BENCH_COMM = command(BenchComm, run, name="comm")
