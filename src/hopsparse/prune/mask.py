"""Which entries a pattern keeps, given a score an entry: exact counts, ties to the first column."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import ArgumentError
from ..formats.pattern import BlockPattern, NMPattern, Pattern


def keep_mask(scores: Tensor, pattern: Pattern, *, per_row: bool = False) -> Tensor:
    """Keep the entries of highest score that the pattern allows.

    N:M keeps the N best of every M consecutive entries along k; a shorter last group keeps at most
    N. Unstructured zeroes round(out * k * sparsity) entries of the layer, or
    round(k * sparsity) of each row with `per_row`. Blocks are ranked by the sum of their scores;
    blocks cut by the border count as blocks. Equal scores: the lower row, then column, stays.

    Args:
        scores: [out, k], floating, no NaN; higher is more important.
        pattern: The pattern.
        per_row: Rank within each output row (unstructured only).

    Returns:
        [out, k] bool, True where kept.

    Raises:
        ArgumentError: Scores of another rank, empty, not floating, or with a NaN.

    Example:
        >>> keep_mask(torch.tensor([[3.0, 1.0, 2.0, 2.0]]), NMPattern(2, 4)).tolist()
        [[True, False, True, False]]
    """
    check_matrix(scores, "scores", finite=False)
    if isinstance(pattern, NMPattern):
        return _keep_nm(scores, pattern)
    if isinstance(pattern, BlockPattern):
        return _keep_blocks(scores, pattern)
    rows = scores if per_row else scores.reshape(1, -1)
    return keep_top(rows, rows.shape[1] - round(rows.shape[1] * pattern.sparsity)).view_as(scores)


def keep_top(rows: Tensor, keep: int) -> Tensor:
    """True at the `keep` largest entries of each row [rows, n]; of equal ones the first stay."""
    n = rows.shape[1]
    if keep <= 0 or keep >= n:
        return torch.full_like(rows, keep > 0, dtype=torch.bool)
    threshold = rows.kthvalue(n - keep + 1, dim=1, keepdim=True).values
    above, level = rows > threshold, rows == threshold
    missing = keep - above.sum(1, keepdim=True)
    return above | (level & (level.cumsum(1) <= missing))


def keep_ranked(groups: Tensor, n: int) -> Tensor:
    """True at the `n` largest along dim 0 of [m, ...]; of equal ones the first stay."""
    rank = torch.zeros(groups.shape, dtype=torch.int8, device=groups.device)
    for i in range(groups.shape[0]):
        for j in range(i + 1, groups.shape[0]):
            first_wins = groups[i] >= groups[j]
            rank[j] += first_wins
            rank[i] += ~first_wins
    return rank < n


def block_sums(scores: Tensor, rows: int, cols: int) -> Tensor:
    """Sum of each `rows` x `cols` block of [out, k]; border blocks sum what they hold."""
    out, k = scores.shape
    whole = pad(scores, (0, -k % cols, 0, -out % rows))
    return whole.view(whole.shape[0] // rows, rows, whole.shape[1] // cols, cols).sum((1, 3))


def spread_blocks(kept: Tensor, rows: int, cols: int, shape: tuple[int, int]) -> Tensor:
    """A mask a block [block rows, block cols] as a mask an entry of `shape`."""
    entries = kept.repeat_interleave(rows, 0)[: shape[0]]
    return entries.repeat_interleave(cols, 1)[:, : shape[1]]


def check_matrix(matrix: Tensor, what: str, *, finite: bool = True) -> None:
    """Refuse what is no non-empty floating matrix, or holds a NaN (with `finite`: or infinity)."""
    if matrix.dim() != 2 or not matrix.numel() or not matrix.is_floating_point():
        raise ArgumentError(
            f"{what} of shape {tuple(matrix.shape)} and {matrix.dtype}",
            need="a non-empty floating matrix [out, k]",
            hint="the weight of an nn.Linear",
        )
    bad = ~matrix.isfinite() if finite else matrix.isnan()
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise ArgumentError(
            f"{what} holds {float(matrix[row, column])} at row {row}, column {column}",
            need="finite numbers" if finite else "no NaN",
            hint="repair the source weights, or keep this layer dense",
        )


def _keep_nm(scores: Tensor, pattern: NMPattern) -> Tensor:
    out, k = scores.shape
    whole = pad(scores, (0, -k % pattern.m), value=float("-inf"))
    groups = whole.view(out, -1, pattern.m).permute(2, 0, 1).contiguous()
    kept = keep_ranked(groups, pattern.n).permute(1, 2, 0).reshape(out, -1)
    return kept[:, :k].contiguous()


def _keep_blocks(scores: Tensor, pattern: BlockPattern) -> Tensor:
    sums = block_sums(scores, pattern.rows, pattern.cols)
    total = sums.numel()
    kept = keep_top(sums.view(1, -1), total - round(total * pattern.sparsity)).view_as(sums)
    return spread_blocks(kept, pattern.rows, pattern.cols, (scores.shape[0], scores.shape[1]))
