"""Tensors in files of `torch.save`, loaded with weights_only: no object is ever unpickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...errors import FormatError
from .._base import check_dense
from ..csr import CSR
from .entries import canonical, from_column_pointers, from_pointers
from .limits import check_size


def torch_tensors(path: Path) -> dict[str, Callable[[list[str]], CSR]]:
    """The 2-D tensors of a file by name; a file of one tensor gives it the name of the file.

    Raises:
        FormatError: The file is damaged, holds more than tensors, or none of two dimensions.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises what its reader, zip and unpickler raise
        raise FormatError(
            f"cannot be loaded without unpickling ({str(error).strip().splitlines()[0]:.90})",
            need="a tensor, or tensors by name, of torch.save; objects are never unpickled",
            hint="safetensors.torch.save_file(tensors, path)",
        ) from None
    named = {path.stem: loaded} if isinstance(loaded, Tensor) else loaded
    tensors: dict[str, Callable[[list[str]], CSR]] = {
        str(name): partial(_matrix, item)
        for name, item in (named.items() if isinstance(named, Mapping) else ())
        if isinstance(item, Tensor) and item.ndim == 2
    }
    if not tensors:
        raise FormatError(
            f"holds a {type(loaded).__name__} without a 2-D tensor",
            need="a 2-D tensor, or a dict of tensors with one",
            hint="torch.save(tensor, path)",
        )
    return tensors


def _matrix(tensor: Tensor, notes: list[str]) -> CSR:
    tensor = tensor.detach()
    shape = (tensor.shape[0], tensor.shape[1])
    if tensor.layout == torch.strided:
        return _from_strided(tensor, notes)
    if tensor.dense_dim():
        raise FormatError(
            f"a sparse tensor with entries of {tensor.dense_dim()} dimensions",
            need="one number an entry",
            hint="tensor.to_dense()",
        )
    if tensor.layout == torch.sparse_coo:
        row, col = tensor._indices()
        return canonical(shape, row, col, tensor._values(), notes)
    if tensor.layout == torch.sparse_csr:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return from_pointers(shape, *parts, notes)
    if tensor.layout == torch.sparse_csc:
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        return from_column_pointers(shape, *parts, notes)
    raise FormatError(
        f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}",
        need="strided, sparse_coo, sparse_csr or sparse_csc",
        hint="tensor.to_sparse_csr()",
    )


def _from_strided(tensor: Tensor, notes: list[str]) -> CSR:
    check_size((tensor.shape[0], tensor.shape[1]), tensor.numel())
    if tensor.dtype == torch.float64 or not (
        tensor.dtype.is_floating_point or tensor.dtype == torch.int8
    ):
        row, col = tensor.nonzero().unbind(1)
        return canonical((tensor.shape[0], tensor.shape[1]), row, col, tensor[row, col], notes)
    return CSR.from_dense(check_dense(tensor))
