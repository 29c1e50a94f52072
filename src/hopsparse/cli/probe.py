"""What this machine has, asked without torch where possible, and without ever needing a GPU.

The driver is asked through libcuda itself: that creates no context, and works beside a CPU build
of torch. Nothing of the driver is touched unless libcuda loads, because the binding libraries
hang where it is missing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import shutil
from fractions import Fraction
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from ..compiler import KernelCache, compile_unit, default_nvrtc
from ..errors import HopsparseError
from ..measure.profile.install import find_ncu
from ..plan import TARGETS, Target, mig_slice
from ..settings import Settings
from .health import cache_health, faults_of

_ATTRIBUTES = {
    "sm_count": 16,
    "l2_bytes": 38,
    "smem_per_block": 97,
    "cluster_launch": 120,
    "tensor_map": 127,
}
_PACKAGES = (
    "numpy",
    "safetensors",
    "transformers",
    "accelerate",
    "gguf",
    "matplotlib",
    "jinja2",
    "triton",
    "cuda-bindings",
    "cuda-core",
    "nvidia-cuda-nvrtc",
    "ncu-report",
)


def gather() -> dict[str, Any]:
    """Every fact that `hopsparse doctor` shows, as JSON values."""
    gpus, driver = probe_gpus(), probe_driver()
    packages = {name: _version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": probe_cpu(),
        "driver": driver,
        "gpus": gpus,
        "nvrtc": probe_nvrtc(),
        "torch": probe_torch(has_gpu=bool(gpus)),
        "packages": packages,
        "faults": faults_of({**packages, "torch": _version("torch")}, driver),
        "cache": probe_cache(Settings.from_environment().cache_dir),
        "kernels": cache_health(KernelCache.default()),
        "profiling": probe_profiling(),
    }


def probe_cpu() -> dict[str, Any]:
    """Model, usable cores, memory."""
    cpuinfo = _read("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    meminfo = _read("/proc/meminfo")
    total, free = (
        int(hit[1]) * 1024 if (hit := re.search(rf"^{key}:\s*(\d+) kB", meminfo, re.M)) else None
        for key in ("MemTotal", "MemAvailable")
    )
    return {
        "model": found[1].strip() if found else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "avx512": bool(re.search(r"\bavx512f\b", cpuinfo)),
        "ram_bytes": total,
        "ram_free_bytes": free,
    }


def probe_driver() -> dict[str, Any]:
    """Whether libcuda loads, the CUDA version it speaks and the driver's own."""
    library = _load("libcuda.so.1")
    cuda = None
    if library is not None:
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
            cuda = f"{number.value // 1000}.{number.value % 1000 // 10}"
    found = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", _read("/proc/driver/nvidia/version"))
    return {"libcuda": library is not None, "cuda": cuda, "version": found[1] if found else None}


def probe_gpus() -> list[dict[str, Any]]:
    """The GPUs (or MIG slices) that this process may use."""
    library = _load("libcuda.so.1")
    if library is None or library.cuInit(0) != 0:
        return []
    count = ctypes.c_int()
    if library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_gpu(library, index, count.value) for index in range(count.value)]


def _gpu(library: Any, index: int, count: int) -> dict[str, Any]:
    device = ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, len(name), device)
    memory = ctypes.c_size_t()
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    def reaches(peer: int) -> bool:
        value = ctypes.c_int()
        library.cuDeviceCanAccessPeer(ctypes.byref(value), device, peer)
        return bool(value.value)

    gpu: dict[str, Any] = {
        "index": index,
        "name": name.value.decode(errors="replace"),
        "compute_capability": f"{attribute(75)}.{attribute(76)}",
        "memory_bytes": memory.value,
        **{key: attribute(number) for key, number in _ATTRIBUTES.items()},
        "peers": [peer for peer in range(count) if peer != index and reaches(peer)],
    }
    gpu["cluster_launch"], gpu["tensor_map"] = bool(gpu["cluster_launch"]), bool(gpu["tensor_map"])
    gpu["mig"] = "MIG" in gpu["name"]
    planned = planned_for(gpu)
    gpu["planned_as"] = planned.name if planned else None
    return gpu


def planned_for(gpu: dict[str, Any]) -> Target | None:
    """The target that kernels are planned for on `gpu`, or None where none can run."""
    if gpu["compute_capability"] != "9.0":
        return None
    whole = TARGETS["h200" if "H200" in gpu["name"] else "h100"]
    if "MIG" not in gpu["name"]:
        return whole
    found = re.search(r"MIG (\d)g\.", gpu["name"])
    compute = Fraction(int(found[1]) if found else 1, 7)
    eighths = max(1, min(8, round(8 * gpu["memory_bytes"] / whole.memory_bytes)))
    return mig_slice(whole, compute, Fraction(eighths, 8), sm_count=gpu["sm_count"])


def probe_nvrtc() -> dict[str, Any]:
    """Where NVRTC is, its version, and why it does not compile, if it does not."""
    try:
        compile_unit('extern "C" __global__ void probe() {}', "probe")
    except HopsparseError as error:
        return {"path": None, "version": None, "problem": error.got}
    found = default_nvrtc()
    return {"path": str(found.path), "version": found.version, "problem": None}


def probe_torch(*, has_gpu: bool) -> dict[str, Any]:
    """The build of torch, and whether it sees a GPU."""
    import torch

    # Asked only where libcuda has answered: see the head of this file.
    sees_gpu = has_gpu and torch.cuda.is_available()
    return {"version": torch.__version__, "cuda": torch.version.cuda, "sees_gpu": sees_gpu}


def probe_cache(folder: Path) -> dict[str, Any]:
    """State of the kernel cache and the disk that holds it."""
    # Not the methods of Path, which raise where a name is too long or a folder may not be read.
    exists = os.path.isdir(folder)
    parent = folder.absolute()
    while not os.path.exists(parent):
        parent = parent.parent
    paths = [Path(where, name) for where, _, names in os.walk(folder) for name in names]
    sizes = [size for size in map(_size, paths) if size is not None]
    return {
        "path": str(folder),
        "exists": exists,
        "writable": os.access(parent, os.W_OK) and parent.is_dir() and _can_be_named(folder),
        "entries": len(sizes),
        "bytes": sum(sizes),
        "disk_free_bytes": shutil.disk_usage(parent).free,
    }


def _size(path: Path) -> int | None:
    """Size of a file; None if another process has deleted it meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _can_be_named(folder: Path) -> bool:
    """Whether no file system refuses the name itself."""
    try:
        os.lstat(folder)
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def probe_profiling() -> dict[str, Any]:
    """Nsight Compute, and whether ordinary users may read the GPU's counters."""
    found = re.search(r"RmProfilingAdminOnly: (\d)", _read("/proc/driver/nvidia/params"))
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    allowed = None if found is None else found[1] == "0" or is_root
    ncu = find_ncu()
    return {"ncu": None if ncu is None else str(ncu), "counters_allowed": allowed}


def _version(package: str) -> str | None:
    try:
        return installed(package)
    except PackageNotFoundError:
        return None


def _load(library: str) -> Any:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
