"""`hopsparse tune`: which tile, or dense, is fastest for a layer here; it runs from then on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError
from ..units import duration_text
from .console import print_json, stderr, stdout
from .options import FAILED_EXIT, command
from .problems import Grouped, Sums, four_bits_of, numbers_of
from .tune_problems import MOST_TOKENS, distinct, problems_of

if TYPE_CHECKING:
    from ..measure.suite import Problem
    from ..tune import Ranking, Show

Row = dict[str, Any]

_SECONDS_A_PROBLEM = 60.0
_SHOWN = 3


@dataclass(frozen=True)
class Tune:
    """Options of `hopsparse tune`."""

    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL]", help="Checkpoint whose layers are tuned, each shape once."
        ),
    ] = None
    shape: Annotated[
        list[str] | None, typer.Option(metavar="OUTxK", help="Layer instead; repeatable.")
    ] = None
    suite: Annotated[
        str | None, typer.Option(help="Named layers instead: anchors, llama-3-8b, ..., llm.")
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Rows of x, whose classes are tuned; all classes up to "
            f"{MOST_TOKENS} tokens, or those of the suite.",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16 or float16; of codes int8, float8_e4m3fn or float8_e4m3fn/int4 (w/x); "
            "of 4-bit weights int4:128/bfloat16 and the like; bfloat16, or those of the model or "
            "the suite."
        ),
    ] = None
    sums: Sums = "promoted"
    grouped: Grouped = False
    matrix: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="Block-sparse matrices instead, by name, of the checkpoint or file; each pattern.",
        ),
    ] = None
    budget_s: Annotated[
        float | None,
        typer.Option(help="Seconds for all of it but compiling; 60 a problem if left out."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: Tune) -> None:
    """Measure all tiles on this GPU and keep the ranking; exit 1 if a tile computes wrong results.

    With --matrix it is the few most promising tiles for where a matrix has its blocks. What was
    measured before is not measured again. After Ctrl-C the same command goes on.
    """
    from ..measure.clock import gpu
    from ..tune import Store, machine_of

    _check_budget(options.budget_s)
    if options.matrix is not None:
        from .tune_blocks import run_blocks

        _end(row["tiles"] for row in run_blocks(options))
        return
    problems = distinct(problems_of(options))
    machine, started = machine_of(gpu().index), time.monotonic()
    found: list[Row] = []
    try:
        for problem, ranking in _tuned(problems, options.budget_s):
            found.append(result(problem, ranking, machine.sm_count))
    except KeyboardInterrupt:
        told = f"{len(found)} of {len(problems)} problems were tuned, and what was measured stays."
        stderr().print(f"{told} The same command goes on.", markup=False, soft_wrap=True)
        raise
    seconds = time.monotonic() - started
    folder = Store.default().folder
    if options.json:
        facts = {"gpu": machine.gpu, "sm_count": machine.sm_count, "driver": machine.driver}
        left = len(problems) - len(found)
        print_json(
            {**facts, "folder": str(folder), "seconds": seconds, "left": left, "problems": found}
        )
    else:
        _print(found)
        told = f"{len(found)} of {len(problems)} problems in {duration_text(seconds)}"
        stdout().print(f"{told}; kept in {folder}", markup=False, soft_wrap=True)
    _end(each["tiles"] for each in found)


def _end(searches: Iterable[list[Row]]) -> None:
    """Exit with 1 if a tile was wrong."""
    if any(row["wrong"] for tiles in searches for row in tiles):
        raise typer.Exit(FAILED_EXIT)


def _check_budget(budget_s: float | None) -> None:
    """Refuse a time that is none.

    Raises:
        ArgumentError: It is negative, or no number.
    """
    if budget_s is not None and not budget_s >= 0:
        raise ArgumentError(f"--budget-s {budget_s}", need="seconds", hint="--budget-s 600")


def _tuned(
    problems: Sequence[Problem], budget_s: float | None
) -> Iterator[tuple[Problem, Ranking]]:
    """Tune one problem after the other, until the time is spent."""
    from .progress import progress_shown

    end = math.inf if budget_s is None else time.monotonic() + budget_s
    with progress_shown() as show:
        for number, each in enumerate(problems):
            left = (end - time.monotonic()) / (len(problems) - number)
            if number and left <= 0:
                return
            label = f"{each.out}x{each.k} {each.dtype}, {each.tokens} tokens"
            budget = _SECONDS_A_PROBLEM if budget_s is None else max(0.0, left)
            yield each, _ranking(each, budget, shown(show, label))


def _ranking(problem: Problem, budget_s: float, show: Show) -> Ranking:
    from ..ops.spmm_nm.cost import Problem as Sizes
    from ..ops.spmm_nm.int4.tuning import tune_int4
    from ..ops.spmm_nm.scaled.tuning import tune_scaled
    from ..ops.spmm_nm.tuning import tune_problem

    sizes, numbers = Sizes(problem.tokens, problem.out, problem.k), numbers_of(problem)
    if (kind := four_bits_of(problem)) is not None:
        return tune_int4(sizes, kind, budget_s=budget_s, show=show)
    if numbers is not None:
        return tune_scaled(sizes, numbers, budget_s=budget_s, show=show)
    return tune_problem(sizes, problem.dtype, budget_s=budget_s, show=show)


def shown(show: Any, label: str) -> Show:
    """What tells the steps of a search, under a label."""
    from ..models.options import Progress

    def tell(phase: str, done: int, total: int, name: str, left: float | None) -> None:
        show(Progress(phase, done, total, f"{label}: {name.split(' ')[0].rstrip(',')}", left))

    return tell


def result(problem: Problem, ranking: Ranking, sm_count: int) -> Row:
    """What a search found of one problem, as JSON values; tiles are in the order of their times.

    `ratio_to_dense` and `ratio_to_model` are how many times faster a tile is than the dense product
    and than the first choice of the cost model. `runs` is what layers run: a tile, or "dense".
    """
    from ..ops.spmm_nm.dense import beats
    from ..ops.spmm_nm.plan import DENSE
    from ..ops.spmm_nm.scaled.plan import sums_of
    from ..tune import Measured, token_class

    names, nothing = _names(problem, sm_count), Measured.wrong("")
    known = {name: ranking.measured.get(name, nothing) for name in (*names, DENSE)}
    first, dense = known[next(iter(names))].us, known[DENSE].us
    tiles = [name for name in names if name != DENSE]
    ordered = sorted(tiles, key=lambda name: known[name].us)
    rows: list[Row] = [
        {
            "tile": name.split(" ")[0],
            "us": known[name].us,
            "spread": known[name].spread,
            "tflops": _per(problem.flops / 1e6, known[name].us),
            "ratio_to_dense": _per(dense, known[name].us),
            "ratio_to_model": _per(first, known[name].us),
            "is_first_choice": name == tiles[0],
            "is_new": name in ranking.timed,
            "wrong": known[name].error,
            "failed": ranking.failed.get(name, ""),
        }
        for name in ordered
    ]
    fastest = rows[0]["us"]
    runs = rows[0]["tile"] if math.isfinite(fastest) else None
    if beats(dense, fastest):
        runs, fastest = "dense", dense
    return {
        "layer": problem.layer,
        "out": problem.out,
        "k": problem.k,
        "dtype": problem.dtype,
        "sums": None if (numbers := numbers_of(problem)) is None else sums_of(numbers),
        "tokens": token_class(problem.tokens).name,
        "measured_tokens": problem.tokens,
        "dense_us": dense,
        "runs": runs,
        "regret": _per(first, fastest) if runs else None,
        "tiles": rows,
    }


def _names(problem: Problem, sm_count: int) -> list[str]:
    """What is timed for a problem, the model's choice first; dense only where layers may run it."""
    from ..ops.spmm_nm.cost import Problem as Sizes
    from ..ops.spmm_nm.int4.tuning import named_int4_candidates
    from ..ops.spmm_nm.scaled.tuning import named_scaled_candidates
    from ..ops.spmm_nm.tuning import named_candidates

    sizes, numbers = Sizes(problem.tokens, problem.out, problem.k), numbers_of(problem)
    if (kind := four_bits_of(problem)) is not None:
        return list(named_int4_candidates(sizes, kind.numbers, sm_count))
    if numbers is not None:
        return list(named_scaled_candidates(sizes, numbers, sm_count))
    return list(named_candidates(sizes, problem.dtype, sm_count))


