"""An order of columns under which a pattern comes closer to 2:4.

Groups are built one after another. The fullest column that is left goes first; then those are
taken whose entries meet its entries in the fewest rows, so that few rows hold three of the four.
Of a full 2:4 matrix whose columns were shuffled this finds the old groups, as three columns of one
group share no row, while three others share some. It is a search: a better order may exist.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...formats import CSR
from ...plan import Reordered, TwoFourFit
from ...plan.structure import Order
from .strips import Int64s, strips
from .two_four import GROUP, KEPT, two_four_fit

#: Columns of a matrix that is searched; wider ones are only dealt out by count.
MOST_COLUMNS = 4096
# Entries of the dense sample of rows, and the fewest rows of one.
_SAMPLE_ENTRIES, _LEAST_ROWS = 1 << 21, 256
# Second columns that are tried for each first one.
_TRIED = 8


def column_order(
    matrix: CSR, natural: TwoFourFit, row_counts: Int64s, col_counts: Int64s
) -> tuple[Tensor, Reordered]:
    """Find an order of columns under which more of the non-zeros fit 2:4.

    Args:
        matrix: [rows, cols], on the CPU.
        natural: Its fit as it is.
        row_counts: Non-zeros of each row.
        col_counts: Non-zeros of each column.

    Returns:
        int64 [cols]: column `order[j]` of the old matrix becomes column j; and what that gives.
        The last cols % 4 columns stay where they are.
    """
    cols = matrix.shape[1]
    bound = _at_most(row_counts, cols)
    best: tuple[Order, TwoFourFit, Int64s] = ("natural", natural, np.arange(cols))
    note = ""
    tries: list[Order] = [] if natural.fits or cols < 2 * GROUP else ["dealt", "matched"]
    for how in tries:
        if best[1].fits:
            break
        if how == "matched" and cols > MOST_COLUMNS:
            note = f"columns are matched up to {MOST_COLUMNS}; these were only dealt out by count"
            break
        whole = cols - cols % GROUP
        counts = col_counts[:whole]
        head = _dealt(counts) if how == "dealt" else _matched(_sample(matrix, whole), counts)
        order = np.append(head, np.arange(whole, cols))
        fit = two_four_fit(strips(matrix), cols, _inverse(order))
        if fit.excess < best[1].excess:
            best = (how, fit, order)
    how, fit, order = best
    return torch.from_numpy(order), Reordered(fit, how, bound, note)


def fitting_order(matrix: CSR) -> Tensor | None:
    """The order of columns under which most non-zeros fit 2:4; None if that is the one there is.

    Args:
        matrix: [rows, cols], valid, on any device.

    Returns:
        int64 [cols], on its device, as for `column_order`.

    Example:
        >>> fitting_order(CSR.from_dense(torch.eye(8))) is None
        True
    """
    rows, cols = matrix.to("cpu").without_zeros(), matrix.shape[1]
    assert isinstance(rows, CSR)
    counts = np.bincount(rows.indices.numpy(), minlength=cols)
    natural = two_four_fit(strips(rows), cols)
    order, found = column_order(rows, natural, rows.row_counts().numpy(), counts)
    return None if found.how == "natural" else order.to(matrix.device)


def _at_most(row_counts: Int64s, cols: int) -> float:
    """The part of the non-zeros that the best order may hold, from the rows alone."""
    full, rest = divmod(cols, GROUP)
    room = KEPT * full + min(rest, KEPT)
    total = int(row_counts.sum())
    return float(np.minimum(row_counts, room).sum() / total) if total else 1.0


def _inverse(order: Int64s) -> Int64s:
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place


def _dealt(counts: Int64s) -> Int64s:
    """Columns by falling count, dealt to the groups there and back, so that sums are even."""
    groups = len(counts) // GROUP
    hands = np.argsort(-counts, kind="stable").reshape(GROUP, groups)
    hands[1::2] = hands[1::2, ::-1]
    return np.sort(hands.T, axis=1).reshape(-1)


def _sample(matrix: CSR, cols: int) -> Tensor:
    """Some rows as zeros and ones, float32 [rows, cols]: evenly spread over those with entries."""
    held = torch.nonzero(matrix.row_counts()).flatten()
    most = max(_LEAST_ROWS, _SAMPLE_ENTRIES // max(1, cols))
    if held.numel() > most:
        held = held[torch.arange(most) * held.numel() // most]
    counts = matrix.row_counts()[held]
    row = torch.repeat_interleave(torch.arange(held.numel()), counts)
    first = torch.repeat_interleave(matrix.indptr[held].long(), counts)
    ends = counts.cumsum(0)
    within = torch.arange(int(counts.sum())) - torch.repeat_interleave(ends - counts, counts)
    col = matrix.indices[first + within].long()
    dense = torch.zeros(held.numel(), cols)
    inside = col < cols
    dense[row[inside], col[inside]] = 1
    return dense


def _matched(sample: Tensor, counts: Int64s) -> Int64s:
    """Groups of columns that meet in few rows of the sample, [cols] in their order."""
    left = torch.from_numpy(np.argsort(-counts, kind="stable"))
    found: list[list[int]] = []
    # One column in four is gone after each group: the sample is cut to those left, now and then.
    held = sample[:, left]
    alive = torch.ones(left.numel(), dtype=torch.bool)
    for _ in range(left.numel() // GROUP):
        if int(alive.sum()) < 0.75 * alive.numel():
            left, held = left[alive], held[:, alive]
            alive = torch.ones(left.numel(), dtype=torch.bool)
        group = _group(held, alive)
        alive[group] = False
        found.append(sorted(left[group].tolist()))
    return np.array(sorted(found), dtype=np.int64).reshape(-1)


def _group(held: Tensor, alive: Tensor) -> Tensor:
    """Four of the columns that are left, by place: the first of them, and its best company.

    The columns are sorted by falling count, and of equal companions the first is taken.
    """
    first = int(alive.int().argmax())
    taken = torch.where(alive, 0.0, torch.inf)
    taken[first] = torch.inf
    meets = held[:, first] @ held + taken
    seconds = meets.topk(min(_TRIED, int(alive.sum()) - 1), largest=False, sorted=True).indices
    both = held[:, first, None] * held[:, seconds]
    thirds = both.T @ held + taken
    thirds[torch.arange(len(seconds)), seconds] = torch.inf
    cost, third = thirds.min(1)
    at = int(cost.argmin())
    trio = torch.tensor([first, int(seconds[at]), int(third[at])])
    # A fourth costs one in each row where two of the three are, beyond what they cost already.
    pairs = (held[:, trio].sum(1) >= KEPT).float()
    last = (pairs @ held + taken).index_fill(0, trio, torch.inf)
    return torch.cat((trio, last.argmin().reshape(1)))
