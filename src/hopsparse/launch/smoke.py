"""One small kernel that shows whether clusters and TMA work on a GPU."""

from __future__ import annotations

import struct

import torch

from ..compiler import KernelCache
from ..errors import DriverError
from ..plan.spec import KernelSpec
from .kernel import kernel_for
from .stream import current_stream
from .tensormap import Element, encode

ROWS, COLUMNS, BLOCKS = 16, 32, 2

#: The kernel; it compiles without a GPU.
SMOKE = KernelSpec(
    op="smoke",
    name="smoke",
    kernel="launch/smoke.cuh",
    text="",
    entry="smoke",
    threads=128,
    cluster=(BLOCKS, 1, 1),
    smem_bytes=0,
    args_bytes=192,
)


def smoke_test(device: int = 0) -> None:
    """Copy a box by TMA multicast to both blocks of a cluster, and read it from the other one.

    Args:
        device: Ordinal of the GPU.

    Raises:
        DriverError: A number is wrong, or the kernel failed.
        UnsupportedError: There is no Hopper GPU, or no NVRTC.
    """
    kernel = kernel_for(SMOKE, device, lambda spec: KernelCache.default().get(spec).image)
    with torch.cuda.device(device):
        source = torch.arange(1, ROWS * COLUMNS + 1, device="cuda", dtype=torch.int32)
        out = torch.zeros(BLOCKS, ROWS * COLUMNS, device="cuda", dtype=torch.int32)
        box = (COLUMNS, ROWS)
        found = encode(source.data_ptr(), Element.I32, box, (4 * COLUMNS,), box)
        args = found + struct.pack("P56x", out.data_ptr())
        kernel.launch(BLOCKS, args, current_stream(device))
        try:
            wrong = int((out != source * 1001).sum())
        except RuntimeError as error:
            raise DriverError(
                f"the smoke test failed: {error}", need="clusters and TMA", hint="another driver"
            ) from error
    if wrong:
        raise DriverError(
            f"{wrong} of {out.numel()} numbers of the smoke test are wrong",
            need="clusters, TMA multicast and distributed shared memory",
            hint="another driver or GPU",
        )
