"""A dense matrix to the packed layout: checks, plan, run."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from ...formats._base import check_dense, nonzero_mask
from ...formats.nm import NM, full_group_error
from ...formats.pattern import NMPattern, as_nm_pattern
from ...prune.mask import check_matrix
from ...ranges import in_phase
from .._product import is_hopper
from . import plan, reference
from .plan import PackConfig, Select

_PATTERN = NMPattern(2, 4)


@in_phase("format", "pack_nm")
def pack_nm(dense: Tensor, pattern: NMPattern | str = "2:4", *, select: Select = "check") -> NM:
    """Pack a matrix for the N:M kernels, in one pass over it.

    The result is bit for bit that of `NM.from_dense`. On a Hopper GPU a kernel packs 2:4 matrices
    of bfloat16, float16 or 8-bit values (which `select="magnitude"` does not take); all else runs
    `NM.from_dense` where the matrix is. The kernel leaves a word that says what it refused. Reading
    that word is the only wait for the GPU.

    Args:
        dense: [rows, cols], any strides. Rows that start on 16 bytes with neighbouring columns are
            read 16 bytes at a time, others entry by entry; nothing is copied.
        pattern: N:M with M even and N <= M - 2, as a value or as text.
        select: "check": the matrix obeys the pattern already. "magnitude": the N largest of each
            group are kept, as `prune.magnitude` keeps them: of equal ones the first.

    Returns:
        [rows, cols] in the dtype and on the device of `dense`.

    Raises:
        ArgumentError: No such `select`, or `pattern` is no N:M; NaN or infinity where magnitudes
            are compared.
        FormatError: The matrix is empty, of a dtype that no format stores, or breaks the pattern
            (first bad row and group named).
        UnsupportedError: 8-bit values to select; a CUDA graph is being captured.

    Example:
        >>> pack_nm(torch.tensor([[1.0, 0.0, 3.0, -2.0]]), select="magnitude").to_dense()
        tensor([[ 0.,  0.,  3., -2.]])
    """
    if select not in ("check", "magnitude"):
        raise ArgumentError(
            f"select={select!r}", need='"check" or "magnitude"', hint='select="check"'
        )
    dense, nm = check_dense(dense), as_nm_pattern(pattern)
    if not _has_kernel(dense, nm, select):
        return reference.pack_nm(dense, nm, select=select)
    if _is_capturing(dense):
        raise UnsupportedError(
            "a matrix to pack while a CUDA graph is captured",
            need="a wait for the GPU, which says whether the matrix can be packed",
            hint="pack before the capture",
        )
    packed = empty_packed(dense)
    # As an unsigned number, what the kernel takes it for, -1 is more than any row and group.
    refused = torch.full((), -1, dtype=torch.int64, device=dense.device)
    enqueue(plan.default_config(select, vector=reads_vectors(dense)), dense, packed, refused)
    found = int(refused)
    if found != -1:
        _refuse(dense, found, select)
    return packed


def enqueue(config: PackConfig, dense: Tensor, packed: NM, refused: Tensor) -> None:
    """Put the kernel on torch's current stream. Nothing waits for it, and nothing is checked.

    Args:
        config: Which kernel; `vector` only if `reads_vectors(dense)`.
        dense: [rows, cols] on a Hopper GPU, of a dtype that `plan.supports`.
        packed: What `empty_packed(dense)` gave; every byte is written.
        refused: int64, one number on that GPU. It is lowered to row << 32 | group of the first
            group that cannot be packed.
    """
    # Here, because a process on the CPU needs neither.
    from ...compiler.cache import KernelCache
    from ...launch.kernel import kernel_for
    from ...launch.stream import current_stream

    device, size = dense.device.index, dense.element_size()
    spec = plan.spec_for(config, _name(dense.dtype))
    kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
    args = plan.Args(
        dense.data_ptr(),
        packed.values.data_ptr(),
        packed.meta.data_ptr(),
        refused.data_ptr(),
        dense.stride(0) * size,
        dense.stride(1) * size,
        *dense.shape,
        packed.meta.shape[1],
    )
    kernel.launch(plan.grid_for(config, *dense.shape), bytes(args), current_stream(device))


def _is_capturing(dense: Tensor) -> bool:
    """Whether a graph is captured on the GPU of `dense`, which need not be the current one."""
    from ...launch.stream import is_capturing

    return is_capturing(dense.device.index)


def empty_packed(dense: Tensor) -> NM:
    """A 2:4 matrix of the shape, dtype and device of `dense`, without contents."""
    shape, facts = (dense.shape[0], dense.shape[1]), {"pattern": str(_PATTERN)}
    specs = NM.part_specs(shape, dense.dtype, facts)
    parts = {
        name: torch.empty(size, dtype=dtype, device=dense.device)
        for name, (size, dtype) in specs.items()
    }
    return NM.from_parts(shape, parts, facts)


def reads_vectors(dense: Tensor) -> bool:
    """Whether 16 bytes at a time can be read: rows start on 16 bytes, columns are neighbours."""
    rows, cols = dense.shape
    return (
        (dense.stride(1) == 1 or cols == 1)
        and (dense.stride(0) * dense.element_size() % 16 == 0 or rows == 1)
        and dense.data_ptr() % 16 == 0
    )


def _has_kernel(dense: Tensor, pattern: NMPattern, select: Select) -> bool:
    return (
        dense.device.type == "cuda"
        and pattern == _PATTERN
        and plan.supports(_name(dense.dtype), select)
        and max(dense.shape) <= plan.LONGEST_SIDE
        and is_hopper(dense.get_device())
    )


def _refuse(dense: Tensor, found: int, select: Select) -> NoReturn:
    """Say what the kernel could not pack, in the words of the reference."""
    if select == "magnitude":
        check_matrix(dense, "weight")
    row, group = found >> 32, found & 0xFFFFFFFF
    count = int(nonzero_mask(dense[row, 4 * group : 4 * group + 4]).sum())
    raise full_group_error(_PATTERN, row, group, count)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
