"""What is known to go wrong, looked for: damaged kernels, versions that misbehave, a smoke test."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..compiler import KernelCache
from ..errors import HopsparseError

_Version = tuple[int, ...]

# Package, the versions that are affected, what happens, what helps.
_PACKAGES: tuple[tuple[str, Callable[[_Version], bool], str, str], ...] = (
    (
        "nvidia-cuda-nvrtc",
        lambda version: version < (13,),
        "does not compile what kernels are written in",
        "pip install 'nvidia-cuda-nvrtc>=13.0,<14'",
    ),
    (
        "torch",
        lambda version: version < (2, 11),
        "has another FSDP2, which hopsparse.comm does not hook into",
        "pip install 'torch>=2.11'",
    ),
    (
        "transformers",
        lambda version: version < (5,),
        "loads models in a way that hopsparse does not know",
        "pip install 'hopsparse[models]'",
    ),
)


def faults_of(
    packages: Mapping[str, str | None], driver: Mapping[str, Any]
) -> list[dict[str, str]]:
    """Versions here that are known to misbehave.

    Args:
        packages: Versions by name, None where one is not installed.
        driver: What `probe.probe_driver` gives.

    Returns:
        One `what`, `why` and `install` each.

    Example:
        >>> faults_of({"torch": "2.9.1+cu130"}, {"cuda": None})[0]["what"]
        'torch 2.9.1+cu130'
    """
    found = []
    for name, is_affected, why, install in _PACKAGES:
        version = packages.get(name)
        if version is not None and is_affected(_numbers(version)):
            found.append({"what": f"{name} {version}", "why": why, "install": install})
    cuda, nvrtc = driver.get("cuda"), packages.get("nvidia-cuda-nvrtc")
    if cuda is not None and nvrtc is not None and _numbers(cuda)[0] < _numbers(nvrtc)[0]:
        found.append(
            {
                "what": f"driver for CUDA {cuda}",
                "why": f"does not load what NVRTC {nvrtc} compiles",
                "install": f"a driver for CUDA {_numbers(nvrtc)[0]}.0 or newer",
            }
        )
    return found


def cache_health(cache: KernelCache) -> dict[str, int]:
    """How many kernels a cache holds, and how many of its files are damaged or unfinished.

    Nothing is made, changed or deleted.
    """
    return {
        "kernels": len(cache.entries()),
        "damaged": len(cache.damaged()),
        "unfinished": len(cache.unfinished()),
    }


def smoke(gpus: list[dict[str, Any]], *, sees_gpu: bool) -> dict[str, Any]:
    """Run the smoke test on every Hopper GPU: `ran`, and `failed` with why by index."""
    hopper = [gpu["index"] for gpu in gpus if gpu["compute_capability"] == "9.0"]
    if not hopper or not sees_gpu:
        return {"ran": [], "failed": {}}
    from ..launch.smoke import smoke_test

    failed = {}
    for index in hopper:
        try:
            smoke_test(index)
        except (HopsparseError, RuntimeError) as error:
            failed[str(index)] = " ".join(str(error).split())
            # A kernel that failed takes the process with it: the next GPU would seem broken too.
            break
    return {"ran": hopper, "failed": failed}


def _numbers(version: str) -> _Version:
    return tuple(int(each) for each in re.findall(r"\d+", version.split("+")[0])[:3]) or (0,)
