"""What a layer does before its first call, by the format of its weight."""

from __future__ import annotations

from torch import Tensor

from ..formats import BSR, NM, Quantized, SparseMatrix
from ..ops._call import ACTIVATIONS
from ..ops.spmm_bsr.ahead import prepare as prepare_bsr
from ..ops.spmm_nm.ahead import prepare as prepare_nm
from ..ops.spmm_nm.dense import counts_of
from ._codes import prepare_codes


def prepare_kernels(
    matrix: SparseMatrix, tokens: int, bias: Tensor | None, act: str | None
) -> bool:
    """Compile and load the kernels of calls with up to `tokens` rows of x.

    Args:
        matrix: The weight.
        tokens: Most rows of x.
        bias: Of the layer.
        act: What follows its product.

    Returns:
        Whether some of those calls multiply by the decoded weight all the same.
    """
    if isinstance(matrix, BSR):
        return not prepare_bsr(matrix, tokens, act=act if act in ACTIVATIONS else None)
    if isinstance(matrix, NM) and prepare_nm(matrix, tokens, act=act):
        return counts_of(matrix).reach(tokens)
    return not (isinstance(matrix, Quantized) and prepare_codes(matrix, tokens, bias, act))
