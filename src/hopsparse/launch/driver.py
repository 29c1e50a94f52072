"""libcuda through ctypes: loaded once, on the first need, and every return code looked at.

ctypes and not cuda.bindings, which without a driver can leave a lock held: its next call then
hangs for ever. Opening the library by its name fails at once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import DriverError, GpuLostError, UnsupportedError

_LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100
_SM_COUNT, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76  # CUdevice_attribute
_RELAXED = 2  # CUstreamCaptureMode

_INT, _UINT, _SIZE, _PTR = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (_UINT,),
    "cuGetErrorName": (_INT, _PTR),
    "cuDeviceGet": (_PTR, _INT),
    "cuDeviceGetAttribute": (_PTR, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_PTR, _INT),
    "cuCtxGetCurrent": (_PTR,),
    "cuCtxPushCurrent_v2": (_PTR,),
    "cuCtxPopCurrent_v2": (_PTR,),
    "cuThreadExchangeStreamCaptureMode": (_PTR,),
    "cuModuleLoadData": (_PTR, ctypes.c_char_p),
    "cuModuleGetFunction": (_PTR, _PTR, ctypes.c_char_p),
    "cuFuncLoad": (_PTR,),
    "cuFuncSetAttribute": (_PTR, _INT, _INT),
    "cuLaunchKernelEx": (_PTR, _PTR, _PTR, _PTR),
    "cuOccupancyMaxActiveClusters": (_PTR, _PTR, _PTR),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (_PTR, _PTR, _INT, _SIZE),
    "cuTensorMapEncodeTiled": (_PTR, _INT, _UINT, *[_PTR] * 5, *[_INT] * 4),
    "cuTensorMapEncodeIm2col": (
        *(_PTR, _INT, _UINT, *[_PTR] * 3),
        *(_PTR, _PTR, _UINT, _UINT, _PTR, *[_INT] * 4),
    ),
}

_OTHER_GPU = "compile for this GPU, or install a driver as new as the compiler"
_FAILED_KERNEL = (
    "the kernel that failed may be an earlier one, and this process can use the GPU no more: run "
    "it again with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to see which"
)
# CUresult of a kernel that failed; every later call returns it as well.
_FAILED = frozenset((700, 702, 710, *range(714, 720)))
_CAPTURE = "make this call once before the CUDA graph is captured"
_HINTS = {
    1: "compare grid, block, cluster and shared memory with the limits of the GPU",
    2: "free device memory: smaller tensors, or torch.cuda.empty_cache()",
    3: _FAILED_KERNEL,
    101: "an ordinal below torch.cuda.device_count()",
    200: _OTHER_GPU,
    201: "use the device that the kernel was loaded on",
    209: _OTHER_GPU,
    218: _OTHER_GPU,
    222: _OTHER_GPU,
    400: "use a stream of the device that the kernel was loaded on",
    500: 'compare the entry of the spec with the extern "C" kernels of its text',
    701: "a plan with fewer registers, or less shared memory, a block",
    802: "start the fabric manager of this machine",
    803: "restart after the driver was updated, so that kernel module and library agree",
    912: "a smaller cluster",
    **dict.fromkeys(_FAILED, _FAILED_KERNEL),
    **dict.fromkeys(range(900, 909), _CAPTURE),
}
_OTHERWISE = "look the name up in the CUDA driver API reference, under CUresult"


@functools.cache
def require_driver() -> ctypes.CDLL:
    """The driver library, initialised, with the types of every call that is made here.

    Raises:
        UnsupportedError: No libcuda, one without a call that is needed, or no GPU behind it.
        DriverError: The driver cannot start.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        raise UnsupportedError(
            f"a machine without {_LIBRARY}",
            need="the driver of an NVIDIA GPU",
            hint="the same call with tensors on the CPU",
        ) from None
    for name, types in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise UnsupportedError(
                f"a driver without {name}",
                need="a driver of CUDA 13.0 or newer",
                hint="update the driver, or use tensors on the CPU",
            ) from None
        function.argtypes, function.restype = types, _INT
    code = library.cuInit(0)
    if code == _NO_DEVICE:
        raise UnsupportedError(
            "a driver that sees no GPU",
            need="one H100 or H200",
            hint="look at CUDA_VISIBLE_DEVICES, or use tensors on the CPU",
        )
    if code:
        raise _error(library, code, "cuInit")
    return library


def check(code: int, call: str) -> None:
    """Raise what a driver call returned, unless it succeeded.

    Args:
        code: The CUresult.
        call: Name of the call.

    Raises:
        DriverError: The code is not zero; it names the call, the code and what to do.

    Example:
        >>> check(0, "cuLaunchKernelEx")
    """
    if code:
        raise _error(require_driver(), code, call)


def call(name: str, *arguments: object) -> None:
    """Make one driver call, for everything but the launch itself, which has no time to spare.

    Raises:
        UnsupportedError: There is no driver.
        DriverError: The call failed.
    """
    check(getattr(require_driver(), name)(*arguments), name)


def _error(library: ctypes.CDLL, code: int, call: str) -> DriverError:
    name = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(name))
    kind = GpuLostError if code in _FAILED else DriverError
    return kind(
        f"{call} returned {(name.value or b'an unknown code').decode()} ({code})",
        need="CUDA_SUCCESS (0)",
        hint=_HINTS.get(code, _OTHERWISE),
    )


@dataclass(frozen=True)
class DeviceFacts:
    """What the driver says about one GPU.

    Attributes:
        ordinal: Its number, the same that torch uses.
        capability: Compute capability, major and minor.
        sm_count: Streaming multiprocessors.
    """

    ordinal: int
    capability: tuple[int, int]
    sm_count: int

    @property
    def arch(self) -> str:
        """The architecture as NVRTC writes it, without the letter of a variant.

        Example:
            >>> DeviceFacts(0, (9, 0), 132).arch
            'sm_90'
        """
        return "sm_{}{}".format(*self.capability)

    def require(self, arch: str) -> None:
        """Refuse code that this GPU cannot run.

        Args:
            arch: What the code was compiled for. `sm_90a` runs on `sm_90` and on nothing newer.

        Raises:
            UnsupportedError: It names both architectures.
        """
        if arch.rstrip("af") != self.arch:
            raise UnsupportedError(
                f"cuda:{self.ordinal}, a GPU of {self.arch}, for a kernel of {arch}",
                need=f"a GPU of {arch.rstrip('af')}",
                hint="an H100 or H200, or tensors on the CPU",
            )


@functools.cache
def device_facts(ordinal: int) -> DeviceFacts:
    """Ask the driver about a GPU, once.

    Raises:
        UnsupportedError: There is no driver.
        DriverError: There is no such GPU.
    """
    value, handle = ctypes.c_int(), _device(ordinal)

    def ask(attribute: int) -> int:
        call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        return value.value

    return DeviceFacts(ordinal, (ask(_CAPABILITY_MAJOR), ask(_CAPABILITY_MINOR)), ask(_SM_COUNT))


@functools.cache
def primary_context(ordinal: int) -> int:
    """The context that torch uses on that GPU; kept for the life of the process.

    Raises:
        UnsupportedError: There is no driver.
        DriverError: There is no such GPU, or it has no memory left.
    """
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(ordinal))
    assert context.value is not None
    return context.value


def _device(ordinal: int) -> int:
    handle = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(handle), ordinal)
    return handle.value


@contextmanager
def entered(context: int) -> Iterator[None]:
    """Make a context current for this thread; what was current comes back."""
    call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread load code while another thread captures a graph.

    torch captures in the global mode, in which a load on any thread would end the capture.
    """
    mode = ctypes.c_int(_RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
