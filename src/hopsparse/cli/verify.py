"""`hopsparse verify`: is what runs here right, or is this checkpoint whole."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ArgumentError
from .console import print_json, stdout
from .options import FAILED_EXIT, command

if TYPE_CHECKING:
    from ..models.verify import Check
    from .verify_operators import Report


@dataclass(frozen=True)
class Verify:
    """Options of `hopsparse verify`."""

    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]",
            help="Checkpoint or .safetensors file; without it, every operator, "
            "layer and format on this machine.",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="Where; cuda if there is an H100 or H200."),
    ] = None
    all: Annotated[
        bool, typer.Option("--all/--quick", help="Every check, or a part of each operator's.")
    ] = False
    op: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of this operator alone; repeatable.")
    ] = None
    delays: Annotated[
        int | None,
        typer.Option(
            metavar="SEED", help="Kernels that pause before each wait and copy, compiled apart."
        ),
    ] = None
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the checks as JUnit XML too.")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: Verify) -> None:
    """Check operators, layers and formats here, or the integrity of PATH; exit 1 on failure."""
    if options.path is None:
        from .verify_operators import verify_operators

        report = verify_operators(
            options.device, options.op or [], every=options.all, delays=options.delays
        )
        _finish(options, report)
        return
    _refuse_beside_path(options)
    from ..models.verify import checks_of

    started = time.monotonic()
    checks = list(checks_of(options.path))
    seconds = time.monotonic() - started
    ok = all(check.ok for check in checks)
    if options.json:
        print_json(
            {
                "path": str(options.path),
                "ok": ok,
                "seconds": round(seconds, 3),
                "checks": [asdict(check) for check in checks],
            }
        )
    else:
        _print(checks, seconds)
    if not ok:
        raise typer.Exit(FAILED_EXIT)


def _refuse_beside_path(options: Verify) -> None:
    beside = ("device", "all", "op", "delays", "junit")
    given = [f"--{name}" for name in beside if getattr(options, name) not in (None, False)]
    if given:
        raise ArgumentError(
            f"{' and '.join(given)} beside a PATH",
            need="a checkpoint alone, or operators without a PATH",
            hint=f"hopsparse verify {options.path}",
        )


def _finish(options: Verify, report: Report) -> None:
    """Print and write what was done; also of a run that was interrupted."""
    if options.junit is not None:
        from .junit import write_junit

        write_junit(options.junit, report.rows)
    if options.json:
        print_json(report.as_json())
    else:
        _print_rows(report)
    if report.interrupted:
        raise KeyboardInterrupt
    if not report.ok:
        raise typer.Exit(FAILED_EXIT)


def _print_rows(report: Report) -> None:
    """A line for each operator, then each failure with the kernels that ran."""
    from rich.table import Table

    console = stdout()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("operator", "checks", "failed", "kernels", "seconds"):
        table.add_column(title, justify="left" if title == "operator" else "right")
    for op in dict.fromkeys(row.op for row in report.rows):
        rows = [row for row in report.rows if row.op == op]
        kernels = {kernel for row in rows for kernel in row.kernels}
        failed = sum(not row.ok for row in rows)
        seconds = f"{sum(row.seconds for row in rows):.1f}"
        table.add_row(op, str(len(rows)), str(failed or ""), str(len(kernels) or ""), seconds)
    console.print(table)
    failed_rows = [row for row in report.rows if not row.ok]
    for row in failed_rows[:20]:
        console.print("[red]FAIL[/red]", end=" ")
        ran = f" [{', '.join(row.kernels)}]" if row.kernels else ""
        console.print(f"{row.name}: {row.detail}{ran}", markup=False, soft_wrap=True)
    told = f"{len(report.rows)} checks on {report.device} in {report.seconds:.1f} s"
    if report.left:
        told += f", {report.left} not run"
    if not failed_rows:
        console.print(f"{told}: all right")
        return
    console.print(f"{told}: {len(failed_rows)} failed; the first: ", end="")
    first = failed_rows[0]
    console.print(f"{first.name}: {first.detail}", markup=False, soft_wrap=True)


def _print(checks: list[Check], seconds: float) -> None:
    console = stdout()
    failed = [check for check in checks if not check.ok]
    for check in checks if len(checks) <= 40 else failed[:10]:
        mark = "[green]ok  [/green]" if check.ok else "[red]FAIL[/red]"
        console.print(mark, end=" ")
        console.print(f"{check.name}: {check.detail}", markup=False, soft_wrap=True)
    told = f"{len(checks)} checks in {seconds:.1f} s"
    if not failed:
        console.print(f"{told}: all right")
        return
    console.print(f"{told}: {len(failed)} failed; the first: ", end="")
    console.print(f"{failed[0].name}: {failed[0].detail}", markup=False, soft_wrap=True)


VERIFY = command(Verify, run, name="verify")
