"""From a spec to a cubin, without torch, a driver or a GPU.

spec -> source.translation_unit -> nvrtc.compile_unit -> Cubin, kept by cache.KernelCache
"""

from .cache import Built, KernelCache, cache_key
from .cubin import Cubin
from .nvrtc import OPTIONS, Nvrtc, compile_unit, default_nvrtc, find_nvrtc, nvrtc_version
from .source import translation_unit

__all__ = [
    "OPTIONS",
    "Built",
    "Cubin",
    "KernelCache",
    "Nvrtc",
    "cache_key",
    "compile_unit",
    "default_nvrtc",
    "find_nvrtc",
    "nvrtc_version",
    "translation_unit",
]
