"""`hopsparse bench --energy`: operations per joule, dense and 2:4, of every dtype."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from .bench import Bench, our_way, show_rows
from .console import number_text, stderr, stdout
from .problems import shape_of, tokens_of

if TYPE_CHECKING:
    import torch

    from ..measure.clock import Contender
    from ..measure.contest import Layer, Result
    from ..measure.energy import Energy

Row = dict[str, Any]

# Large enough that all of them are bound by the tensor cores and by power, as anchors were.
_SHAPE, _TOKENS = "8192x8192", "8192"
_ROUNDS, _SECONDS = 3, 2.0
# In the order of the table; the first is what everything is compared with.
_DTYPES = ("float16", "bfloat16", "int8", "float8_e4m3fn")
_DENSE = "cublas"


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        out: Rows of the weight.
        k: Columns.
        tokens: Rows of x.
        scaling: Of 8-bit codes.
        rounds: Turns of each contender.
        seconds: Of a turn.
    """

    out: int
    k: int
    tokens: int
    scaling: str = "none"
    rounds: int = _ROUNDS
    seconds: float = _SECONDS

    @property
    def flops(self) -> int:
        """Operations of the dense product, whatever the sparsity."""
        return 2 * self.out * self.k * self.tokens


def run_energy(options: Bench) -> None:
    """Measure the energy of one problem in every dtype, dense and 2:4.

    Raises:
        ArgumentError: Options that do not go together, or a text that is no such thing.
        UnsupportedError: There is no GPU, no `hopsparse[bench]`, or no counter of energy.
        typer.Exit: A result of ours is wrong.
    """
    from ..measure.energy import check_energy
    from ..measure.record import append, check_can_append, environment

    started = time.monotonic()
    setting = setting_of(options)
    check_energy()
    if options.out is not None:
        check_can_append(options.out)
    facts = environment()
    rows = _measured(setting)
    if options.out is not None:
        for row in rows:
            append(options.out, row | facts)
    show_rows(options, rows, facts, started, _print)


def setting_of(options: Bench) -> Setting:
    """What the options ask for.

    Raises:
        ArgumentError: Options that do not go together, or a text that is no such thing.
    """
    from ..measure.energy import check_turns
    from ..measure.suite import CodedProblem

    for name, value in (("--suite", options.suite), ("--dtype", options.dtype)):
        if value is not None:
            raise ArgumentError(
                f"{name} {value} with --energy",
                need="one layer, in every dtype",
                hint=f"--energy --shape {_SHAPE} --tokens {_TOKENS}",
            )
    shapes = options.shape or [_SHAPE]
    tokens = tokens_of(_TOKENS if options.tokens is None else options.tokens)
    if len(shapes) != 1 or len(tokens) != 1:
        raise ArgumentError(
            f"{len(shapes)} shapes and {len(tokens)} token counts with --energy",
            need="one of each",
            hint=f"--energy --shape {_SHAPE} --tokens {_TOKENS}",
        )
    out, k = shape_of(shapes[0])
    scaling = "none" if options.scaling is None else options.scaling
    CodedProblem("", out, k, tokens[0], scaling=scaling)  # refuses what means nothing
    rounds = _ROUNDS if options.rounds is None else options.rounds
    seconds = _SECONDS if options.seconds is None else options.seconds
    check_turns(rounds, seconds)
    return Setting(out, k, tokens[0], scaling, rounds, seconds)


def _measured(setting: Setting) -> list[Row]:
    """Check all contenders, then let them take turns; one row each."""
    from ..measure.energy import energy_side_by_side

    entries: list[tuple[str, Result]] = []
    contenders: list[Contender | None] = []
    for dtype in _DTYPES:
        layer = _layer(dtype, setting)
        results, running = layer.checked(setting.tokens)
        stderr().print(f"{dtype}: checked")
        for number, result in enumerate(results):
            entry = running.get(number)
            named = entry and replace(entry, name=f"{dtype} {entry.name}")
            entries.append((dtype, result))
            contenders.append(named)
    timed = [each for each in contenders if each is not None]
    found = iter(energy_side_by_side(timed, rounds=setting.rounds, seconds=setting.seconds))
    rows = [
        _row(setting, dtype, result, next(found) if contender else None)
        for (dtype, result), contender in zip(entries, contenders, strict=True)
    ]
    return compared(rows)


