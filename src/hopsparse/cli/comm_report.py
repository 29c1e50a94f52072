"""`hopsparse comm-report`: what reducing gradients cost, from the rows that ranks wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CheckpointError
from .console import bytes_text, print_json, stdout
from .options import command


@dataclass(frozen=True)
class CommReport:
    """Options of `hopsparse comm-report`."""

    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Rows of `state.counters.write`.")
    ]
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: CommReport) -> None:
    """Show bytes, times and ratios of gradient exchanges, a line for each row of the files."""
    rows = [row for path in options.files for row in _rows(path)]
    if options.json:
        print_json({"rows": rows})
        return
    _print(rows)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of one file that are counters, complete."""
    from ..comm import Counters
    from ..measure.record import read

    if not path.is_file():
        raise CheckpointError(
            f"{path} is no file", need="rows of state.counters.write", hint="the path it was given"
        )
    needed = {field.name for field in fields(Counters) if field.name[0] != "_"} | {"ratio"}
    rows = [row for row in read(path) if row.get("kind") == "comm"]
    for number, row in enumerate(rows, start=1):
        wrong = [name for name in sorted(needed) if not isinstance(row.get(name), int | float)]
        if wrong:
            raise CheckpointError(
                f"{path}, row {number} of kind comm: no number for {', '.join(wrong)}",
                need="what state.counters.write writes",
                hint="rows of this version of hopsparse",
            )
    if not rows:
        raise CheckpointError(
            f"{path} has no row of kind comm",
            need="what state.counters.write writes",
            hint="state.counters.write(path, rank=rank, step=step) in the training loop",
        )
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    from ..comm import Counters

    known = {field.name for field in fields(Counters) if field.name[0] != "_"} | {"ratio", "kind"}
    labels = list(dict.fromkeys(name for row in rows for name in row if name not in known))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in labels:
        table.add_column(title, overflow="fold")
    for title in ("exchanges", "values", "dense", "sent", "times less", "select ms"):
        table.add_column(title, justify="right")
    for title in ("quantise ms", "communicate ms", "not finite"):
        table.add_column(title, justify="right")
    for row in rows:
        calls = max(row["calls"], 1)
        table.add_row(
            *(str(row.get(label, "-")) for label in labels),
            str(row["calls"]),
            str(row["values"]),
            bytes_text(row["dense_bytes"]),
            bytes_text(row["sent_bytes"]),
            f"{row['ratio']:.1f}",
            *(f"{row[name] / calls:.2f}" for name in ("select_ms", "quantise_ms")),
            f"{row['communicate_ms'] / calls:.2f}",
            str(row["skipped"]),
        )
    stdout().print(table, markup=False)
    stdout().print("Times are those of one exchange, on average.")


COMM_REPORT = command(CommReport, run, name="comm-report")
