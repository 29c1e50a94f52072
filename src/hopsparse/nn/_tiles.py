"""Layers of CSR weights: tiles of tensor cores, where they were measured to beat dense."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..formats import BSR, CSR
from ..ops._call import apply_activation, is_plain, is_transformed
from ..ops._product import check_weight
from ..ops.spmm_csr import dispatch, layers
from ..ops.spmm_csr.ahead import prepare as prepare_csr
from ..ops.spmm_csr.packed import Packed
from ._blocks import product_of_blocks
from ._kept import MadeOf, made_of, still_there


class Tiled(NamedTuple):
    """What a layer keeps: its weight in tiles, or None where dense may be faster, and of what."""

    parts: list[MadeOf]
    packed: Packed | None


def product_by_kernel(
    layer: nn.Module, form: BSR | CSR, x: Tensor, act: str | None
) -> Tensor | None:
    """`product_of_blocks` or `product_of_tiles`; None where a layer multiplies dense instead."""
    if isinstance(form, BSR):
        return product_of_blocks(layer, form, x, act)
    return product_of_tiles(layer, form, x, act)


def product_of_tiles(
    layer: nn.Module, form: CSR, x: Tensor, act: str | None = None
) -> Tensor | None:
    """The product in tiles; None where a layer multiplies by the decoded weight instead.

    So it does while a CUDA graph is captured, if nothing was packed before.

    Args:
        layer: Has the parts, and keeps what was made of them as `_assembled`.
        form: The weight without its tensors.
        x: [..., in_features]; what does not fit is left to the dense product to refuse.
        act: What follows the product.

    Raises:
        FormatError: The parts form no matrix.
    """
    bias = cast("Tensor | None", layer._parameters["bias"])
    # First whether something records: torch.compile warns of a cache, and `suits` has one.
    if not is_plain(x, bias) or is_transformed() or not layer.keep_decoded:
        return None
    if not layers.suits(form.shape, x) or not _fits(layer, form, x, bias):
        return None
    found = _tiled(layer, x)
    if found is None or found.packed is None:
        return None
    current = partial(still_there, found.parts, layer._buffers)
    dispatch.pin(found.packed, x, current)
    y = layers.multiply(found.packed, x.reshape(-1, form.shape[1]), bias)
    return apply_activation(y.view(*x.shape[:-1], form.shape[0]), act or "none")


def prepare_tiles(layer: nn.Module, tokens: int) -> bool:
    """Pack the weight ahead of calls without a gradient; whether none of them decodes.

    A layer that keeps no decoded weight runs `spmm_csr`, and is made ready for that.

    Args:
        layer: As for `product_of_tiles`.
        tokens: Most rows of x.

    Raises:
        FormatError: The parts form no matrix.
        CompileError: A kernel does not compile.
    """
    matrix = cast(CSR, layer.matrix)
    row = torch.empty(1, dtype=matrix.dtype, device=matrix.device).expand(1, matrix.shape[1])
    if not layer.keep_decoded:
        return prepare_csr(matrix, tokens)
    if not layers.suits(matrix.shape, row):
        return False
    found = _tiled(layer, row)
    return found is not None and found.packed is not None and tokens <= layers.MOST_TOKENS


def _fits(layer: nn.Module, form: CSR, x: Tensor, bias: Tensor | None) -> bool:
    values = layer._buffers.get("values")
    if values is None or x.shape[-1:] != form.shape[1:] or x.numel() == 0:
        return False
    if bias is not None and bias.shape != form.shape[:1]:
        return False
    others = (x,) if bias is None else (x, bias)
    return all(each.dtype == values.dtype and each.device == values.device for each in others)


def _tiled(layer: nn.Module, x: Tensor) -> Tiled | None:
    """What is kept, made anew where a part is another tensor or was changed."""
    known = cast("Tiled | None", layer.__dict__["_assembled"])
    if known is not None and still_there(known.parts, layer._buffers):
        return known
    matrix = cast(CSR, layer.matrix)
    if dispatch.is_captured(x) or not layer._may_keep(matrix):  # type: ignore[operator]
        return None
    check_weight("linear", matrix, CSR)
    layer.__dict__["_assembled"] = known = Tiled(made_of(matrix), layers.packed_for(matrix))
    return known