def _layer(dtype: str, setting: Setting) -> Layer:
    from ..measure import coded_peers
    from ..measure.coded_contest import layer_for
    from ..measure.contest import Way
    from ..measure.peers import CuBLAS
    from ..measure.suite import CodedProblem, Problem
    from ..ops.spmm_nm import contenders

    sides = (setting.out, setting.k, setting.tokens)
    if dtype in CodedProblem.DTYPES:
        problem = CodedProblem("", *sides, dtype=dtype, scaling=setting.scaling)
        codes: torch.dtype = problem.torch_dtype
        dense = [each for each in coded_peers.coded_ways(codes) if each.name == _DENSE]
        return layer_for(problem, [*dense, *contenders.coded_ways(codes)])
    ours = [] if dtype == _DTYPES[0] else [our_way()]
    return layer_for(Problem("", *sides, dtype=dtype), [Way.of(CuBLAS), *ours])


def _row(setting: Setting, dtype: str, result: Result, energy: Energy | None) -> Row:
    """One contender as JSON values; what comes from other rows is added by `compared`."""
    turns = () if energy is None else energy.turns
    error = result.timing.error if energy is None else energy.error
    excess = result.excess
    tera = setting.flops / 1e12
    each = sorted(tera / turn.joules for turn in turns)
    limits = {limit for turn in turns for limit in turn.limits or ()}
    return {
        "out": setting.out,
        "k": setting.k,
        "tokens": setting.tokens,
        "dtype": dtype,
        "scaling": setting.scaling if dtype in _DTYPES[2:] else "none",
        "contender": result.timing.name,
        "sparsity": "dense" if result.timing.name == _DENSE else "2:4",
        "plan": result.plan,
        "us": energy.us if energy and turns else None,
        "tflops": tera / energy.us * 1e6 if energy and turns else None,
        "watts": energy.watts if energy and turns else None,
        "joules": energy.joules if energy and turns else None,
        "tflop_per_joule": tera / energy.joules if energy and turns else None,
        "least_tflop_per_joule": each[0] if each else None,
        "most_tflop_per_joule": each[-1] if each else None,
        "sm_mhz": [turn.sm_mhz for turn in turns],
        "celsius": [turn.celsius for turn in turns],
        "limits": sorted(limits),
        "rounds": len(turns),
        "seconds": setting.seconds,
        "excess": excess if excess is not None and math.isfinite(excess) else None,
        "error": error,
    }


def compared(rows: Sequence[Row]) -> list[Row]:
    """Rows with the ratio of their operations a joule to those of dense, in its dtype and float16.

    Example:
        >>> row = {"dtype": "float16", "contender": "cublas", "tflop_per_joule": 0.5}
        >>> compared([row])[0]["to_dense"]
        1.0
    """
    dense = {row["dtype"]: row["tflop_per_joule"] for row in rows if row["contender"] == _DENSE}

    def ratio(row: Row, dtype: str) -> float | None:
        mine, other = row["tflop_per_joule"], dense.get(dtype)
        return mine / other if mine is not None and other is not None else None

    return [
        {**row, "to_dense": ratio(row, row["dtype"]), "to_float16": ratio(row, _DTYPES[0])}
        for row in rows
    ]


_COLUMNS = (
    ("us", "us", 1),
    ("TFLOP/s", "tflops", 0),
    ("watts", "watts", 0),
    ("TFLOP/J", "tflop_per_joule", 3),
    ("to dense", "to_dense", 2),
    ("to float16", "to_float16", 2),
)


def _print(rows: Sequence[Row], facts: Row) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("dtype", "", "contender", "plan"):
        table.add_column(title)
    for title, *_ in _COLUMNS:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*cells_of(row))
    console = stdout()
    one = rows[0]
    console.print(escape(f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}"))
    console.print(f"{one['tokens']} tokens, {one['out']}x{one['k']}, scaling {rows[-1]['scaling']}")
    console.print(table)
    console.print("TFLOP/J: operations of the dense product over the energy of the whole card")
    for row in rows:
        if row["error"]:
            told = f"{row['dtype']} {row['contender']}: {row['error']}"
            console.print(told, markup=False, soft_wrap=True)


def cells_of(row: Row) -> list[str]:
    """One row of the table."""
    words = [row["dtype"], row["sparsity"], row["contender"], row["plan"] or "-"]
    return words + [number_text(row[key], digits) for _, key, digits in _COLUMNS]
