"""Layers that share their inputs as one layer, and one layer as several again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..formats import NM, Quantized, SparseMatrix, stack_rows
from ..nn import SparseLinear, has_hooks
from ..ops import interleave_gate_up, pack_nm

_PANEL = 64  # rows that are packed together


def why_apart(layers: Sequence[nn.Module]) -> str | None:
    """What keeps layers from being one product, as a clause; None if nothing does.

    Args:
        layers: That take the same inputs.
    """
    for layer in layers:
        if type(layer) is not SparseLinear:
            return f"one is a {type(layer).__name__}"
        if has_hooks(layer) or layer.act is not None:
            return "one has hooks, or an activation of its own"
        if not layer.matrix.parts().keys() <= layer._buffers.keys():
            return "one is trained"
    found = [cast(SparseLinear, layer) for layer in layers]
    matrices = [layer.matrix for layer in found]
    if any(not isinstance(_codes(matrix), NM) for matrix in matrices):
        return f"one is stored as {next(m.name for m in matrices if not isinstance(_codes(m), NM))}"
    facts = [_facts(layer, matrix) for layer, matrix in zip(found, matrices, strict=True)]
    if any(each != facts[0] for each in facts):
        return "they differ in form, dtype, device or bias"
    scales = [matrix.input_scale for matrix in matrices if isinstance(matrix, Quantized)]
    if any(s is not None and not torch.equal(s, cast(Tensor, scales[0])) for s in scales):
        return "their inputs have scales of their own"
    return None


def join(layers: Sequence[SparseLinear], *, gate_up: bool = False) -> SparseLinear:
    """One layer with the rows of several, which go together as `why_apart` says.

    Args:
        layers: One below the other.
        gate_up: Two layers, whose rows alternate as `act="swiglu"` wants them; it has that then.
    """
    # Autocast has no torch.cat of 8-bit floats, nor of 16-bit ones of another kind than its own.
    with torch.autocast(layers[0].matrix.device.type, enabled=False):
        return _joined(layers, gate_up)


def _joined(layers: Sequence[SparseLinear], gate_up: bool) -> SparseLinear:
    matrices = [layer.matrix for layer in layers]
    codes = [cast(NM, _codes(matrix)) for matrix in matrices]
    first = matrices[0]
    rows_together = interleave_gate_up if gate_up else _below
    if not gate_up and all(each.shape[0] % _PANEL == 0 for each in codes):
        packed = stack_rows(codes)
    else:
        packed = _packed(rows_together(*(each.to_dense() for each in codes)), codes[0])
    matrix: SparseMatrix = packed
    if isinstance(first, Quantized):
        scales = rows_together(*(cast(Quantized, each).scales for each in matrices))
        matrix = Quantized.of(packed, scales, first.scheme, first.logical, first.input_scale)
    biases = [layer.bias for layer in layers]
    bias = None if biases[0] is None else rows_together(*(cast(Tensor, b).detach() for b in biases))
    made = _like(layers[0], matrix, bias)
    made.act = "swiglu" if gate_up else None
    return made


def part(
    layer: SparseLinear,
    sizes: Sequence[int],
    biases: Sequence[nn.Parameter | None],
    *,
    gate_up: bool = False,
) -> list[SparseLinear]:
    """The layers that `join` made one of.

    Args:
        layer: What it made.
        sizes: Rows of each.
        biases: Those that the layers had: an optimizer may know them, so that they come back.
        gate_up: As it was joined.
    """
    matrix = layer.matrix
    dense = cast(NM, _codes(matrix)).to_dense()
    made = []
    for i, first in enumerate(_starts(sizes)):
        rows = i if gate_up else slice(first, first + sizes[i])
        own: SparseMatrix = _packed(_take(dense, rows), cast(NM, _codes(matrix)))
        if isinstance(matrix, Quantized):
            scales = _take(matrix.scales, rows)
            scheme, of, scale = matrix.scheme, matrix.logical, matrix.input_scale
            own = Quantized.of(own, scales, scheme, of, scale)
        bias, known = None if layer.bias is None else _take(layer.bias.detach(), rows), biases[i]
        one = _like(layer, own, bias)
        if known is not None and one.bias is not None:
            fits = (known.dtype, known.device) == (one.bias.dtype, one.bias.device)
            if fits:
                known.data.copy_(one.bias.data)
                one.bias = known
        made.append(one)
    return made


def _like(layer: SparseLinear, matrix: SparseMatrix, bias: Tensor | None) -> SparseLinear:
    made = SparseLinear(matrix, bias).train(layer.training)
    if made.bias is not None and layer.bias is not None:
        made.bias.requires_grad_(layer.bias.requires_grad)
    if "keep_decoded" in layer.__dict__:
        made.keep_decoded = layer.keep_decoded
    return made


def _facts(layer: SparseLinear, matrix: SparseMatrix) -> tuple[object, ...]:
    codes = cast(NM, _codes(matrix))
    facts = codes.pattern, codes.dtype, matrix.shape[1], matrix.dtype, matrix.device
    scheme = matrix.scheme if isinstance(matrix, Quantized) else None
    return *facts, scheme, layer.bias is None, layer.training


def _codes(matrix: SparseMatrix) -> SparseMatrix:
    return matrix.codes() if isinstance(matrix, Quantized) else matrix


def _packed(dense: Tensor, like: NM) -> NM:
    return pack_nm(dense.contiguous(), like.pattern)


def _below(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _take(rows: Tensor, which: slice | int) -> Tensor:
    """Rows in a row, or the first or second eight of every sixteen."""
    if isinstance(which, slice):
        return rows[which].clone()
    return rows.reshape(-1, 2, 8, *rows.shape[1:])[:, which].flatten(0, 1).contiguous()
