"""Layers of block-sparse weights: the kernel, where it is predicted to beat the dense product."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from ..formats import BSR
from ..ops._call import ACTIVATIONS, apply_activation, is_plain
from ..ops._product import check_inputs, check_weight
from ..ops.spmm_bsr import op as spmm_bsr


def product_of_blocks(
    layer: nn.Module, form: BSR, x: Tensor, act: str | None = None
) -> Tensor | None:
    """The product by the kernel; None where a layer multiplies by the decoded weight instead.

    That is where dense is predicted to be as fast, or a gradient is to be kept, which dense has at
    no decoding.

    Args:
        layer: Has the parts, and keeps what was made of them as `_assembled`.
        form: The weight without its tensors.
        x: [..., in_features].
        act: What follows the product.

    Raises:
        ArgumentError: `x` does not fit.
        UnsupportedError: A CUDA graph is being captured, and no call came before.
    """
    bias = cast("Tensor | None", layer._parameters["bias"])
    # Without a decoded weight to compare with, the operator decides, and decodes if it must.
    if not x.is_cuda or not layer.keep_decoded or not is_plain(x, bias):
        return None
    matrix = _put_together(layer, form)
    if not is_plain(matrix.values) or spmm_bsr.why_no_kernel(matrix, x) is not None:
        return None
    check_inputs("linear", matrix, x, bias)
    if x.numel() == 0 or not spmm_bsr.uses_kernel(matrix, x, kept=True):
        return None
    fused = act if act in ACTIVATIONS else None  # swiglu folds columns, which no strip does
    y = spmm_bsr.run_kernel(matrix, x, bias, fused or "none")
    return y if fused == act else apply_activation(y, act or "none")


def _put_together(layer: nn.Module, form: BSR) -> BSR:
    known = cast("BSR | None", layer.__dict__["_assembled"])
    if known is None or any(
        getattr(layer, name) is not part for name, part in known.parts().items()
    ):
        known = form.with_parts({name: getattr(layer, name) for name in form.parts()})
        check_weight("linear", known, BSR)
        layer.__dict__["_assembled"] = known
    return known
