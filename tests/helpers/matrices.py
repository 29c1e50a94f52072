"""Matrices for format tests: every dtype, odd shapes, every way a dense tensor can be laid out."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from hopsparse.formats import VALUE_DTYPES, NMPattern

LAYOUTS = ("plain", "transpose", "column slice", "offset view", "expand")
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

dtypes = st.sampled_from(VALUE_DTYPES)
layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**20)
# Odd sides, sides around a byte, a block, a panel; never large.
sides = st.sampled_from([1, 2, 3, 7, 8, 9, 16, 31, 33, 63, 64, 65, 130])
shapes = st.tuples(sides, sides)
densities = st.sampled_from([0.0, 0.03, 0.3, 0.5, 1.0])


def bits(tensor: Tensor) -> Tensor:
    """The values as integers, so that NaN equals itself."""
    return tensor.contiguous().view(_INTS[tensor.element_size()])


def without_negative_zero(dense: Tensor) -> Tensor:
    """`dense` as formats promise to return it, by a way of its own: through float64."""
    zero = dense.double() == 0
    return torch.where(zero, 0, bits(dense)).view(dense.dtype)


def assert_same(got: Tensor, dense: Tensor) -> None:
    """Bitwise equality, up to the sign of zero."""
    assert got.dtype == dense.dtype
    assert got.shape == dense.shape
    assert torch.equal(bits(got), bits(without_negative_zero(dense)))


def random_bits(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Uniform bit patterns: NaN payloads, infinities, denormals and both zeros all occur."""
    size = dtype.itemsize
    raw = torch.randint(0, 256, (shape[0], shape[1] * size), generator=generator)
    return raw.to(torch.uint8).view(_INTS[size]).view(dtype)


def random_dense(
    shape: tuple[int, int], dtype: torch.dtype, density: float, layout: str, seed: int
) -> Tensor:
    """A matrix of `shape` with about `density` non-zeros, laid out in memory as `layout` says."""
    generator = torch.Generator().manual_seed(seed)
    rows, cols = shape
    if layout == "transpose":
        return _thinned((cols, rows), dtype, density, generator).T
    if layout == "column slice":
        return _thinned((rows, cols * 2 + 3), dtype, density, generator)[:, 1 : 1 + 2 * cols : 2]
    if layout == "offset view":
        return _thinned((rows + 2, cols), dtype, density, generator)[1:-1]
    if layout == "expand":
        return _thinned((1, cols), dtype, density, generator).expand(rows, cols)
    return _thinned(shape, dtype, density, generator)


def random_nm(
    shape: tuple[int, int], pattern: NMPattern, dtype: torch.dtype, seed: int, n: int | None = None
) -> Tensor:
    """A matrix with at most `n` (default: exactly N) kept entries in every group of M."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-shape[1] // pattern.m)
    noise = torch.rand(shape[0], groups, pattern.m, generator=generator)
    keep = noise.argsort(-1).argsort(-1) < (pattern.n if n is None else n)
    keep = keep.flatten(1)[:, : shape[1]]
    values = random_bits(shape, dtype, generator)
    return torch.where(keep, bits(values), 0).view(dtype)


def _thinned(
    shape: tuple[int, int], dtype: torch.dtype, density: float, generator: torch.Generator
) -> Tensor:
    values = random_bits(shape, dtype, generator)
    keep = torch.rand(shape, generator=generator) < density
    return torch.where(keep, bits(values), 0).view(dtype)
