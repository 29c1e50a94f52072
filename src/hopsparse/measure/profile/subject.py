"""What a profile is of, and what it says of it in the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...plan import Target
from ..timing import Timing
from .counters import Counted, Kernel, counted
from .phases import Span


@dataclass(frozen=True)
class Work:
    """What a call has to do at least.

    Attributes:
        flops: Operations of the dense computation; 0 where it is not counted.
        kept_flops: Those on stored entries.
        nbytes: Read and written once: stored weight, inputs and result.
        dtype: Of the inputs, whose ceiling counts.
        sparse: Whether 2:4 instructions can do it.
    """

    flops: int
    kept_flops: int
    nbytes: int
    dtype: str
    sparse: bool = False

    def floor_us(self, target: Target) -> float | None:
        """No kernel can be faster on this GPU; None where nothing is known.

        Example:
            >>> from hopsparse.plan import TARGETS
            >>> work = Work(2 << 40, 1 << 40, 1 << 20, "bfloat16", sparse=True)
            >>> round(work.floor_us(TARGETS["h200"]))
            1525
        """
        if not self.nbytes:
            return None
        memory_s = self.nbytes / target.read_bandwidth
        return 1e6 * max(memory_s, self.kept_flops / (self.ceiling(target) or math.inf))

    def ceiling(self, target: Target) -> float | None:
        """Operations on stored entries that the GPU sustains a second; None for other dtypes."""
        peaks = target.sparse_peak if self.sparse else target.dense_peak
        peak = peaks.get(self.dtype)
        if peak is None:
            return None
        return peak.sustained / 2 if self.sparse else peak.sustained


@dataclass(frozen=True)
class Subject:
    """One thing that was profiled.

    Attributes:
        name: As tables call it.
        plan: What ran.
        work: What it had to do.
        timing: Device time of a call, or of the host where `clock` says so.
        clock: `gpu events` or `host`.
        spans: Phases of the preparation and of one call.
        kernels: What ncu saw of one call; empty without ncu.
    """

    name: str
    plan: str
    work: Work
    timing: Timing
    clock: str
    spans: tuple[Span, ...] = ()
    kernels: tuple[Kernel, ...] = ()

    def row(self, target: Target | None) -> dict[str, Any]:
        """All of it as one flat row of JSON values, None where something is not known.

        Args:
            target: The GPU with its ceilings; None where there is no such GPU.
        """
        us = self.timing.us if self.timing.samples_us else None
        low, high = self.timing.quartiles_us
        floor = self.work.floor_us(target) if target else None
        seen = counted(self.kernels) if self.kernels else None
        return {
            "subject": self.name,
            "plan": self.plan,
            "clock": self.clock,
            "us": us,
            "q1_us": low if us else None,
            "q3_us": high if us else None,
            "samples": len(self.timing.samples_us),
            "error": self.timing.error,
            "tflops": self.work.flops / us / 1e6 if us and self.work.flops else None,
            "kept_tflops": self.work.kept_flops / us / 1e6 if us and self.work.flops else None,
            "bytes": self.work.nbytes or None,
            "tbps": self.work.nbytes / us / 1e6 if us and self.work.nbytes else None,
            "floor_us": floor,
            "of_ceiling": floor / us if floor and us else None,
            "dtype": self.work.dtype,
            **_counters(seen),
        }

    def phases(self) -> list[dict[str, Any]]:
        """Time of every phase and, with ncu, its kernels: one row each, in order."""
        rows: dict[str, dict[str, Any]] = {}
        for span in self.spans:
            if span.phase:
                name = f"{span.phase}.{span.what}".replace(" ", "_")
                row = rows.setdefault(name, {"subject": self.name, "phase": name, "us": 0.0})
                row["us"] += span.us
                row["calls"] = row.get("calls", 0) + 1
        for name, kernels in _by_phase(self.kernels).items():
            row = rows.setdefault(name, {"subject": self.name, "phase": name, "us": None})
            row |= _counters(counted(kernels))
        return list(rows.values())


def _by_phase(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        found.setdefault(kernel.phase or "outside", []).append(kernel)
    return found


def _counters(seen: Counted | None) -> dict[str, Any]:
    names = list(Counted.__dataclass_fields__)
    values = asdict(seen) if seen else dict.fromkeys(names)
    values["ncu_us"] = values.pop("us")
    return {**values, "sparse_share": seen.sparse_share if seen else None}
