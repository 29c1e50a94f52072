"""The tensors of a stored matrix apart from their module: made, laid out again, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, FormatError
from ..formats import BSR, Attribute, Quantized, SparseMatrix, format_named, stored_named
from ..formats._base import check_dtype, check_shape
from ..formats.bsr import blocks_per_line
from ..ops._product import COMPUTE_DTYPES
from ..ops.pack_nm.op import pack_nm


def allocated(
    shape: tuple[int, int],
    dtype: torch.dtype,
    fmt: str,
    attributes: Mapping[str, Attribute],
    device: torch.device | str | None,
) -> SparseMatrix:
    """A matrix without contents; arguments and errors are those of `SparseLinear.empty`."""
    kind = stored_named(fmt)
    check_shape(shape)
    check_dtype(dtype)
    specs = kind.part_specs(shape, dtype, attributes)
    parts = {
        name: torch.empty(size, dtype=part_dtype, device=device)
        for name, (size, part_dtype) in specs.items()
    }
    return kind.from_parts(shape, parts, attributes)


def stored(weight: Tensor, fmt: str, options: dict[str, Any]) -> SparseMatrix:
    """A dense weight in a format; arguments and errors are those of its `from_dense`."""
    if fmt == "nm" and weight.is_cuda and options.keys() <= {"pattern"}:
        return pack_nm(weight, **options)  # the same bits, in one pass of a kernel
    return format_named(fmt).from_dense(weight, **options)


def realigned(matrix: BSR, itemsize: int) -> Mapping[str, Tensor]:
    """Parts of a matrix whose values had `itemsize` bytes when they were laid out, as they must be.

    Rows of small blocks start on 128 bytes.
    """
    block = matrix.block
    if blocks_per_line(block, itemsize) == blocks_per_line(block, matrix.dtype.itemsize):
        return {}
    return BSR.from_dense(matrix.to_dense(), block).parts()


def broken_parts(matrix: SparseMatrix, layer: str) -> list[str]:
    """What is wrong with the contents of a matrix on the CPU, as a list of one sentence or none."""
    # Elsewhere than on the CPU a look at the contents would wait for the device.
    if any(part.device.type != "cpu" for part in matrix.parts().values()):
        return []
    try:
        matrix.validate()
    except FormatError as error:
        what = f"{matrix.name} matrix of {list(matrix.shape)}"
        return [f"the parts of {layer} are no {what}: {error}"]
    return []


def device_type(x: Tensor) -> str:
    """`cpu`, `cuda` or another, of what a layer was called with.

    Raises:
        ArgumentError: It is no tensor.
    """
    if not isinstance(x, Tensor):
        raise ArgumentError(
            f"linear: x of type {type(x).__name__}", need="a tensor", hint="torch.as_tensor(x)"
        )
    return "cuda" if x.is_cuda else x.device.type  # The text of a device costs more.


def values_only(
    before: SparseMatrix, fn: Callable[[Tensor], Tensor]
) -> tuple[torch.dtype, Callable[[Tensor], Tensor]]:
    """What `nn.Module._apply` does to a layer's tensors, so that casts reach values alone.

    Args:
        before: The matrix of the layer.
        fn: As `nn.Module._apply` is given it.

    Returns:
        The dtype that it casts to, and the function that moves indices and codes but casts none.

    Raises:
        ArgumentError: Values would become something that no product takes.
    """
    after = fn(torch.empty(0, dtype=before.dtype, device=before.device)).dtype
    if before.dtype in COMPUTE_DTYPES and after not in COMPUTE_DTYPES:
        raise ArgumentError(
            f"a cast of a sparse weight to {after}",
            need="float32, bfloat16 or float16",
            hint="layer.to_dense(), or quantize the weight",
        )
    # A cast of quantized values changes what they stand for, and no part.
    quantized = isinstance(before, Quantized)
    fixed = {id(part) for part in before.parts().values()} if quantized else set()

    def guarded(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        if moved.dtype == tensor.dtype:
            return moved
        if tensor.dtype in COMPUTE_DTYPES and id(tensor) not in fixed:
            return moved
        return tensor.to(moved.device)

    return after, guarded
