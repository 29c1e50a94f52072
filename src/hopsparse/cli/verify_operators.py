"""What `hopsparse verify` does without a PATH: every check that this machine can make."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..errors import ArgumentError, GpuLostError, HopsparseError
from ..models.options import Progress
from ..nn.checks import checks as layer_checks
from ..ops.checks import all_checks
from ..ops.plans import plans, verified_specs
from ..settings import DELAYS_VARIABLE, Settings
from ..verify import Check, outcome_of
from .progress import progress_shown
from .selfcheck import self_checks

_FORMATS = "formats"
_DEVICES = ("cpu", "cuda")
# So that a log has some lines and not thousands.
_SHOWN_EVERY_S = 0.5


@dataclass(frozen=True)
class Row:
    """One check that was made.

    Attributes:
        name: All that says which.
        op: The operator, `SparseLinear`, or `formats`.
        case: Its problem.
        dtype: Of its numbers.
        format: How the matrix is stored, or "".
        ok: Whether all was right.
        detail: The first number that was not, with its bits; or what was covered.
        kernels: Those that were launched.
        seconds: How long it took.
    """

    name: str
    op: str
    case: str
    dtype: str
    format: str
    ok: bool
    detail: str
    kernels: tuple[str, ...]
    seconds: float


@dataclass
class Report:
    """A run.

    Attributes:
        device: "cpu" or "cuda".
        every: Whether all checks were asked for.
        delays: Seed of the pauses in kernels, or None.
        rows: What was done.
        left: How many checks were not made.
        seconds: In all.
        interrupted: Whether Ctrl-C ended it.
    """

    device: str
    every: bool
    delays: int | None
    rows: list[Row] = field(default_factory=list)
    left: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether all checks were made and none failed."""
        return not self.left and all(row.ok for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """The report as tools read it."""
        from ..measure.record import environment

        return {
            "path": None,
            "device": self.device,
            "set": "all" if self.every else "quick",
            "delays": self.delays,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "left": self.left,
            "environment": environment(),
            "checks": [{**asdict(row), "seconds": round(row.seconds, 4)} for row in self.rows],
        }


def verify_operators(
    device: str | None, ops: Sequence[str], *, every: bool, delays: int | None = None
) -> Report:
    """Make every check, or those of the quick set.

    Args:
        device: "cpu", "cuda" or None: cuda where there is a Hopper GPU.
        ops: Operators by name; none: all.
        every: All checks, not the quick ones alone.
        delays: Seed of pauses that kernels are compiled with.

    Raises:
        ArgumentError: No such device or operator, or delays where no kernel runs.
    """
    chosen = _device(device)
    steps = _steps(chosen, ops, every)
    if delays is not None:
        _set_delays(delays, chosen)
    report = Report(chosen, every, Settings.from_environment().delays)
    started = time.monotonic()
    with _one_thread():
        try:
            if every and chosen == "cuda":
                _compile(ops, started)
            _make(steps, report, started)
        except KeyboardInterrupt:
            report.interrupted = True
    report.left = len(steps) - len(report.rows)
    report.seconds = time.monotonic() - started
    return report


def _compile(ops: Sequence[str], started: float) -> None:
    """Many kernels at a time, where a check would compile its own and wait; errors are its own."""
    from ..compiler import KernelCache

    wanted = [own for own in plans() if not ops or any(op.startswith(own) for op in ops)]
    specs = [spec for op in wanted for spec in verified_specs(op)]
    with closing(KernelCache.default().compile_all(specs)) as running, progress_shown() as show:
        last = started
        for number, built in enumerate(running, 1):
            now = time.monotonic()
            if now - last > _SHOWN_EVERY_S:
                left = (now - started) / number * (len(specs) - number)
                label = f"{built.spec.op}/{built.spec.name}"
                show(Progress("compile", number, len(specs), label, left))
                last = now


_Step = tuple[str, Callable[[], Row]]


def _make(steps: list[_Step], report: Report, started: float) -> None:
    last = 0.0
    with progress_shown() as show:
        for number, (name, step) in enumerate(steps):
            now = time.monotonic()
            if now - last > _SHOWN_EVERY_S:
                left = (now - started) / number * (len(steps) - number) if number else None
                show(Progress("verify", number, len(steps), name, left))
                last = now
            row = step()
            report.rows.append(row)
            if not row.ok and GpuLostError.__name__ in row.detail:
                # Nothing runs on that GPU any more; what is left says so.
                return


def _steps(device: str, ops: Sequence[str], every: bool) -> list[_Step]:
    checks = [*all_checks(), *layer_checks()]
    known = list(dict.fromkeys([_FORMATS, *(check.op for check in checks)]))
    for op in ops:
        if op not in known:
            raise ArgumentError(f"operator {op!r}", need=f"one of {', '.join(known)}", hint="--all")
    steps: list[_Step] = []
    if device == "cpu" and (not ops or _FORMATS in ops):
        steps += [(check.name, check.run) for check in _formats()]
    for check in checks:
        is_there = not (check.only_gpu and device == "cpu")
        if (not ops or check.op in ops) and (is_there if every else check.is_quick(device)):
            steps.append((check.name, _step(check, device)))
    return steps


def _step(check: Check, device: str) -> Callable[[], Row]:
    return lambda: _row(check, torch.device(device))


def _row(check: Check, device: torch.device) -> Row:
    facts = (check.name, check.op, check.case, check.dtype, check.format)
    started = time.monotonic()
    try:
        found = outcome_of(check, device)
    except HopsparseError as error:
        told = f"{type(error).__name__}: {error}"
        return Row(*facts, ok=False, detail=told, kernels=(), seconds=time.monotonic() - started)
    return Row(
        *facts, ok=found.ok, detail=found.detail, kernels=found.kernels, seconds=found.seconds
    )


@dataclass(frozen=True)
class _Format:
    """One of the checks of formats, which are made one behind the other."""

    name: str
    running: Iterator[Any]

    def run(self) -> Row:
        started = time.monotonic()
        found = next(self.running)
        seconds = time.monotonic() - started
        facts = (found.name, _FORMATS, found.name, "all", "")
        return Row(*facts, ok=found.ok, detail=found.detail, kernels=(), seconds=seconds)


def _formats() -> list[_Format]:
    from .selfcheck import names

    running = self_checks()
    return [_Format(name, running) for name in names()]


def _device(device: str | None) -> str:
    has_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if device is None:
        return "cuda" if has_hopper else "cpu"
    if device not in _DEVICES:
        raise ArgumentError(f"device {device!r}", need="cpu or cuda", hint="--device cpu")
    if device == "cuda" and not has_hopper:
        raise ArgumentError(
            "--device cuda without an H100 or H200", need="such a GPU", hint="--device cpu"
        )
    return device


def _set_delays(delays: int, device: str) -> None:
    if device == "cpu":
        raise ArgumentError(
            "--delays on the CPU", need="a GPU, whose kernels then pause", hint="--device cuda"
        )
    os.environ[DELAYS_VARIABLE] = str(delays)
    Settings.from_environment()  # which refuses what is no seed


@contextmanager
def _one_thread() -> Iterator[None]:
    """What the CPU does is small, and waiting for a second thread would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
