"""Some rows and columns of a product of codes whose weight has a scale by group, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from .codes import CodedInput
from .error import grouped_sum_bound, scaled_bound
from .reference import one_of_each_block


class GroupedReference:
    """What such a product must be, as `reference.Reference` has it for 16 bits.

    Attributes:
        out: Rows of the weight.

    Args:
        x: [tokens, k], codes of 8 bits.
        codes: Dense [out, k], codes of w as they are multiplied.
        scales: [out, groups].
        group: Columns that share a scale.
        seed: Of the choice of rows and columns.

    Example:
        >>> x = CodedInput(torch.ones(3, 8, dtype=torch.int8))
        >>> reference = GroupedReference(x, torch.ones(2, 8), torch.tensor([[1, 2], [3, 4]]), 4)
        >>> reference.excess(torch.tensor([[12.0, 28.0]]).expand(3, 2))
        0.0
    """

    def __init__(
        self, x: CodedInput, codes: Tensor, scales: Tensor, group: int, *, seed: int = 2
    ) -> None:
        self.out = codes.shape[0]
        generator, device = torch.Generator().manual_seed(seed), codes.device
        self._rows = one_of_each_block(x.codes.shape[0], generator).to(device)
        self._columns = one_of_each_block(self.out, generator).to(device)
        of_x, of_w = x.codes.double(), codes.double()
        of_scale = torch.ones(len(of_x), 1, device=device) if x.scale is None else x.scale
        floats = x.codes.dtype.is_floating_point
        parts = (
            (of_x[self._rows], of_scale[self._rows], of_w, scales),
            (of_x, of_scale, of_w[self._columns], scales[self._columns]),
        )
        self._parts = [_exact(*each, group, floats) for each in parts]

    def excess(self, y: Tensor) -> float:
        """Largest error of y [tokens, out] as a part of its bound; infinite if y is not finite."""
        if not bool(torch.isfinite(y).all()):
            return float("inf")
        seen = (y[self._rows], y[:, self._columns])
        return max(
            float(
                ((part.double() - sums * scale).abs() / scaled_bound(sums, off, scale, y.dtype))
                .max()
                .item()
            )
            for part, (sums, off, scale) in zip(seen, self._parts, strict=True)
        )


def _exact(
    x: Tensor, of_x: Tensor, w: Tensor, scales: Tensor, group: int, floats: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, how far they may be off, and the scales of x."""
    wide = scales.double().repeat_interleave(group, 1)[:, : w.shape[1]]
    off = grouped_sum_bound(x, w, scales, group, floats=floats)
    return x @ (w * wide).T, off, of_x.double()
