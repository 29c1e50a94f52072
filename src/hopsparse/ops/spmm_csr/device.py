"""The kernels over a CSR matrix on a GPU: one launch, and one more where rows are cut."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...errors import UnsupportedError
from ...launch import Kernel, KnownLaunches, current_stream, kernel_for
from ...plan import KernelSpec
from ...ranges import in_phase
from . import tiles
from .packed import Packed, rows_for_lanes
from .plan import COMBINE_TILE, VECTOR_BYTES, Args, blocks_for, combine_spec, spec_for, team_for
from .schedule import Schedule

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
#: Bytes of a row of x that the kernel counts in 32 bits.
_LONGEST_ROW = 2**32 - 1
# Tiles are the y axis of a grid.
_MOST_TILES = 65_535

_BOUND = KnownLaunches()


@dataclass(frozen=True)
class Indices:
    """Where entries are, and who works on them.

    Attributes:
        indptr: [rows + 1], contiguous.
        indices: [nnz], contiguous.
        schedule: Of the rows.
    """

    indptr: Tensor
    indices: Tensor
    schedule: Schedule

    @property
    def widths(self) -> tuple[int, int]:
        """Bytes of a pointer and of a column."""
        return self.indptr.element_size(), self.indices.element_size()

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.indptr.numel() - 1


def laid_out(x: Tensor) -> Tensor:
    """The same tensor as a kernel reads it: neighbouring features, rows of any stride."""
    near = x.shape[1] <= 1 or x.stride(1) == 1
    fits = 0 <= x.stride(0) * x.element_size() <= _LONGEST_ROW
    return x if near and fits else x.contiguous()


def is_vector(features: int, *tensors: Tensor) -> bool:
    """Whether every row of all of them is whole pieces of 16 bytes, and starts on one."""
    itemsize = tensors[0].element_size()
    if features * itemsize % VECTOR_BYTES:
        return False
    starts = [each.data_ptr() | each.stride(0) * itemsize for each in tensors]
    return not any(start % VECTOR_BYTES for start in starts)


@in_phase("sparse", "csr_matmul")
def multiply(at: Indices, values: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """A @ x + bias, of arguments that were checked.

    Args:
        at: The matrix.
        values: [nnz].
        x: [k, features] on a Hopper GPU, with a feature at least.
        bias: [rows] or None.

    Returns:
        [rows, features], contiguous.

    Raises:
        UnsupportedError: No driver; too many features; or a graph is captured and a kernel is not
            loaded yet.
        CompileError: A kernel does not compile.
    """
    x, values = laid_out(x), values.contiguous()
    bias = None if bias is None else bias.contiguous()
    features, schedule = x.shape[1], at.schedule
    y = x.new_empty((at.rows, features))
    partial = x.new_empty((schedule.slots, features), dtype=torch.float32)
    spec = multiply_spec(at, x)
    team = team_for(features, x.element_size(), vector=is_vector(features, x))
    tiles = -(-features // team.tile(x.element_size()))
    combine_tiles = -(-features // COMBINE_TILE)
    _check_tiles(max(tiles, combine_tiles), features)
    args = _args(at, x, y)
    args.values = values.data_ptr()
    args.bias = 0 if bias is None else bias.data_ptr()
    args.partial = partial.data_ptr()
    _launch(spec, x, (blocks_for(team, schedule.count), tiles, 1), args)
    if schedule.slots:
        grid = (schedule.cuts.shape[0], combine_tiles, 1)
        _launch(combine_spec(NAMES[x.dtype]), x, grid, args)
    return y


@in_phase("sparse", "sddmm_csr")
def sample(at: Indices, u: Tensor, x: Tensor) -> Tensor:
    """u[row] . x[column] at every entry, of arguments that were checked.

    Args:
        at: The matrix.
        u: [rows, features] on a Hopper GPU.
        x: [k, features], likewise.

    Returns:
        [nnz].

    Raises:
        UnsupportedError, CompileError: As for `multiply`.
    """
    u, x = laid_out(u), laid_out(x)
    y = u.new_empty(at.indices.numel())
    features = x.shape[1]
    team = team_for(features, x.element_size(), vector=is_vector(features, u, x))
    spec = spec_for("sample", NAMES[x.dtype], team, at.widths)
    args = _args(at, x, y)
    args.u, args.u_stride = u.data_ptr(), u.stride(0) * u.element_size()
    _launch(spec, x, (blocks_for(team, at.schedule.count), 1, 1), args)
    return y


@in_phase("sparse", "spmm_csr")
def multiply_tiles(w: Packed, x: Tensor, bias: Tensor | None) -> Tensor:
    """The product x @ w.T + bias by tensor cores, of arguments that were checked.

    Args:
        w: [out, k].
        x: [tokens, k] on a Hopper GPU, with a token and a column at least, any strides.
        bias: [out] or None.

    Returns:
        [tokens, out], contiguous.

    Raises:
        UnsupportedError, CompileError: As for `multiply`.
    """
    bias = None if bias is None else bias.contiguous()
    tokens, rows = x.shape[0], w.shape[0]
    count = tiles.token_tiles(tokens)
    laid, y = rows_for_lanes(x), x.new_empty((tokens, rows))
    args = tiles.TileArgs(
        words=w.words.data_ptr(),
        prefixes=w.prefixes.data_ptr(),
        values=w.values.data_ptr(),
        starts=w.starts.data_ptr(),
        x=laid.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        rows=rows,
        tokens=tokens,
        units=w.units,
        pitch=laid.stride(0) * laid.element_size(),
        k=laid.shape[1],
    )
    grid = (-(-rows // tiles.UNIT), -(-tokens // (8 * count)), 1)
    _launch(tiles.tile_spec(NAMES[x.dtype], count, w.room), x, grid, args)
    return y


def load_tiles(values: Tensor, token_tiles: Sequence[int], room: int = tiles.ROOMS[0]) -> None:
    """Compile and load the kernels of `multiply_tiles`.

    Args:
        values: Of a weight on a Hopper GPU.
        token_tiles: Blocks of eight tokens, of each kernel.
        room: Of its units.

    Raises:
        CompileError, UnsupportedError: As for `multiply`.
    """
    for count in token_tiles:
        spec = tiles.tile_spec(NAMES[values.dtype], count, room)
        _loaded(spec, values.get_device())


def multiply_spec(at: Indices, x: Tensor) -> KernelSpec:
    """The kernel that `multiply` runs for an x that is laid out."""
    features = x.shape[1]
    team = team_for(features, x.element_size(), vector=is_vector(features, x))
    return spec_for("multiply", NAMES[x.dtype], team, at.widths)


def _args(at: Indices, x: Tensor, y: Tensor) -> Args:
    return Args(
        x=x.data_ptr(),
        columns=at.indices.data_ptr(),
        pointers=at.indptr.data_ptr(),
        spans=at.schedule.spans.data_ptr(),
        cuts=at.schedule.cuts.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0) * x.element_size(),
        rows=at.rows,
        features=x.shape[1],
        span_count=at.schedule.count,
    )


def _launch(
    spec: KernelSpec, x: Tensor, grid: tuple[int, int, int], args: ctypes.Structure
) -> None:
    device = x.get_device()
    stream, content = current_stream(device), bytes(args)
    # All that a launch depends on, and nothing else: equal keys are the same launch.
    key = (spec, grid, content, device, stream)
    bound = _BOUND.get(key)
    if bound is None:
        bound = _BOUND.keep(key, _loaded(spec, device).bind(grid, content, stream))
    bound()


def _loaded(spec: KernelSpec, device: int) -> Kernel:
    return kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)


def _check_tiles(tiles: int, features: int) -> None:
    if tiles > _MOST_TILES:
        raise UnsupportedError(
            f"spmm_csr: {features} features",
            need=f"at most {_MOST_TILES * COMBINE_TILE}",
            hint="x in pieces of columns",
        )
