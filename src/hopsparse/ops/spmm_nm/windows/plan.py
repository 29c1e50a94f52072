"""Which kernel multiplies which windows, and the bytes behind the argument of spmm_nm."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from struct import Struct

from ....plan import KernelSpec
from ....plan.division import Divisor, divisor
from ..._windows import Windows
from ..cost import Problem
from ..kernel import ARGS_BYTES, Config, Numbers, spec_of_numbers
from ..plan import CANDIDATES

UNIT = 64  # channels that a box has
# What the copy engine's im2col mode holds for images: corners of 8 bits, strides of 3.
_MOST_CORNER, _MOST_STRIDE = 128, 8

#: Windows of a line and lines of an image, units of a tap and taps of a line, each as a divisor;
#: units, images; strides along x and y, padding, dilation. `struct WindowArgs` of windows.cuh.
_SCALARS = Struct("<18i 56x")
WINDOW_ARGS_BYTES = ARGS_BYTES + _SCALARS.size


def why_not(windows: Windows, channels: int) -> str | None:
    """What keeps the copy engine from gathering these windows, as a clause; None if nothing does.

    Example:
        >>> why_not(Windows((3, 3), (2, 2), (1, 1)), 128), why_not(Windows((3, 3)), 96)
        (None, '96 channels are no multiple of 64')
    """
    if channels % UNIT:
        return f"{channels} channels are no multiple of {UNIT}"
    for name in ("kernel", "padding", "dilation"):
        rows, columns = getattr(windows, name)
        if rows != columns:
            return f"{name} differs along rows and columns"
    span = (windows.kernel[0] - 1) * windows.dilation[0]
    padding = windows.padding[0]
    if padding > _MOST_CORNER or span > _MOST_CORNER + padding or span >= 2 * _MOST_CORNER:
        return f"windows of {span + 1} with padding of {padding} are too wide"
    if padding - span >= _MOST_CORNER:
        return f"padding of {padding} is too wide"
    if max(windows.stride) > _MOST_STRIDE:
        return f"a stride of {max(windows.stride)}"
    return None


def window_scalars(windows: Windows, images: tuple[int, int, int, int]) -> bytes:
    """What follows the argument of spmm_nm.

    Args:
        windows: As `why_not` takes them.
        images: Their number, channels, height and width.
    """
    n, channels, height, width = images
    places_y, places_x = windows.places(height, width)
    of_tap = channels // UNIT
    by = [divisor(size) for size in (places_x, places_y, of_tap, windows.kernel[1])]
    numbers = [_signed(number) for each in by for number in _numbers(each)]
    stride_y, stride_x = windows.stride
    rest = (stride_x, stride_y, windows.padding[0], windows.dilation[0])
    return _SCALARS.pack(*numbers, windows.taps * of_tap, n, *rest)


def problem_of(windows: Windows, images: tuple[int, int, int, int], out: int) -> Problem:
    """The product that it is.

    Example:
        >>> problem_of(Windows((3, 3), padding=(1, 1)), (2, 64, 5, 5), 128)
        Problem(tokens=50, out=128, k=576)
    """
    n, channels, height, width = images
    places_y, places_x = windows.places(height, width)
    return Problem(n * places_y * places_x, out, windows.taps * channels)


@cache
def windows_spec(config: Config, dtype: str, activation: str, direct: bool) -> KernelSpec:
    """The kernel of a tile: that of spmm_nm with another source of tokens.

    Args:
        config: The tile.
        dtype: Of w, x and y: bfloat16 or float16.
        activation: One of `kernel.ACTIVATIONS`.
        direct: Whether y is stored a number at a time.
    """
    spec = spec_of_numbers(config, Numbers(dtype, dtype, dtype), activation, False, direct)
    head, entry = spec.text.split('extern "C"', 1)
    entry = entry.replace("spmm_nm_kernel(const __grid_constant__ spmm_nm::Args args)", _ENTRY)
    entry = entry.replace("run<Config>(args,", "run<Config>(all.args,")
    return replace(
        spec,
        name=f"{spec.name} windows",
        kernel="ops/spmm_nm/windows.cuh",
        text=f'{head}{_SOURCE}extern "C"{entry}',
        entry="spmm_nm_windows_kernel",
        args_bytes=WINDOW_ARGS_BYTES,
    )


def window_specs() -> list[KernelSpec]:
    """Every kernel of windows with ReLU, as networks have it, and some of each other kind."""
    specs = [windows_spec(config, "bfloat16", "relu", False) for config in CANDIDATES]
    specs += [windows_spec(config, "bfloat16", "none", False) for config in CANDIDATES[::6]]
    specs.append(windows_spec(CANDIDATES[0], "float16", "silu", False))
    specs.append(windows_spec(CANDIDATES[-1], "bfloat16", "gelu", True))
    return specs


def _numbers(by: Divisor) -> tuple[int, int, int]:
    return by.size, by.factor, by.shift


def _signed(number: int) -> int:
    """The number of 32 bits with a sign that has the same bits."""
    return number - 2**32 if number >= 2**31 else number


_ENTRY = "spmm_nm_windows_kernel(const __grid_constant__ spmm_nm::WindowArgs all)"
# The one function that differs: what the producer calls, for this Config.
_SOURCE = f"""
static_assert(sizeof(spmm_nm::WindowArgs) == {WINDOW_ARGS_BYTES}, "windows.cuh and plan.py differ");

namespace spmm_nm {{
template <>
__device__ __forceinline__ void fill_tokens<Config>(const Args& args, u32 smem, Place<Config> at,
                                                    u32 stage, int k, Origin from) {{
  fill_windows<Config>(reinterpret_cast<const WindowArgs&>(args), smem, at, stage, k, from);
}}
}}  // namespace spmm_nm

"""
