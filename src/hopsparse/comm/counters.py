"""What an exchange cost: bytes, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ..measure.record import append


@dataclass
class Counters:
    """Sums over steps of one rank.

    Times are those of the host: with NCCL, where the host runs ahead, they say nothing.

    Attributes:
        calls: Exchanges, one a bucket and step.
        values: Values of the gradients that were reduced.
        dense_bytes: What a rank would send for them in float32, around a ring.
        sent_bytes: What this rank sent to others; its headers do not count.
        select_ms: Adding up what was kept, choosing the largest, and rounding the others.
        quantise_ms: Putting messages together, unpacking them, and adding up what came.
        communicate_ms: Waiting for others, and for the link.
        skipped: Parameters with Inf or NaN, which were passed on and not kept; of those on a GPU
            since the last `settle`.

    Example:
        >>> Counters(dense_bytes=100, sent_bytes=10).ratio
        10.0
    """

    calls: int = 0
    values: int = 0
    dense_bytes: float = 0.0
    sent_bytes: float = 0.0
    select_ms: float = 0.0
    quantise_ms: float = 0.0
    communicate_ms: float = 0.0
    skipped: int = 0
    _later: list[Tensor] = field(default_factory=list, repr=False, compare=False)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than a ring all-reduce of float32; 0 where none were sent."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of a block to one of the times."""
        started = time.perf_counter()
        yield
        spent = 1e3 * (time.perf_counter() - started)
        # One exchange may be finished by another thread while the next is begun.
        with self._lock:
            setattr(self, name, getattr(self, name) + spent)

    def skip_later(self, skipped: Tensor) -> None:
        """Count a parameter if a bool on a GPU says so, which nobody waits for now."""
        if not self._later:
            self._later.append(torch.zeros((), dtype=torch.int64, device=skipped.device))
        self._later[0] += skipped

    def settle(self) -> Counters:
        """Wait for what a GPU has counted, and add it."""
        for each in self._later:
            self.skipped += int(each)
        self._later.clear()
        return self

    def count(self, values: int, ranks: int, passes: int = 2) -> None:
        """An exchange begins; a ring passes everything twice for an all-reduce, once to scatter."""
        self.calls += 1
        self.values += values
        self.dense_bytes += passes * (ranks - 1) / ranks * 4 * values

    def facts(self) -> dict[str, Any]:
        """As JSON values; waits for what a GPU has counted."""
        self.settle()
        named = [each.name for each in fields(self) if not each.name.startswith("_")]
        return {**{name: getattr(self, name) for name in named}, "ratio": self.ratio}

    def reset(self) -> None:
        """Begin at zero."""
        self.__init__()  # type: ignore[misc]

    def write(self, path: Path, **more: Any) -> None:
        """Append them to a file of JSON lines, for `hopsparse comm-report`.

        Args:
            path: The file.
            more: What else the row should say: `step=100`, `rank=0`.

        Raises:
            CheckpointError: The file cannot be written.
        """
        append(path, {"kind": "comm", **more, **self.facts()})
