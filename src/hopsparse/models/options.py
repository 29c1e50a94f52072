"""What a sparsify run is told besides the recipe, and what it tells while it works."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ArgumentError


@dataclass(frozen=True)
class SparsifyOptions:
    """Texts, sizes and places of a sparsify run.

    Attributes:
        calibration: Text file to calibrate on; the bundled text when None.
        evaluate: Text file to evaluate on; the two bundled held-out texts when None.
        windows: Calibration windows.
        window_tokens: Tokens a window, for calibration and evaluation.
        eval_windows: Windows of each evaluation text.
        samples: Whether to generate short samples with both models.
        device: Where blocks are run and pruned.
        resume: Continue an interrupted run of the same command.
        overwrite: Replace an existing checkpoint, and discard an interrupted run.
        plan: Plan file (docs/plan.md) that says the form of every layer; the pattern, scheme and
            forms of the recipe are not used then, and layers that it does not name stay dense.
    """

    calibration: Path | None = None
    evaluate: Path | None = None
    windows: int = 24
    window_tokens: int = 512
    eval_windows: int = 8
    samples: bool = True
    device: str = "cpu"
    resume: bool = False
    overwrite: bool = False
    plan: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("windows", 1), ("eval_windows", 1), ("window_tokens", 8)):
            value = getattr(self, name)
            if value < least:
                raise ArgumentError(f"{name} = {value}", need=f"at least {least}", hint=f"{least}")
        if self.resume and self.overwrite:
            raise ArgumentError(
                "resume and overwrite together", need="one of the two", hint="--resume alone"
            )


@dataclass(frozen=True)
class Progress:
    """One step of a long run.

    Attributes:
        phase: What is being done: "prune", "evaluate", "samples" or "write"; of longer runs also
            "gradients", "sensitivity", "plan 1: prune" and "recover".
        done: Steps finished.
        total: Steps in all.
        label: What the current step works on.
        seconds_left: Estimate from the steps so far; None before the first.
    """

    phase: str
    done: int
    total: int
    label: str
    seconds_left: float | None


ProgressCallback = Callable[[Progress], None]


@dataclass
class StepClock:
    """Counts the steps of a phase and estimates the time left from their mean."""

    phase: str
    total: int
    tell: ProgressCallback
    done: int = 0
    _timed: int = 0
    _started: float = field(default_factory=time.monotonic)

    def step(self, label: str, *, timed: bool = True) -> None:
        """Count one step; untimed steps (resumed ones) do not shape the estimate."""
        self.done += 1
        if not timed:
            self._started = time.monotonic()
        self._timed += timed
        mean = (time.monotonic() - self._started) / self._timed if self._timed else None
        left = None if mean is None else mean * (self.total - self.done)
        self.tell(Progress(self.phase, self.done, self.total, label, left))
