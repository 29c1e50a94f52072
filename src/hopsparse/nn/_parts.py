"""The tensors of a stored matrix apart from their module: made, laid out again, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, FormatError
from ..formats import (
    BSR,
    Attribute,
    Quantized,
    SparseMatrix,
    format_named,
    parse_pattern,
    stored_named,
)
from ..formats._base import check_dtype, check_shape
from ..formats.bsr import blocks_per_line
from ..ops._product import COMPUTE_DTYPES
from ..ops.pack_nm.op import pack_nm
from ..ops.spmm_nm.kernel import ACTIVATIONS, SWIGLU


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
    """A dense weight in a format; arguments and errors are those of `SparseLinear.from_linear`."""
    if isinstance(options.get("pattern"), str):
        options = options | {"pattern": parse_pattern(options["pattern"])}
    try:
        if fmt == "nm" and weight.is_cuda and options.keys() <= {"pattern"}:
            return pack_nm(weight, **options)  # the same bits, in one pass of a kernel
        return format_named(fmt).from_dense(weight, **options)
    except TypeError as error:
        raise ArgumentError(
            f"options {sorted(options)} for format {fmt!r} ({error})",
            need="options of its from_dense: pattern for nm, block for bsr and bsr24",
            hint=f'SparseLinear.from_linear(linear, "{fmt}")',
        ) from error


def after_cast(before: SparseMatrix, matrix: SparseMatrix) -> Mapping[str, Tensor]:
    """Parts of a matrix that a cast of its values left laid out otherwise than they must be.

    Rows of small blocks start on 128 bytes.

    Args:
        before: As it was.
        matrix: As it is.
    """
    if not isinstance(matrix, BSR) or before.dtype not in COMPUTE_DTYPES:
        return {}
    block = matrix.block
    sizes = {blocks_per_line(block, each.dtype.itemsize) for each in (before, matrix)}
    return BSR.from_dense(matrix.to_dense(), block).parts() if len(sizes) > 1 else {}


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


def checked_act(name: Any, layer: nn.Module) -> Any:
    """An activation that a layer can apply.

    Args:
        name: As operators call it, or None.
        layer: The layer.

    Raises:
        ArgumentError: There is no such activation, or swiglu of rows that are no multiple of 16.
    """
    rows = layer.out_features
    if name is not None and name not in (*ACTIVATIONS[1:], SWIGLU):
        raise ArgumentError(
            f"act={name!r}",
            need="one of " + ", ".join((*ACTIVATIONS[1:], SWIGLU)) + ", or None",
            hint=f"{ACTIVATIONS[1]!r}, or a module behind the layer",
        )
    if name == SWIGLU and isinstance(rows, int) and rows % 16:
        raise ArgumentError(
            f"act={name!r} for {rows} rows",
            need="a multiple of 16 rows, as interleave_gate_up makes them",
            hint="rows of zeros at the end of gate and of up",
        )
    return name
