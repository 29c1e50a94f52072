"""One kernel as a value: what is compiled, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSpec:
    """A kernel that could be compiled; equal specs are one cubin.

    Attributes:
        op: Name of the operator.
        name: Readable name, unique among the operator's specs.
        kernel: File with its text, relative to the package: `ops/spmm_nm/kernel.cuh`.
        text: C++ appended to that text: its Config, instruction wrappers and entry.
        entry: Name of the `extern "C"` kernel.
        threads: Threads of a block.
        cluster: Blocks of a cluster along x, y and z.
        smem_bytes: Dynamic shared memory of a block.
        args_bytes: Size of its one argument, a struct.
        arch: NVRTC architecture.
        pdl: Whether it may be launched before the kernel ahead of it has ended; it must then
            execute griddepcontrol.wait.
    """

    op: str
    name: str
    kernel: str
    text: str
    entry: str
    threads: int
    cluster: tuple[int, int, int]
    smem_bytes: int
    args_bytes: int
    arch: str = "sm_90a"
    pdl: bool = False
