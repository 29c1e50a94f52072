"""When a decoded weight may be kept, and until when it is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..formats import SparseMatrix
from ..ops._product import Plan, check_capture, check_weight, finish_decoding


class MadeOf(NamedTuple):
    """A part that a weight was decoded from, as it was then."""

    name: str
    part: Tensor
    version: int
    address: int


def made_of(matrix: SparseMatrix) -> list[MadeOf]:
    """The parts of a matrix as they are now."""
    parts = matrix.parts().items()
    return [MadeOf(name, part, part._version, part.data_ptr()) for name, part in parts]


def kept_plan(plan: Plan, matrix: SparseMatrix) -> Plan:
    """What a layer says that keeps what an operator would decode at every call."""
    nbytes = matrix.shape[0] * matrix.shape[1] * matrix.dtype.itemsize
    kept = f"w is decoded once and kept, {nbytes} bytes"
    return replace(plan, why=plan.why.replace("w is decoded at every call", kept))


def decoded(matrix: SparseMatrix) -> tuple[list[MadeOf], Tensor]:
    """Check and decode a weight, in the dtype of the values: its parts, and what they made."""
    check_weight("linear", matrix)
    check_capture(matrix, "one call of the layer before the capture")
    parts = made_of(matrix)
    # A tensor made in inference mode could not serve a later call that trains x or the bias.
    with torch.inference_mode(False), torch.no_grad():
        weight = matrix.to_dense()
    finish_decoding(weight)
    return parts, weight


def still_there(parts: list[MadeOf], buffers: Mapping[str, Tensor | None]) -> bool:
    """Whether the buffers are the same tensors, unchanged. Only edits through `.data` go unseen."""
    for name, old, version, address in parts:
        part = buffers.get(name)
        if part is not old or part.requires_grad:
            return False
        if part._version != version or part.data_ptr() != address:
            return False
    return True


def may_keep(matrix: SparseMatrix) -> bool:
    """Whether changes of the parts would be noticed, so that what was decoded can be kept."""
    # Under torch.func what is decoded belongs to the transform, and would outlive it.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return all(
        # Subclasses are fake or traced tensors; inference tensors do not count their changes.
        part.device.type in ("cpu", "cuda")
        and type(part) in (Tensor, nn.Parameter)
        and not part.requires_grad
        and not part.is_inference()
        for part in matrix.parts().values()
    )
