"""One rank's piece of a layer, and its product into memory that is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError
from ..formats import NM, Quantized
from ..formats.shards import WHOLE_ROWS, columns_of, rows_of, whole_columns_of
from ..nn import SparseLinear
from ..ops.spmm_nm import op as spmm_nm

Layer = SparseLinear | nn.Linear


def check_layer(layer: object) -> Layer:
    """Refuse what cannot be shared.

    Raises:
        ArgumentError: It is no linear layer, or holds another format than nm.
    """
    if isinstance(layer, nn.Linear):
        return layer
    if isinstance(layer, SparseLinear):
        whole_columns_of(layer.matrix)
        return layer
    raise ArgumentError(
        f"a module of class {type(layer).__name__}",
        need="a SparseLinear, or an nn.Linear",
        hint="SparseLinear.from_linear(linear)",
    )


def whole_of(layer: Layer, *, rows: bool) -> int:
    """What is not cut: rows of a panel, columns of a unit; 8 of a dense layer, for kernels."""
    if isinstance(layer, nn.Linear):
        return 8
    return WHOLE_ROWS if rows else whole_columns_of(layer.matrix)


def cut(layer: Layer, start: int, stop: int, *, rows: bool) -> Layer:
    """A layer of some rows, with their bias, or of some columns, without one; its own memory.

    Args:
        layer: What is cut; it is left as it is.
        start: First row or column.
        stop: Behind the last.
        rows: Which of them.

    Raises:
        ArgumentError: They are not packed apart.
    """
    bias = None
    if rows and layer.bias is not None:
        bias = nn.Parameter(layer.bias.detach()[start:stop].clone(), layer.bias.requires_grad)
    if isinstance(layer, SparseLinear):
        made = SparseLinear(_cut_matrix(layer.matrix, start, stop, rows=rows), bias)
        made.keep_decoded = layer.keep_decoded
        if rows:
            made.act = layer.act
        return made.train(layer.training)
    weight = layer.weight.detach()
    weight = weight[start:stop] if rows else weight[:, start:stop]
    dense = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    dense.weight = nn.Parameter(weight.clone(), layer.weight.requires_grad)
    dense.register_parameter("bias", bias)
    return dense.train(layer.training)


def _cut_matrix(matrix: Any, start: int, stop: int, *, rows: bool) -> NM | Quantized:
    piece: NM | Quantized = (rows_of if rows else columns_of)(matrix, start, stop)
    # A view would keep the whole weight alive on every rank.
    return piece.map_parts(torch.Tensor.clone) if rows else piece


def write_product(layer: Layer, x: Tensor, y: Tensor) -> None:
    """Y = layer(x); nothing is recorded for autograd.

    A dense layer, and a 2:4 one of 16 bits on a GPU that has its kernel, write where y is; others
    write elsewhere, and are copied.

    Args:
        layer: One rank's piece.
        x: [..., k].
        y: [..., out], contiguous; its dtype is that of x, or float32.
    """
    if isinstance(layer, SparseLinear):
        act = layer.act or "none"
        if x.is_cuda and isinstance(layer._form, NM) and spmm_nm.is_plain(x):
            packed, bias = layer._packed(), layer._parameters["bias"]
            if spmm_nm.check_operands("linear", packed, x, bias):
                from ..ops.spmm_nm.device import enqueue

                enqueue(y, packed, x, bias, None, act)
                return
        y.copy_(layer(x))
        return
    flat = x.reshape(-1, x.shape[-1])
    if x.is_cuda and y.dtype == x.dtype and layer.weight.dtype == x.dtype:
        out = y.view(-1, y.shape[-1])
        if layer.bias is None:
            torch.mm(flat, layer.weight.t(), out=out)
        else:
            torch.addmm(layer.bias, flat, layer.weight.t(), out=out)
        return
    y.copy_(F.linear(x, layer.weight, layer.bias))


def learns(x: Tensor, modules: Sequence[nn.Module]) -> bool:
    """Whether autograd must see a call."""
    if not torch.is_grad_enabled():
        return False
    if x.requires_grad:
        return True
    return any(
        tensor.requires_grad
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    )


def is_cast(x: Tensor) -> bool:
    """Whether autocast chooses the dtypes of a call."""
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
