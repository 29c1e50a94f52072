"""What an exchange cost: bytes, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
        select_ms: Adding up what was kept, and choosing the largest.
        quantise_ms: Rounding and unpacking the remainder, and adding up what came.
        communicate_ms: Waiting for others, and for the link.
        skipped: Parameters with Inf or NaN, which were passed on and not kept.

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
        setattr(self, name, getattr(self, name) + spent)

    def count(self, values: int, ranks: int, passes: int = 2) -> None:
        """An exchange begins; a ring passes everything twice for an all-reduce, once to scatter."""
        self.calls += 1
        self.values += values
        self.dense_bytes += passes * (ranks - 1) / ranks * 4 * values

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "ratio": self.ratio}

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
