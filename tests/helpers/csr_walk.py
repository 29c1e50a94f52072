"""The kernels of spmm_csr in Python: the same spans, batches, row ends and parts, team by team.

It follows stream.cuh and kernel.cuh line by line, so that their index arithmetic is checked where
there is no GPU: every read is inside, every row is stored once, in the order that they say.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hopsparse.ops.spmm_csr.plan import COMBINE_THREADS, Team
from hopsparse.ops.spmm_csr.schedule import Schedule

_NEVER = 0xFFFFFFFF


class Walk:
    """One matrix with one feature."""

    def __init__(self, schedule: Schedule, indptr: Tensor, indices: Tensor, values: Tensor) -> None:
        words = schedule.spans.numpy()
        self.entry = words[:, 0]
        self.row = (words[:, 1] & 0xFFFFFFFF).astype(np.int64)
        self.slot = (words[:, 1] >> 32).astype(np.int64)
        self.count, self.cuts = schedule.count, schedule.cuts.numpy()
        self.indptr, self.indices, self.values = indptr.numpy(), indices.numpy(), values.numpy()
        self.rows = len(self.indptr) - 1
        self.partial = np.full(schedule.slots, np.nan, np.float32)

    def multiply(self, x: Tensor, team: Team, batch: int = 8) -> Tensor:
        """A @ x for x [k]; NaN where nothing was stored."""
        y = np.full(self.rows, np.nan, np.float32)
        for span in range(self.count):
            self._span(span, x.numpy(), y, team, batch)
        self._combine(y)
        return torch.from_numpy(y)

    def entries_of(self, span: int) -> int:
        """Entries of a span."""
        return int(self.entry[span + 1] - self.entry[span])

    def _end_of(self, span: int, row: int) -> int:
        at = min(row + 1, self.rows)
        return int(self.indptr[at] - self.entry[span]) & 0xFFFFFFFF

    def _held(self, span: int, first: int, team: Team, batch: int) -> dict[int, int]:
        """What the lanes load: the entry that each number of a batch comes from."""
        held, count = {}, self.entries_of(span)
        for lane in range(team.lanes):
            for i in range(max(1, batch // team.lanes)):
                mine = lane + i * team.lanes
                if mine < batch and first + mine < count:
                    held[mine] = int(self.entry[span]) + first + mine
        return held

    def _span(self, span: int, x: np.ndarray, y: np.ndarray, team: Team, batch: int) -> None:
        row, last, slot = int(self.row[span]), int(self.row[span + 1]), int(self.slot[span])
        count = self.entries_of(span)
        end = following = _NEVER
        if slot < 0 and row < last:
            end, following = self._end_of(span, row), self._end_of(span, row + 1)
        total = np.float32(0)

        def finish() -> None:
            nonlocal row, end, following, total
            assert np.isnan(y[row]), f"row {row} is stored twice"
            y[row], total = total, np.float32(0)
            row, end = row + 1, following
            following = self._end_of(span, row + 1)

        for first in range(0, count, batch):
            held = self._held(span, first, team, batch)
            for u in range(batch):
                if first + u >= count:
                    continue
                while row < last and first + u >= end:
                    finish()
                at = held[u]
                assert slot >= 0 or self.indptr[row] <= at < self.indptr[row + 1]
                total = np.float32(total + self.values[at] * x[self.indices[at]])
        if slot < 0:
            while row < last:
                finish()
        else:
            assert np.isnan(self.partial[slot])
            self.partial[slot] = total

    def _combine(self, y: np.ndarray) -> None:
        slices = COMBINE_THREADS // 32
        for row, first, count, _ in self.cuts:
            assert np.isnan(y[row])
            parts = self.partial[first : first + count]
            sums = [sum(parts[i::slices], np.float32(0)) for i in range(slices)]
            y[row] = sum(sums, np.float32(0))
