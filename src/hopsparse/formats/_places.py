"""Where the values of a stored matrix are, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ._base import SparseMatrix, nonzero_mask


def places_of(w: SparseMatrix) -> Tensor:
    """For each entry [rows, cols], 1 + the index of its value among all values, or 0.

    A matrix that holds serial numbers instead of values is decoded like any other, which needs no
    knowledge of the format. Layouts depend on the element size, so numbers keep it: 16-bit ones
    are decoded a half at a time. Stored zeros get no number, since they may share a place.
    """
    values = {name: part for name, part in w.parts().items() if part.is_floating_point()}
    serials, first = {}, 1
    for name, part in values.items():
        numbers = torch.arange(first, first + part.numel(), dtype=torch.int32, device=part.device)
        serials[name] = torch.where(nonzero_mask(part), numbers.view(part.shape), 0)
        first += part.numel()
    if w.dtype.itemsize == 4:
        return _decoded(w, serials)
    low = {name: (number & 0x7FFF).to(torch.int16) for name, number in serials.items()}
    high = {name: (number >> 15).to(torch.int16) for name, number in serials.items()}
    return _decoded(w, low) | _decoded(w, high) << 15


def _decoded(w: SparseMatrix, parts: Mapping[str, Tensor]) -> Tensor:
    return w.from_parts(w.shape, {**w.parts(), **parts}, w.attributes()).to_dense().long()
