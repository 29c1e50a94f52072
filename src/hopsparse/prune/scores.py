"""Pruning by a score alone: magnitude and Wanda. Kept weights stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError, CalibrationError
from ..formats.pattern import Pattern
from .mask import check_matrix, keep_mask


def magnitude(weight: Tensor, pattern: Pattern) -> Tensor:
    """Zero the entries of smallest |w|; unstructured patterns rank over the whole layer.

    Args:
        weight: [out, k], floating, finite.
        pattern: The pattern.

    Returns:
        [out, k], a new tensor of the same dtype; pruned entries are +0.

    Raises:
        ArgumentError: The weight is no finite floating matrix; the message names the entry.

    Example:
        >>> from hopsparse.formats.pattern import NMPattern
        >>> magnitude(torch.tensor([[3.0, -1.0, -4.0, 2.0]]), NMPattern(2, 4)).tolist()
        [[3.0, 0.0, -4.0, 0.0]]
    """
    check_matrix(weight, "weight")
    return weight.masked_fill(~keep_mask(weight.abs(), pattern), 0)


def wanda(weight: Tensor, pattern: Pattern, input_norm: Tensor) -> Tensor:
    """Zero the entries of smallest |w_ij| * ‖X_j‖ (Sun et al., arXiv:2306.11695).

    Unstructured patterns rank within each output row, as the paper does.

    Args:
        weight: [out, k], floating, finite.
        pattern: The pattern.
        input_norm: [k], the 2-norm of each input feature over the calibration tokens.

    Returns:
        [out, k], a new tensor of the same dtype; pruned entries are +0.

    Raises:
        ArgumentError: The weight is no finite floating matrix, or the norm has another length.
        CalibrationError: A norm is negative or not finite; the message names the column.

    Example:
        >>> from hopsparse.formats.pattern import NMPattern
        >>> norm = torch.tensor([1.0, 9.0, 1.0, 1.0])
        >>> wanda(torch.tensor([[3.0, -1.0, -4.0, 2.0]]), NMPattern(2, 4), norm).tolist()
        [[0.0, -1.0, -4.0, 0.0]]
    """
    check_matrix(weight, "weight")
    if input_norm.shape != weight.shape[1:]:
        raise ArgumentError(
            f"input_norm of shape {tuple(input_norm.shape)} for k={weight.shape[1]}",
            need="one norm an input feature",
            hint="Statistics.input_norm()",
        )
    bad = ~(input_norm.isfinite() & (input_norm >= 0))
    if bool(bad.any()):
        column = int(bad.nonzero()[0])
        raise CalibrationError(
            f"input_norm is {float(input_norm[column])} at column {column}",
            need="finite norms of at least 0",
            hint="another calibration text",
        )
    compute = torch.promote_types(weight.dtype, torch.float32)
    scores = weight.to(compute).abs() * input_norm.to(compute)
    return weight.masked_fill(~keep_mask(scores, pattern, per_row=True), 0)
