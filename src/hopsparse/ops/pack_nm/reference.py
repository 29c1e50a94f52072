"""What pack_nm means: `NM.from_dense`, behind `prune.magnitude` where entries are selected."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ...errors import UnsupportedError
from ...formats.nm import NM
from ...formats.pattern import NMPattern
from ...prune import magnitude


def pack_nm(
    dense: Tensor, pattern: NMPattern, *, select: Literal["check", "magnitude"] = "check"
) -> NM:
    """Pack `dense` [rows, cols], any strides, on any device."""
    if select == "check":
        return NM.from_dense(dense, pattern)
    if dense.dtype.itemsize == 1:
        raise UnsupportedError(
            f"select='magnitude' of {dense.dtype} values",
            need="float32, bfloat16 or float16",
            hint="select before the values are rounded to 8 bits",
        )
    return NM.from_dense(magnitude(dense, pattern), pattern)
