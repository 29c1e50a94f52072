"""A cubin becomes a running kernel: the first folder that needs a driver, when it is called."""

from .driver import DeviceFacts, check, device_facts, require_driver
from .early import EarlyStarts, Turn, starts_early
from .graph import Graph, capture
from .held import Held, hold, holding, is_holding
from .im2col_map import check_im2col, encode_im2col
from .kernel import Args, Bound, Kernel, KnownLaunches, kernel_for
from .occupancy import max_active_blocks, max_active_clusters
from .pdl import pdl_is_safe
from .stream import capture_id, current_stream, is_capturing
from .tensormap import MAP_BYTES, Element, check_tiled, encode
from .watch import launches

__all__ = [
    "MAP_BYTES",
    "Args",
    "Bound",
    "DeviceFacts",
    "EarlyStarts",
    "Element",
    "Graph",
    "Held",
    "Kernel",
    "KnownLaunches",
    "Turn",
    "capture",
    "capture_id",
    "check",
    "check_im2col",
    "check_tiled",
    "current_stream",
    "device_facts",
    "encode",
    "encode_im2col",
    "hold",
    "holding",
    "is_capturing",
    "is_holding",
    "kernel_for",
    "launches",
    "max_active_blocks",
    "max_active_clusters",
    "pdl_is_safe",
    "require_driver",
    "starts_early",
]
