"""A cubin that is loaded on one GPU, and its launch."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError
from ..plan.spec import KernelSpec
from .config import check_launch, launch_config
from .driver import (
    call,
    check,
    device_facts,
    entered,
    primary_context,
    relaxed_capture,
    require_driver,
)
from .stream import is_capturing

#: What a launch takes as the kernel's argument.
Args = bytes | bytearray | memoryview | ctypes.Structure | ctypes.Array[Any]

_MAX_DYNAMIC_SMEM, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_DEFAULT_SMEM, _PORTABLE_CLUSTER = 48 * 1024, 8
_ARGS_ALIGNMENT = 128  # what CUtensorMap asks for in C++; the driver wants 64
# What a launch returns, and launches nothing, where this thread has no context or that of another
# GPU: CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE.
_FOREIGN_CONTEXT = (201, 400)


class Kernel:
    """A loaded kernel. Threads may share it.

    The module is never unloaded: that would break a CUDA graph that is being captured.

    Args:
        image: The cubin.
        spec: What it was compiled from.
        device: Ordinal of the GPU, the same that torch uses; it need not be the current one.

    Attributes:
        spec: As passed.
        device: As passed.
        context: Handle of the context it is loaded in, the one that torch uses.
        function: Handle of the function.

    Raises:
        UnsupportedError: No driver; a GPU of another architecture; torch's current stream on that
            GPU is capturing, and is left as it was.
        DriverError: The driver cannot load the image, or cannot give the shared memory.
    """

    def __init__(self, image: bytes, spec: KernelSpec, device: int) -> None:
        device_facts(device).require(spec.arch)
        refuse_while_capturing(spec, device)
        self.spec = spec
        self.device = device
        self.context = primary_context(device)
        with entered(self.context), relaxed_capture():
            self.function = _load(image, spec)

    def launch(
        self, grid: tuple[int, int, int] | int, args: Args, stream: int, *, pdl: bool = False
    ) -> None:
        """Put the kernel on a stream. Nothing waits for it.

        Args:
            grid: Blocks along x, y and z, multiples of the cluster; a number is blocks along x.
            args: The argument struct, `spec.args_bytes` long. It is copied: 128-byte tensor maps
                inside it are aligned if they lie at multiples of 64.
            stream: Handle of a stream of this kernel's GPU; 0 is the default stream.
            pdl: Let it start before the kernel ahead of it on the stream has ended.

        Raises:
            ArgumentError: A grid, an argument or a `pdl` that does not go with the spec.
            DriverError: The driver refused; the fault may be of a kernel launched earlier.
        """
        self.bind(grid, args, stream, pdl=pdl)()

    def bind(
        self, grid: tuple[int, int, int] | int, args: Args, stream: int, *, pdl: bool = False
    ) -> Bound:
        """A launch that is checked and put together once, to be made any number of times.

        Args:
            grid: As for `launch`, like all the rest.
            args: The argument struct; it is copied.
            stream: Handle of a stream.
            pdl: Let it start early.

        Raises:
            ArgumentError: A grid, an argument or a `pdl` that does not go with the spec.
        """
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        content = bytes(args)
        check_launch(self.spec, (x, y, z), len(content), pdl)
        return Bound(self, (x, y, z), content, stream, pdl)


class Bound:
    """A launch of which nothing changes any more: a call is one call of the driver.

    It owns the memory that the driver reads and never writes it again, so that threads may share
    it without a lock.

    Attributes:
        name: Operator and name of the kernel.
    """

    __slots__ = ("_args", "_context", "_launch", "name")

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], args: bytes, stream: int, pdl: bool
    ) -> None:
        self.name = f"{kernel.spec.op}/{kernel.spec.name}"
        config = launch_config(kernel.spec)
        config.grid_x, config.grid_y, config.grid_z = grid
        config.stream = stream
        config.attribute_count += pdl
        self._args, address = _aligned(args)
        self._context = kernel.context
        self._launch = functools.partial(
            require_driver().cuLaunchKernelEx,
            ctypes.byref(config),
            ctypes.c_void_p(kernel.function),
            (ctypes.c_void_p * 1)(address),
            None,
        )

    def __call__(self) -> None:
        """Put the kernel on the stream. Nothing waits for it.

        Raises:
            DriverError: The driver refused; the fault may be of a kernel launched earlier.
        """
        if code := self._launch():
            self._launch_again(code)

    def _launch_again(self, code: int) -> None:
        # Asking for the current context before each launch would cost as much as the launch.
        if code in _FOREIGN_CONTEXT:
            with entered(self._context):
                code = self._launch()
        check(code, "cuLaunchKernelEx")


class KnownLaunches(dict[tuple[object, ...], Bound]):
    """Launches by all that they depend on, so that equal keys are the same launch.

    Addresses recur, because torch hands freed memory out again; where they do not, it is emptied.
    A launch takes about 2.5 KB.
    """

    MOST = 4096

    def keep(self, key: tuple[object, ...], bound: Bound) -> Bound:
        """Know a launch, and give it back."""
        if len(self) >= self.MOST:
            self.clear()
        self[key] = bound
        return bound


def _load(image: bytes, spec: KernelSpec) -> int:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), image)
    call("cuModuleGetFunction", ctypes.byref(function), module, spec.entry.encode())
    call("cuFuncLoad", function)  # else it is loaded at its first launch, perhaps inside a capture
    if spec.smem_bytes > _DEFAULT_SMEM:
        call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SMEM, spec.smem_bytes)
    if math.prod(spec.cluster) > _PORTABLE_CLUSTER:
        call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER, 1)
    assert function.value is not None
    return function.value


def _aligned(content: bytes) -> tuple[bytearray, int]:
    """Memory that holds a copy from an aligned address on, and that address."""
    storage = bytearray(len(content) + _ARGS_ALIGNMENT)
    address = ctypes.addressof(ctypes.c_char.from_buffer(storage))
    skip = -address % _ARGS_ALIGNMENT
    storage[skip : skip + len(content)] = content
    return storage, address + skip


def refuse_while_capturing(spec: KernelSpec, device: int) -> None:
    """Loading code is illegal while a CUDA graph is captured: say so before the stream is touched.

    Raises:
        UnsupportedError: torch's current stream on that GPU is capturing.
    """
    if is_capturing(device):
        raise UnsupportedError(
            f"{spec.name}, a kernel to load while a CUDA graph is captured",
            need="kernels that are loaded before",
            hint="make the same call once before the capture",
        )


_LOADED: dict[tuple[KernelSpec, int], Kernel] = {}
_LOADING = threading.Lock()


def kernel_for(spec: KernelSpec, device: int, cubin_of: Callable[[KernelSpec], bytes]) -> Kernel:
    """The kernel of a spec on a GPU, loaded at the first call and kept for the life of the process.

    Threads may call it at once: they may compile one spec twice, but load it once.

    Args:
        spec: The kernel.
        device: Ordinal of the GPU.
        cubin_of: Gives the cubin of a spec that is not loaded yet.

    Raises:
        UnsupportedError: As for `Kernel`; `cubin_of` is then not called while a graph is captured.
        DriverError: As for `Kernel`.
    """
    key = (spec, device)
    if (known := _LOADED.get(key)) is not None:
        return known
    device_facts(device).require(spec.arch)
    refuse_while_capturing(spec, device)
    image = cubin_of(spec)
    with _LOADING:
        if (known := _LOADED.get(key)) is None:
            known = _LOADED[key] = Kernel(image, spec, device)
    return known
