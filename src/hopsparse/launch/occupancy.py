"""How much of a kernel runs at once: the grid of a persistent kernel."""

from __future__ import annotations

import ctypes
import math

from .config import launch_config
from .driver import call, device_facts, entered
from .kernel import Kernel


def max_active_blocks(kernel: Kernel) -> int:
    """Blocks that the whole GPU runs at once, in whole clusters.

    Raises:
        DriverError: The driver refused, as it does for more shared memory than there is.
    """
    return max_active_clusters(kernel) * math.prod(kernel.spec.cluster)


def max_active_clusters(kernel: Kernel) -> int:
    """Clusters that the whole GPU runs at once; a block without a cluster is one of its own.

    Clusters never span two GPCs, which differ in size: asking beats dividing the SM count.

    Raises:
        DriverError: The driver refused, as it does for more shared memory than there is.
    """
    spec, count = kernel.spec, ctypes.c_int()
    with entered(kernel.context):
        if math.prod(spec.cluster) > 1:
            config = launch_config(spec)
            call(
                "cuOccupancyMaxActiveClusters",
                ctypes.byref(count),
                kernel.function,
                ctypes.byref(config),
            )
            return count.value
        call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(count),
            kernel.function,
            spec.threads,
            spec.smem_bytes,
        )
    return count.value * device_facts(kernel.device).sm_count
