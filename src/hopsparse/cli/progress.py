"""How far a long run is, and what it leaves when it is interrupted."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .console import seconds_text, stderr

if TYPE_CHECKING:
    from ..models.options import Progress, ProgressCallback


def print_interrupted(out: Path, kept: str | None) -> None:
    """Say what an interrupted run left, if anything, and how to continue it."""
    console = stderr()
    if kept is None:
        console.print("Interrupted; nothing was written.")
        return
    words = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
    told = f"Interrupted. {out} was not written; {kept}."
    console.print(told, markup=False, soft_wrap=True)
    console.print("To continue:", markup=False)
    console.print(f"  hopsparse {shlex.join([*words, '--resume'])}", markup=False, soft_wrap=True)


@contextmanager
def progress_shown() -> Iterator[ProgressCallback]:
    """Show progress on standard error: a live bar on a terminal, one line a step elsewhere."""
    console = stderr()
    if not console.is_terminal:
        yield lambda step: console.print(progress_line(step), markup=False)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.fields[phase]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("[dim]{task.description}"),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("reading", phase="read", left="", total=None)

        def show(step: Progress) -> None:
            left = "" if step.seconds_left is None else f"{seconds_text(step.seconds_left)} left"
            bars.update(
                task,
                completed=step.done,
                total=step.total,
                description=step.label,
                phase=step.phase,
                left=left,
            )

        yield show


def progress_line(step: Progress) -> str:
    """One step as a line of a log."""
    left = "" if step.seconds_left is None else f", {seconds_text(step.seconds_left)} left"
    return f"{step.phase} {step.done}/{step.total} {step.label}{left}"
