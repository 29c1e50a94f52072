"""Tensor maps: the 128-byte descriptors by which TMA moves boxes of a strided tensor.

The rules are those of cuTensorMapEncodeTiled in the CUDA driver API reference, without
interleaving. The driver answers any breach with one code; here the breach has a name.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from enum import IntEnum

from ..errors import ArgumentError
from .driver import check, require_driver

MAP_BYTES = 128
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CUtensorMapSwizzle
L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # bytes -> CUtensorMapL2promotion
_MAX_RANK, _MAX_BOX, _ALIGNMENT, _MAP_ALIGNMENT = 5, 256, 16, 64
_MAX_SIZE, _STRIDE_LIMIT = 2**32, 2**40
_ONES = array("I", [1] * _MAX_RANK)
_INTERLEAVE_NONE, _FILL_ZERO = 0, 0


class Element(IntEnum):
    """Kinds of elements; the values are those of CUtensorMapDataType. FP8 travels as `U8`."""

    U8 = 0
    U16 = 1
    U32 = 2
    I32 = 3
    U64 = 4
    I64 = 5
    F16 = 6
    F32 = 7
    F64 = 8
    BF16 = 9

    @property
    def bytes(self) -> int:
        """Size of one element.

        Example:
            >>> Element.BF16.bytes
            2
        """
        return _BYTES[self]


_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2)


def check_tiled(
    address: int,
    element: Element,
    sizes: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle: int = 0,
    l2_promotion: int = 256,
) -> None:
    """Refuse what the driver would refuse, and say why. It needs no driver.

    Args:
        address: Of the first element, in device memory.
        element: Kind of the elements.
        sizes: Elements along each dimension, the contiguous one first; 1 to 5 of them.
        strides_bytes: Bytes from one index to the next, of every dimension but the first.
        box: Elements that one copy moves along each dimension.
        swizzle: Span in bytes within which 16-byte chunks are permuted in shared memory: 0 (none),
            32, 64 or 128.
        l2_promotion: Bytes that a miss of the L2 cache fetches: 0 (as they come), 64, 128 or 256.

    Raises:
        ArgumentError: It names the fact that is wrong.

    Example:
        >>> check_tiled(0, Element.BF16, (64, 10), (128,), (64, 8), swizzle=128)
        >>> check_tiled(8, Element.BF16, (64, 10), (128,), (64, 8))
        Traceback (most recent call last):
            ...
        hopsparse.errors.ArgumentError: a tensor map of address 0x8. Required: a multiple of 16 ...
    """
    _check_rank(sizes, strides_bytes, box)
    if address % _ALIGNMENT or address < 0:
        raise _wrong(f"address {address:#x}", "a multiple of 16 bytes", "an aligned copy")
    for i, size in enumerate(sizes):
        if not 1 <= size <= _MAX_SIZE:
            raise _wrong(f"size {size} in dimension {i}", "1 to 2^32 elements", "no launch at all")
    for i, stride in enumerate(strides_bytes, start=1):
        if stride % _ALIGNMENT or not 0 <= stride < _STRIDE_LIMIT:
            need = "a multiple of 16 below 2^40"
            raise _wrong(f"stride {stride} bytes in dimension {i}", need, "rows padded to 16 bytes")
    for i, extent in enumerate(box):
        if not 1 <= extent <= _MAX_BOX:
            raise _wrong(f"box {extent} in dimension {i}", "1 to 256 elements", "several copies")
    for what, value, known in (
        ("swizzle", swizzle, SWIZZLES),
        ("L2 promotion", l2_promotion, L2_PROMOTIONS),
    ):
        if value not in known:
            need = "one of " + ", ".join(map(str, known))
            raise _wrong(f"{what} {value}", need, "0, which is none")
    inner = box[0] * element.bytes
    if inner % _ALIGNMENT:
        raise _wrong(f"box row of {inner} bytes", "a multiple of 16 bytes", "a wider box")
    if swizzle and inner > swizzle:
        need = f"at most its swizzle, {swizzle} bytes"
        raise _wrong(f"box row of {inner} bytes", need, "a narrower box and several copies")


def _check_rank(
    sizes: tuple[int, ...], strides_bytes: tuple[int, ...], box: tuple[int, ...]
) -> None:
    rank = len(sizes)
    if not 1 <= rank <= _MAX_RANK:
        raise _wrong(f"{rank} dimensions", "1 to 5", "dimensions folded into one")
    if len(strides_bytes) != rank - 1:
        got = f"{len(strides_bytes)} strides for {rank} dimensions"
        raise _wrong(got, "one for every dimension but the first", "sizes[0] is contiguous")
    if len(box) != rank:
        got = f"a box of {len(box)} extents for {rank} dimensions"
        raise _wrong(got, "one for every dimension", "1 where a copy spans nothing")


def _wrong(fact: str, need: str, hint: str) -> ArgumentError:
    return ArgumentError(f"a tensor map of {fact}", need=need, hint=hint)


def encode(
    address: int,
    element: Element,
    sizes: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle: int = 0,
    l2_promotion: int = 256,
) -> bytes:
    """The tensor map, to be laid at a multiple of 64 bytes of a kernel's argument struct.

    What lies outside the tensor reads as zero, and is not written; but a store writes whole chunks
    of 16 bytes, so that a row whose bytes are no multiple of 16 is written beyond its end. The
    last 4096 maps are kept: a repeated call costs one look-up. A map holds an address and no more,
    so a kept one stays right when the memory behind it is freed and given out again.

    Args:
        address: As for `check_tiled`, like all the rest.
        element: Kind of the elements.
        sizes: Elements along each dimension, the contiguous one first.
        strides_bytes: Bytes from one index to the next, of every dimension but the first.
        box: Elements that one copy moves along each dimension.
        swizzle: 0, 32, 64 or 128.
        l2_promotion: 0, 64, 128 or 256.

    Raises:
        ArgumentError: `check_tiled` refuses.
        UnsupportedError: There is no driver.
        DriverError: The driver refuses all the same.
    """
    return _encode(address, element, sizes, strides_bytes, box, swizzle, l2_promotion)


@functools.lru_cache(maxsize=4096)
def _encode(
    address: int,
    element: Element,
    sizes: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    l2_promotion: int,
) -> bytes:
    check_tiled(
        address, element, sizes, strides_bytes, box, swizzle=swizzle, l2_promotion=l2_promotion
    )
    driver = require_driver()
    storage = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
    target = -(-ctypes.addressof(storage) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    dimensions = array("Q", sizes)
    strides = array("Q", (*strides_bytes, 0))  # an empty array would have no address
    extents = array("I", box)
    code = driver.cuTensorMapEncodeTiled(
        target,
        element,
        len(sizes),
        address,
        dimensions.buffer_info()[0],
        strides.buffer_info()[0],
        extents.buffer_info()[0],
        _ONES.buffer_info()[0],
        _INTERLEAVE_NONE,
        SWIZZLES[swizzle],
        L2_PROMOTIONS[l2_promotion],
        _FILL_ZERO,
    )
    check(code, "cuTensorMapEncodeTiled")
    return ctypes.string_at(target, MAP_BYTES)
