"""Convolutions of 2:4 weights whose windows the kernel gathers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..formats import NM
from ..ops._call import ACTIVATIONS, is_plain
from ..ops._windows import Windows
from ..ops.spmm_nm.windows.op import spmm_nm_windows, why_no_windows
from .hooks import has_hooks
from .sparse_linear import SparseLinear


def product_of_windows(layer: nn.Module, x: Tensor, windows: Windows) -> Tensor | None:
    """The product without a matrix of windows; None where a kernel cannot make it.

    Args:
        layer: A `SparseLinear` of a 2:4 weight, if it is to be one launch.
        x: [n, channels, height, width].
        windows: Of x.

    Returns:
        [n * windows of an image, out_features].

    Raises:
        ArgumentError: `x` does not fit the layer.
        UnsupportedError: A CUDA graph is being captured, and the kernel is not loaded yet.
    """
    if type(layer) is not SparseLinear or not isinstance(layer._form, NM) or not x.is_cuda:
        return None
    bias, act = layer._parameters["bias"], layer.act or "none"
    # Who listens to the layer would miss a call, and who records would miss a launch.
    if has_hooks(layer) or act not in ACTIVATIONS or not is_plain(x, bias):
        return None
    packed = layer._packed()
    if torch.is_autocast_enabled("cuda") or not is_plain(packed.values):
        return None
    if why_no_windows(packed, x, windows) is not None:
        return None
    return spmm_nm_windows(packed, x, windows, bias, act)
