"""`hopsparse bench --gate`: whether this build is slower than a base, in turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ArgumentError, CheckpointError, GpuLostError
from .console import number_text, print_json, stderr, stdout, time_text
from .options import FAILED_EXIT

if TYPE_CHECKING:
    import torch

    from ..measure.gate import Limits, Samples, Verdict
    from ..measure.pairs import Call
    from .bench import Bench
    from .gate_cases import Case

Row = dict[str, Any]

SCHEMA = 1
#: The other build, in this process.
BASE_NAME = "hopsparse_base"
_KIND = "gate baseline"
_SAME = ("gpu", "cpu", "torch", "suite")
_STORED_ROUNDS, _LEAST_ROUNDS = 100, 25
_FLOOR_US = {"cuda": 0.3, "cpu": 2.0}
# A product that no build of ours changes.
_ANCHOR = {"cuda": (4096, 4096, 256), "cpu": (256, 256, 16)}


def run_gate(options: Bench) -> None:
    """Compare this build with a base, or store a baseline; exit 1 where one case is slower.

    Raises:
        ArgumentError: Options that do not go together; a base that is no build; or a baseline of
            another GPU, release of torch, suite or schema.
        typer.Exit: A case is slower than the limit, or fails.
    """
    import torch

    from ..measure.record import append
    from .gate_cases import cases_of

    check(options)
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {**_facts(), "suite": options.suite or "micro"}
    cases, limits = cases_of(facts["suite"], device), limits_of(options, device.type)
    if options.baseline is not None:
        _store(options.baseline, cases, device, facts, options.rounds or _STORED_ROUNDS)
        return
    rows: list[Row] = []
    for row in _judged(Path(str(options.gate)), cases, device, limits, facts):
        rows.append(row)
        told = f"{len(rows)}/{len(cases)} after {time.monotonic() - started:.0f} s"
        stderr().print(f"{told}: {row['case']}", markup=False)
        if options.out is not None:
            append(options.out, row | facts)
    alarms = [row["case"] for row in rows if row["slower"] or row["error"]]
    if options.json:
        seconds = round(time.monotonic() - started, 1)
        document = {"environment": facts, "limits": asdict(limits), "rows": rows}
        print_json({**document, "slower": alarms, "seconds": seconds})
    else:
        _print(rows, limits, str(options.gate))
    if alarms:
        raise typer.Exit(FAILED_EXIT)


def check(options: Bench) -> None:
    """Refuse options that do not go together.

    Raises:
        ArgumentError: It says which.
    """
    both = options.gate is not None and options.baseline is not None
    others = {
        "--shape": options.shape,
        "--tokens": options.tokens,
        "--dtype": options.dtype,
        "--scaling": options.scaling,
        "--energy": options.energy or None,
    }
    wrong = [name for name, value in others.items() if value is not None]
    if both or wrong:
        raise ArgumentError(
            "--gate with " + ", ".join(wrong or ["--baseline"]),
            need="a base, and --suite micro or e2e",
            hint="hopsparse bench --gate ../base",
        )


def limits_of(options: Bench, kind: str) -> Limits:
    """What counts as slower.

    Args:
        options: Those of the command.
        kind: `cuda` or `cpu`.
    """
    from ..measure.gate import Limits

    floor = _FLOOR_US[kind] if options.floor_us is None else options.floor_us
    most = Limits().most if options.rounds is None else options.rounds
    return Limits(ratio=options.limit, floor_us=floor, most=most)


def _judged(
    base: Path, cases: Sequence[Case], device: torch.device, limits: Limits, facts: Row
) -> Iterator[Row]:
    """A row for each case."""
    import hopsparse

    from ..measure.gate import decide
    from ..measure.other_build import load_build

    if base.is_file():
        stored = read_baseline(base, facts)
        for case in cases:
            yield _row(case, partial(_against_stored, case, stored, device, limits))
        return
    other = load_build(base, BASE_NAME)
    for case in cases:
        sample = Sampler(case, (other, hopsparse), device)
        yield _row(case, partial(decide, sample, limits, least=min(_LEAST_ROUNDS, limits.most)))


def _row(case: Case, judge: Callable[[], tuple[Verdict, Verdict | None]]) -> Row:
    row: Row = {"case": case.name, "error": ""}
    try:
        verdict, first = judge()
    except GpuLostError:
        raise
    except Exception as error:
        # A build that cannot run a case at all has got slower than any limit.
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return {**row, "slower": False, "error": words}
    return {**row, **asdict(verdict), "first_ratio": first.ratio if first else None}


class Sampler:
    """Times of a case by two builds, as `hopsparse.measure.gate.decide` asks for them.

    Args:
        case: What is timed.
        builds: The base, and what is judged.
        device: Where.
        change: Makes the two lists of calls from those of the two builds; for tests of the gate.
    """

    def __init__(
        self,
        case: Case,
        builds: tuple[ModuleType, ModuleType],
        device: torch.device,
        change: Callable[[list[Call], list[Call]], tuple[list[Call], list[Call]]] | None = None,
    ) -> None:
        self._case, self._builds, self._device = case, builds, device
        self._change, self._seed = change, 0
        self._calls: tuple[list[Call], list[Call]] | None = None

    def __call__(self, rounds: int) -> Samples:
        """Times of so many rounds; with 0 all data is drawn anew, and memory with it."""
        from ..measure.pairs import paired

        if rounds == 0:
            self._calls, self._seed = None, self._seed + 1
            return [], []
        if self._calls is None:
            first, second = (
                self._case.calls(build, self._device, self._seed) for build in self._builds
            )
            self._calls = self._change(first, second) if self._change else (first, second)
        return paired(*self._calls, rounds, self._device)


def _against_stored(
    case: Case, stored: dict[str, Samples], device: torch.device, limits: Limits
) -> tuple[Verdict, Verdict | None]:
    from ..measure.gate import judge_stored

    if case.name not in stored:
        raise ArgumentError(
            f"no {case.name} in the baseline", need="every case", hint="--baseline FILE, made anew"
        )
    # Two runs that share no rounds need as many as were stored.
    rounds = min(limits.most, len(stored[case.name][0]))
    first = judge_stored(stored[case.name], _anchored(case, device, 0, rounds), limits)
    if not first.slower:
        return first, None
    return judge_stored(stored[case.name], _anchored(case, device, 1, rounds), limits), first


def _anchored(case: Case, device: torch.device, seed: int, rounds: int) -> Samples:
    """Times of this build, and of a product that no build changes, round by round."""
    import hopsparse

    from ..measure.pairs import paired

    calls = case.calls(hopsparse, device, seed)
    anchor, own = paired(_anchor(device, len(calls)), calls, rounds, device)
    return own, anchor


def _anchor(device: torch.device, count: int) -> list[Call]:
    import torch
    from torch.nn import functional as F

    out, k, tokens = _ANCHOR[device.type]
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, w = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype)
        for shape in ((tokens, k), (out, k))
    )
    return [partial(F.linear, x, w)] * count


def _store(
    path: Path, cases: Sequence[Case], device: torch.device, facts: Row, rounds: int
) -> None:
    from ..measure.record import append

    if path.exists():
        raise ArgumentError(f"{path} exists", need="a new file", hint="another name")
    append(path, {"kind": _KIND, "schema": SCHEMA, **facts})
    for case in cases:
        own, anchor = _anchored(case, device, 0, rounds)
        append(path, {"case": case.name, "us": list(own), "anchor_us": list(anchor)})
    stdout().print(f"{path}: {len(cases)} cases", markup=False)


def read_baseline(path: Path, facts: Row) -> dict[str, Samples]:
    """The times that a baseline holds, by case.

    Args:
        path: What `hopsparse bench --baseline` wrote.
        facts: What this run is made with.

    Raises:
        CheckpointError: It cannot be read, or is no baseline of this schema.
        ArgumentError: It is of another GPU, release of torch, or suite.
    """
    from ..measure.record import read

    try:
        head, *rows = read(path) or [{}]
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: no text", need="a baseline", hint="--baseline") from error
    if head.get("kind") != _KIND or head.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path}: kind {head.get('kind')!r}, schema {head.get('schema')!r}",
            need=f"a {_KIND} of schema {SCHEMA}",
            hint="hopsparse bench --baseline FILE, by the build that is the base",
        )
    for name in _SAME:
        if head.get(name) != facts[name]:
            raise ArgumentError(
                f"a baseline of {name} {head.get(name)!r}, on {facts[name]!r}",
                need=f"the same {name}",
                hint="a folder with the other build, or a baseline made here",
            )
    if not rows or any(not {"case", "us", "anchor_us"} <= row.keys() for row in rows):
        raise CheckpointError(f"{path}: no times", need="a whole baseline", hint="--baseline")
    return {row["case"]: (row["us"], row["anchor_us"]) for row in rows}


def _facts() -> Row:
    from ..measure.record import environment
    from .probe import probe_cpu

    facts = environment()
    return {**facts, "cpu": None if facts["gpu"] else probe_cpu()["model"]}


def _print(rows: Sequence[Row], limits: Limits, base: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "base", "new", "ratio", "interval", "rounds", ""):
        table.add_column(title, justify="left" if not title else "right")
    for row in rows:
        if row["error"]:
            table.add_row(row["case"], *["-"] * 5, escape(row["error"]))
            continue
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        ratio = number_text(row["ratio"], 3)
        cells = [time_text(row["base_us"]), time_text(row["new_us"]), ratio, interval]
        verdict = "[red]slower[/red]" if row["slower"] else _sees(row, limits)
        table.add_row(row["case"], *cells, str(row["rounds"]), verdict)
    console = stdout()
    console.print(table)
    told = f"limit {limits.ratio:g} and {limits.floor_us:g} us, {100 * limits.level:g} % intervals"
    console.print(f"base: {base}; {told}", markup=False)


def _sees(row: Row, limits: Limits) -> str:
    """What slowdown this noise would have let through, where that is more than 5 %."""
    width = (row["high"] - row["low"]) / 2 / row["ratio"]
    least = limits.ratio * (1 + width) - 1
    return f"sees {100 * least:.0f} % and more" if least > 0.05 else ""