def _per(what: float, us: float) -> float:
    """A rate or a ratio; NaN where one of the two was not measured."""
    return what / us if math.isfinite(what) and math.isfinite(us) else math.nan


def _print(found: Sequence[Row]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("layer", "dtype", "tokens", "tile"):
        table.add_column(title, no_wrap=True)
    for title in ("us", "spread", "TFLOP/s", "to dense", "to model"):
        table.add_column(title, justify="right")
    table.add_column("")
    for each in found:
        label = (
            f"{each['layer']} {each['out']}x{each['k']}".strip(),
            f"{each['dtype']} {each['sums'] or ''}".strip(),
            each["tokens"],
        )
        shown = [
            row
            for place, row in enumerate(each["tiles"])
            if place < _SHOWN or row["is_first_choice"] or row["wrong"] or row["failed"]
        ]
        if each["runs"] == "dense":
            shown.insert(0, _dense_row(each))
        for row in shown:
            table.add_row(*label, *_cells(row, runs=row["tile"] == each["runs"]))
            label = ("", "", "")
    console = stdout()
    console.print(table)
    console.print("to dense, to model: how many times faster than cuBLAS, and than the tile that")
    console.print("the cost model chose; what runs does from now on, for all token counts of its")
    console.print("class; dense does in layers alone, which keep the decoded weight")
    for each in found:
        for row in each["tiles"]:
            if told := row["wrong"] or row["failed"]:
                where = f"{each['out']}x{each['k']}, {each['measured_tokens']} tokens"
                console.print(f"{row['tile']}, {where}: {told}", markup=False, soft_wrap=True)


def _dense_row(found: Row) -> Row:
    """The dense product as a row of the table, where it runs."""
    us = found["dense_us"]
    flops = 2 * found["measured_tokens"] * found["out"] * found["k"]
    return {
        "tile": "dense",
        "us": us,
        "spread": math.nan,
        "tflops": _per(flops / 1e6, us),
        "ratio_to_dense": 1.0,
        "ratio_to_model": found["regret"],
        "is_first_choice": False,
        "wrong": "",
        "failed": "",
    }


def _cells(row: Row, *, runs: bool) -> list[str]:
    words = ["runs"] if runs else []
    words += ["model's choice"] if row["is_first_choice"] else []
    words += ["WRONG"] if row["wrong"] else ["failed"] if row["failed"] else []
    return [
        row["tile"],
        _number(row["us"], 1),
        _number(100 * row["spread"], 1, " %"),
        _number(row["tflops"], 0),
        _number(row["ratio_to_dense"], 2),
        _number(row["ratio_to_model"], 2),
        ", ".join(words),
    ]


def _number(value: float, digits: int, unit: str = "") -> str:
    return f"{value:.{digits}f}{unit}" if math.isfinite(value) else "-"


TUNE = command(Tune, run, name="tune")
