"""Who works on which entries of a CSR matrix: spans of about equal work, whatever the rows are.

A team of lanes has a span. It is some whole rows, which start in one stretch of `items` rows and
entries counted together, so that empty rows are work too; a row that is longer than a stretch is
cut into spans of its own, whose sums a second kernel adds. So no row waits for one that is longer
than two stretches, and a matrix is one long queue of equal spans (merge path, Merrill and Garland,
SC 2016, with cuts moved to the starts of rows wherever rows are short).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Most spans of one row: `combine` adds them, 8 threads for a feature.
MOST_PARTS = 8192
_SLOT_SHIFT = 32


@dataclass(frozen=True, eq=False)
class Schedule:
    """Spans of a matrix, on its device.

    Attributes:
        spans: int64 [count + 1, 2], `struct Span` of stream.cuh: the first entry; then the row in
            the low and the slot in the high half, -1 for whole rows. The last one is the end.
        cuts: int32 [cut rows, 4], `struct Cut`: a row, its first slot, how many it has, 0.
        slots: Of all cut rows.
        items: Rows and entries of a stretch.
    """

    spans: Tensor
    cuts: Tensor
    slots: int
    items: int

    @property
    def count(self) -> int:
        """Spans."""
        return self.spans.shape[0] - 1


def items_for(rows: int, entries: int) -> int:
    """Rows and entries of a stretch: more where there are enough of them for every team.

    A function of the matrix alone, so that a matrix is summed in one order on every GPU.

    Example:
        >>> items_for(1797, 14376), items_for(1_000_000, 20_000_000)
        (32, 128)
    """
    total = rows + entries
    return 32 if total < 1 << 18 else 64 if total < 1 << 21 else 128


def cut(indptr: Tensor, items: int | None = None) -> Schedule:
    """Cut a matrix into spans. It waits for the device, twice.

    Args:
        indptr: Where rows start [rows + 1], rising from 0.
        items: Of a stretch; None is `items_for`.

    Example:
        >>> found = cut(torch.tensor([0, 1, 1, 101]), items=32)
        >>> (found.spans[:, 0].tolist(), (found.spans[:, 1] >> 32).tolist(), found.cuts.tolist())
        ([0, 1, 26, 51, 76, 101], [-1, 0, 1, 2, 3, -1], [[2, 0, 4, 0]])
    """
    pointers, device = indptr.long(), indptr.device
    rows, entries = pointers.numel() - 1, int(pointers[-1])
    items = items_for(rows, entries) if items is None else items
    counts = pointers.diff()
    number = torch.arange(rows, device=device)
    is_long = counts > items
    stretch = (pointers[:-1] + number) // items
    starts = torch.ones(rows, dtype=torch.bool, device=device)
    starts[1:] = is_long[1:] | is_long[:-1] | (stretch[1:] != stretch[:-1])
    parts = torch.where(is_long, (-(-counts // items)).clamp_(max=MOST_PARTS), starts.long())
    sizes = torch.where(is_long, -(-counts // parts.clamp(min=1)), 0)
    # Sizes are rounded up, so that the last parts of a row could be empty.
    parts = torch.where(is_long, -(-counts // sizes.clamp(min=1)), parts)

    row = torch.repeat_interleave(number, parts)
    part = torch.arange(row.numel(), device=device) - (parts.cumsum(0) - parts)[row]
    of_long = is_long[row]
    slot = torch.where(of_long, of_long.long().cumsum(0) - 1, -1)
    first = pointers[:-1][row] + part * sizes[row]
    end = torch.tensor([[entries, _packed_end(rows)]], device=device)
    spans = torch.cat((torch.stack((first, row | slot << _SLOT_SHIFT), 1), end))
    long_rows = is_long.nonzero()[:, 0]
    of_each = parts[long_rows]
    slots = int(of_each.sum())
    cuts = torch.stack(
        (long_rows, of_each.cumsum(0) - of_each, of_each, torch.zeros_like(of_each)), 1
    )
    return Schedule(spans, cuts.to(torch.int32), slots, items)


def _packed_end(rows: int) -> int:
    """The second word of the end: no slot."""
    return rows | -1 << _SLOT_SHIFT
