"""Products with windows on a GPU: a call that was seen before is one look-up and one launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ....compiler import KernelCache
from ....formats.nm import NM
from ....launch import (
    Element,
    KnownLaunches,
    Turn,
    current_stream,
    device_facts,
    encode_im2col,
    kernel_for,
    starts_early,
)
from ....ranges import in_phase
from ....tune import machine_of
from ..._windows import Windows
from ..cost import Problem
from ..device import Launch, address_of, check_sides, grid_of
from ..kernel import Config, stores_directly
from ..plan import choose
from .plan import UNIT, problem_of, window_scalars, windows_spec

_BOUND = KnownLaunches()
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ELEMENTS = {torch.bfloat16: Element.BF16, torch.float16: Element.F16}
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class WindowLaunch(Launch):
    """All of a call but its pointers; `x` is images, and the strides are theirs."""

    windows: Windows
    images: Shape
    strides: Shape

    def _more(self) -> bytes:
        return window_scalars(self.windows, self.images)

    def _x_map(self, address: int, row: int) -> bytes:
        assert self.element is not None
        n, channels, height, width = self.images
        size = self.element.bytes
        # A dimension of one has any stride in torch, and a legal one here.
        pixel = self.strides[3] if width > 1 else channels
        line = self.strides[2] if height > 1 else width * pixel
        image = self.strides[0] if n > 1 else height * line
        padding = self.windows.padding[0]
        last = padding - (self.windows.kernel[0] - 1) * self.windows.dilation[0]
        stride_y, stride_x = self.windows.stride
        return encode_im2col(
            address,
            self.element,
            (channels, width, height, n),
            (pixel * size, line * size, image * size),
            ((-padding, -padding), (last, last)),
            (UNIT, self.sizes[6]),
            (stride_x, stride_y),
        )


@in_phase("sparse", "spmm_nm_windows")
def run_windows(
    w: NM,
    x: Tensor,
    windows: Windows,
    bias: Tensor | None,
    activation: str,
    config: Config | None = None,
) -> Tensor:
    """The product of arguments that `op.why_no_windows` and `check_operands` passed.

    Args:
        w: [out, taps * c], 2:4, bfloat16 or float16.
        x: [n, c, height, width], channels-last, not empty.
        windows: Of x.
        bias: [out] or None.
        activation: One of `kernel.ACTIVATIONS`.
        config: The tile; None chooses one.

    Returns:
        [n * windows of an image, out], contiguous.
    """
    shape, strides = tuple(x.shape), x.stride()
    problem = problem_of(windows, shape, w.shape[0])  # type: ignore[arg-type]
    y = x.new_empty((problem.tokens, problem.out))
    bias = None if bias is None else bias.contiguous()
    device = x.get_device()
    turn = Turn(current_stream(device), starts_early(w.values, w.meta))
    addresses = (x.data_ptr(), w.values.data_ptr(), w.meta.data_ptr(), y.data_ptr())
    key = (
        *(addresses, address_of(bias), shape, strides, x.dtype, windows, problem.out),
        *(activation, config, device, turn),
    )
    bound = _BOUND.get(key)
    if bound is None:
        launch = launch_for_windows(
            problem, x.dtype, activation, device, config, windows, (shape, strides)
        )
        bound = _BOUND.keep(key, launch.bind(turn, addresses, 0, (address_of(bias), 0), 1))
    bound()
    return y


@lru_cache(maxsize=1024)
def launch_for_windows(
    problem: Problem,
    dtype: torch.dtype,
    activation: str,
    device: int,
    config: Config | None,
    windows: Windows,
    images: tuple[Shape, Shape],
) -> WindowLaunch:
    """The launch of a problem; compiles and loads its kernel where that was not done before.

    Args:
        problem: The product.
        dtype: Of x and w.
        activation: One of `kernel.ACTIVATIONS`.
        device: Ordinal of the GPU.
        config: The tile; None takes the one that the product of the matrix would.
        windows: Of the images.
        images: Shape and strides.

    Raises:
        UnsupportedError: No driver, another GPU, a side of over 2^31 - 2^13, or a graph is captured
            and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    check_sides(problem)
    name = _NAMES[dtype]
    config = config or choose(
        problem,
        device_facts(device).sm_count,
        dtype=name,
        machine=machine_of(device),
        activation=activation,
    )
    spec = windows_spec(config, name, activation, stores_directly(problem.out, name))
    kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
    grid, sizes = grid_of(kernel, config, problem)
    return WindowLaunch(kernel, config, problem, _ELEMENTS[dtype], grid, sizes, windows, *images)


def forget_window_launches() -> None:
    """Plan every launch anew; kernels stay loaded."""
    launch_for_windows.cache_clear()
    _BOUND.clear()
