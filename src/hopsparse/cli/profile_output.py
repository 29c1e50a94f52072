"""A profile as a table, and as the files of a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..files import written_whole
from .console import number_text, stdout, time_text

if TYPE_CHECKING:
    from ..measure.profile.subject import Subject

PROFILE_JSON, PROFILE_TRACE, PROFILE_PAGE = "profile.json", "trace.json", "profile.html"

# Title, field, factor and digits of each column.
_TIMES = (
    ("TFLOP/s", "tflops", 1, 1),
    ("on kept", "kept_tflops", 1, 1),
    ("TB/s", "tbps", 1, 2),
    ("% of ceiling", "of_ceiling", 100, 0),
)
_COUNTERS = (
    ("SM active %", "sm_active", 1, 0),
    ("tensor %", "tensor", 1, 0),
    ("DRAM %", "dram", 1, 0),
    ("L2 %", "l2", 1, 0),
    ("2:4 Tops", "ops_sparse", 1e-12, 3),
    ("dense Tops", "ops_dense", 1e-12, 3),
    ("kernels", "kernels", 1, 0),
    ("ncu us", "ncu_us", 1, 1),
)


def write(folder: Path, document: dict[str, Any], subjects: Sequence[Subject]) -> None:
    """Write profile.json, trace.json and profile.html.

    Raises:
        CheckpointError: A file cannot be written.
        UnsupportedError: The report extra is not installed.
    """
    from ..measure.profile.trace import trace
    from ..report.profile import render_profile

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}", need="a folder", hint="-o") from error
    texts = {
        PROFILE_JSON: json.dumps(document, indent=2, allow_nan=False) + "\n",
        PROFILE_TRACE: json.dumps(trace(subjects)),
        PROFILE_PAGE: render_profile(document),
    }
    for name, text in texts.items():
        with written_whole(folder / name, "free some space, then profile again") as temporary:
            temporary.write_text(text, encoding="utf-8")


def show(document: dict[str, Any], folder: Path | None) -> None:
    """Print the tables of a profile, and what it was made with."""
    from rich.markup import escape
    from rich.table import Table

    rows, counters = document["rows"], document["counters"]
    columns = [
        column
        for column in (*_TIMES, *_COUNTERS)
        if any(row[column[1]] is not None for row in rows)
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "time"):
        table.add_column(title, justify="right" if title else "left")
    for title, *_ in columns:
        table.add_column(title, justify="right")
    for row in rows:
        cells = [_cell(row[field], factor, digits) for _, field, factor, digits in columns]
        table.add_row(escape(row["subject"]), _time(row["us"]), *cells)
    console = stdout()
    console.print(table)
    _show_phases(document["phases"])
    for row in rows:
        said = row["error"] or row["plan"]
        if said:
            console.print(f"{row['subject']}: {said}", markup=False, soft_wrap=True)
    console.print(f"times: {rows[0]['clock']}; counters: {_source(counters)}", markup=False)
    ceilings = document["ceilings"]
    if ceilings is not None:
        console.print(f"ceilings: {ceilings['target']}, {ceilings['source']}", markup=False)
    if folder is not None:
        console.print(f"{folder}: {PROFILE_JSON}, {PROFILE_TRACE} (for Perfetto), {PROFILE_PAGE}")


def _show_phases(phases: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    if not phases:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("of", "phase", "time", "ncu us", "kernels"):
        table.add_column(title, justify="left" if title in ("of", "phase") else "right")
    for row in phases:
        seen = [_cell(row.get("ncu_us"), 1, 1), _cell(row.get("kernels"), 1, 0)]
        table.add_row(row["subject"], row["phase"], _time(row["us"]), *seen)
    console = stdout()
    console.print()
    console.print(table)
    console.print()


def _cell(value: float | None, factor: float, digits: int) -> str:
    if value is None:
        return number_text(None, digits)
    # What a CPU reaches is far below one.
    small = 0 < abs(value * factor) < 1
    return number_text(value * factor, max(digits, 3) if small else digits)


def _time(us: float | None) -> str:
    return "-" if us is None else time_text(us)


def _source(counters: dict[str, str]) -> str:
    return f"none ({counters['why']})" if counters["why"] else counters["source"]
