"""`hopsparse verify`: is this installation right, or is this checkpoint whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import print_json, stdout
from .options import FAILED_EXIT, command

if TYPE_CHECKING:
    from ..models.verify import Check


@dataclass(frozen=True)
class Verify:
    """Options of `hopsparse verify`."""

    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]",
            help="Checkpoint or .safetensors file; without it, a "
            "self-check of formats and reference products.",
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: Verify) -> None:
    """Check formats and references on this machine, or the integrity of PATH; exit 1 on failure."""
    started = time.monotonic()
    checks = list(_checks(options.path))
    failed = [check for check in checks if not check.ok]
    seconds = time.monotonic() - started
    if options.json:
        print_json(
            {
                "path": str(options.path) if options.path else None,
                "ok": not failed,
                "seconds": round(seconds, 3),
                "checks": [asdict(check) for check in checks],
            }
        )
    else:
        _print(checks, seconds)
    if failed:
        raise typer.Exit(FAILED_EXIT)


def _checks(path: Path | None) -> Iterator[Check]:
    if path is None:
        from .selfcheck import self_checks

        return self_checks()
    from ..models.verify import checks_of

    return checks_of(path)


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
