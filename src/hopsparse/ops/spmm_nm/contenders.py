"""Our 2:4 products as contests take them: `hopsparse.measure.contest.Way`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...formats.nm import NM
from ...measure.codes import CodedInput, CodedWeight
from ...measure.contest import Way
from .scaled.op import Scaling, plan_scaled, spmm_nm_scaled

#: The first word of our names in tables and files.
OURS = "hopsparse"


class CodedProduct:
    """`spmm_nm_scaled` of a packed weight, results in bfloat16.

    Args:
        weight: [out, k], 2:4.
        sums: `promoted` or `fast`; those of integers are exact.

    Example:
        >>> codes = torch.tensor([[3, 0, 0, -4]], dtype=torch.int8)
        >>> CodedProduct(CodedWeight(codes))(CodedInput(torch.ones(1, 4, dtype=torch.int8)))
        tensor([[-1.]], dtype=torch.bfloat16)
    """

    def __init__(self, weight: CodedWeight, sums: str = "promoted") -> None:
        self.packed = NM.from_dense(weight.codes)
        self._scale, self._static, self._sums = weight.scale, weight.input_scale, sums

    def __call__(self, x: CodedInput) -> Tensor:
        """Multiply codes [tokens, k]."""
        return spmm_nm_scaled(self.packed, x.codes, self.scaling(x))

    def scaling(self, x: CodedInput) -> Scaling:
        """The scales of both sides, and how sums are taken."""
        of_x = self._static if x.scale is None else x.scale
        return Scaling(self._scale, of_x, sums=self._sums)


def coded_ways(dtype: torch.dtype) -> list[Way]:
    """Our products of a dtype of codes; of E4M3 both ways to take sums, the fast one first.

    The first is what ratios are to, and all peers take fast sums.

    Args:
        dtype: int8 or float8_e4m3fn.

    Raises:
        ArgumentError: Another dtype.

    Example:
        >>> [way.name for way in coded_ways(torch.float8_e4m3fn)]
        ['hopsparse_fast', 'hopsparse_promoted']
    """
    if dtype == torch.int8:
        return [_way(OURS, "exact")]
    if dtype != torch.float8_e4m3fn:
        raise ArgumentError(
            f"8-bit products of {dtype}", need="int8 or float8_e4m3fn", hint="torch.float8_e4m3fn"
        )
    return [_way(f"{OURS}_{sums}", sums) for sums in ("fast", "promoted")]


def _way(name: str, sums: str) -> Way:
    def prepare(weight: CodedWeight, bias: Tensor | None) -> CodedProduct:
        return CodedProduct(weight, "promoted" if sums == "exact" else sums)

    return Way(
        name, prepare, lambda by, x: plan_scaled(by.packed, x.codes, by.scaling(x)).why, sums
    )
