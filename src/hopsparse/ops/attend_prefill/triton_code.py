"""The code of the kernels in Triton for a GPU that need not be here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from .triton import _DTYPES, TILE, _attend, shape_for, warps_of
from .triton_gradient import TILE_OF_KEYS, _of_keys, _of_queries

KERNELS = ("attend", "of_queries", "of_keys")


def compiled_for(
    kernel: str, target: tuple[str, str | int, int], dtype: torch.dtype, dim: int, *, page: int = 64
) -> bytes:
    """The code of one kernel, for lists with counts of blocks of 128.

    Args:
        kernel: One of `KERNELS`.
        target: `hip` or `cuda`, as Triton calls them; `gfx942`, or a compute capability such as
            90; threads of a warp there.
        dtype: Of q, keys and values.
        dim: Of a head.
        page: Tokens of a page.

    Returns:
        An ELF file.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    number, f, i = f"*{_DTYPES[dtype]}", "*fp32", "*i32"
    pools = (number, number, (*("i32",) * 3, "constexpr"), (*("i32",) * 3, "constexpr"))
    rows, table = (number, number, f, f), (i, i, "i32", "i32", "i32")
    walk, lists, whole = (i, i, i), (i, i, *("i32",) * 4), ("i32",) * 4
    readers, transposed = (i, i, i, i, "i32"), (i, i, "i32", "i32", "i32")
    every: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "attend": (
            _attend,
            ((number, number, f), pools, table, walk, lists, (*whole, "fp32", "fp32")),
        ),
        "of_queries": (
            _of_queries,
            ((*rows, number), pools, table, walk, lists, (*whole, "fp32")),
        ),
        "of_keys": (
            _of_keys,
            (rows, pools, readers, transposed, (number, number), (*whole[1:], "fp32")),
        ),
    }
    function, kinds = every[kernel]
    turned = kernel == "of_keys"
    shape = shape_for(dtype, dim, page, 128, TILE_OF_KEYS if turned else TILE)
    if turned:
        shape = (*shape[:5], min(shape[5], page & -page))
    names = function.arg_names
    signature = dict(zip(names, (*kinds, "constexpr", "constexpr"), strict=True))
    strides = {(1, 2, 3): 1, (1, 3, 3): 1}
    constants = {**strides, (names.index("SHAPE"),): shape, (names.index("LISTED"),): 2}
    # As launches find them: tensors begin on 16 bytes, and pages have whole lines.
    even = {
        path: [["tt.divisibility", 16]]
        for path, kind in _flat(kinds)
        if kind.startswith("*") or path[:2] in ((1, 2), (1, 3))
    }
    source = ASTSource(function, signature, constants, even)
    warps = warps_of(2 * shape[5] if turned else shape[4], shape[1])
    made = triton.compile(source, target=GPUTarget(*target), options={"num_warps": warps})
    code: bytes = made.asm["hsaco" if target[0] == "hip" else "cubin"]
    return code


def _flat(kinds: tuple[Any, ...], before: tuple[int, ...] = ()) -> Iterator[tuple[Any, str]]:
    for place, kind in enumerate(kinds):
        path = (*before, place)
        if isinstance(kind, tuple):
            yield from _flat(kind, path)
        elif kind != "constexpr":
            yield path, kind
