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

#: What a launch takes as the kernel's argument; bytes are the fastest.
Args = bytes | bytearray | memoryview | ctypes.Structure | ctypes.Array[Any]

_MAX_DYNAMIC_SMEM, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_DEFAULT_SMEM, _PORTABLE_CLUSTER = 48 * 1024, 8
_ARGS_ALIGNMENT = 128  # what CUtensorMap asks for in C++; the driver wants 64


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

        # All that a launch writes is made here, once; the lock keeps threads from mixing it.
        self._lock = threading.Lock()
        self._config = launch_config(spec)
        self._attribute_count = self._config.attribute_count
        self._args, address = _aligned(spec.args_bytes)
        self._current = ctypes.c_void_p()
        self._current_ref = ctypes.byref(self._current)
        self._get_current = require_driver().cuCtxGetCurrent
        self._launch = functools.partial(
            require_driver().cuLaunchKernelEx,
            ctypes.byref(self._config),
            ctypes.c_void_p(self.function),
            (ctypes.c_void_p * 1)(address),
            None,
        )

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
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        if type(args) is not bytes:
            args = bytes(args)
        check_launch(self.spec, (x, y, z), len(args), pdl)
        with self._lock:
            config = self._config
            config.grid_x, config.grid_y, config.grid_z = x, y, z
            config.stream = stream
            config.attribute_count = self._attribute_count + pdl
            self._args[:] = args
            code = self._get_current(self._current_ref)
            if not code and self._current.value == self.context:
                code = self._launch()
            else:  # another GPU is current, or none was ever used on this thread
                with entered(self.context):
                    code = self._launch()
        if code:
            check(code, "cuLaunchKernelEx")


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


def _aligned(size: int) -> tuple[memoryview, int]:
    """Memory that begins at an aligned address, and that address."""
    storage = bytearray(size + _ARGS_ALIGNMENT)
    address = ctypes.addressof(ctypes.c_char.from_buffer(storage))
    skip = -address % _ARGS_ALIGNMENT
    return memoryview(storage)[skip : skip + size], address + skip


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
