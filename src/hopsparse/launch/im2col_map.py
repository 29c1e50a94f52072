"""Tensor maps of images, by which TMA gathers the windows of a convolution (im2col mode).

A copy fetches the same tap of as many windows as a box has, one behind the other along lines, lines
of windows and images. Where the first window lies and which tap it is the kernel says.
"""

from __future__ import annotations

import ctypes
import functools
from array import array

from ..errors import ArgumentError
from .driver import check, require_driver
from .tensormap import MAP_BYTES, SWIZZLES, Element, check_tiled

_PROMOTE_256, _MAP_ALIGNMENT = 3, 64
_MOST_PIXELS, _MOST_CHANNELS, _MOST_STRIDE = 1024, 256, 8
_CORNERS = range(-128, 128)


def check_im2col(
    sizes: tuple[int, int, int, int],
    corners: tuple[tuple[int, int], tuple[int, int]],
    box: tuple[int, int],
    strides: tuple[int, int],
) -> None:
    """Refuse what the driver would refuse of these, and say why; `check_tiled` does the rest.

    Args:
        sizes: Channels, width, height, images.
        corners: Of the first taps of all windows, along x and y: the first from the first pixel,
            the last from the last pixel.
        box: Channels and windows of a copy.
        strides: From window to window along x and y.

    Raises:
        ArgumentError: It names the fact that is wrong.

    Example:
        >>> check_im2col((64, 7, 7, 2), ((-1, -1), (-1, -1)), (64, 128), (1, 1))
    """
    for name, corner in zip(("first", "last"), corners, strict=True):
        if any(each not in _CORNERS for each in corner):
            raise _wrong(f"{name} corner {corner}", "-128 to 127", "less padding")
    channels, pixels = box
    if not 1 <= pixels <= _MOST_PIXELS or not 1 <= channels <= _MOST_CHANNELS:
        need = f"at most {_MOST_CHANNELS} channels and {_MOST_PIXELS} windows"
        raise _wrong(f"box {box}", need, "several copies")
    if any(not 1 <= stride <= _MOST_STRIDE for stride in strides):
        raise _wrong(f"strides {strides}", f"1 to {_MOST_STRIDE}", "windows that are copied")
    for axis, (first, last) in enumerate(zip(*corners, strict=True)):
        if sizes[1 + axis] + last - first < 1:
            raise _wrong(f"no window along {'xy'[axis]}", "at least one", "larger images")


@functools.lru_cache(maxsize=4096)
def encode_im2col(
    address: int,
    element: Element,
    sizes: tuple[int, int, int, int],
    strides_bytes: tuple[int, int, int],
    corners: tuple[tuple[int, int], tuple[int, int]],
    box: tuple[int, int],
    strides: tuple[int, int],
) -> bytes:
    """The tensor map, swizzled by 128 bytes; what lies outside an image reads as zero.

    Args:
        address: Of the first channel of the first pixel, in device memory.
        element: Kind of the numbers.
        sizes: Channels, width, height, images.
        strides_bytes: From pixel to pixel, line to line, image to image.
        corners: As for `check_im2col`.
        box: Channels and windows of a copy.
        strides: From window to window along x and y.

    Raises:
        ArgumentError: `check_im2col` or `check_tiled` refuses.
        UnsupportedError: There is no driver.
        DriverError: The driver refuses all the same.
    """
    check_im2col(sizes, corners, box, strides)
    check_tiled(address, element, sizes, strides_bytes, (box[0], 1, 1, 1), swizzle=128)
    driver = require_driver()
    storage = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
    target = -(-ctypes.addressof(storage) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    arrays = (
        array("Q", sizes),
        array("Q", strides_bytes),
        *(array("i", corner) for corner in corners),
        array("I", (1, *strides, 1)),
    )
    dimensions, pitches, first, last, steps = (each.buffer_info()[0] for each in arrays)
    code = driver.cuTensorMapEncodeIm2col(
        *(target, element, len(sizes), address, dimensions, pitches),
        *(first, last, *box, steps),
        *(0, SWIZZLES[128], _PROMOTE_256, 0),  # not interleaved; filled with zeros
    )
    check(code, "cuTensorMapEncodeIm2col")
    return ctypes.string_at(target, MAP_BYTES)


def _wrong(fact: str, need: str, hint: str) -> ArgumentError:
    return ArgumentError(f"a map of windows of {fact}", need=need, hint=hint)
