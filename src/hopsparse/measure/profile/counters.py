"""The hardware counters that a profile reads, and what they say of one kernel or several.

All names are in the catalogue of GH100 (`catalogue.py`), which a test asks. Time with an active
tensor pipe says nothing of the work done: a 2:4 instruction keeps the pipe as busy as a dense one
and stands for twice the operations. So operations are counted apart, with sparsity on and off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CHIP = "GH100"

TIME = "gpu__time_duration.sum"
SM_ACTIVE = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
L2 = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
DRAM_READ, DRAM_WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_SECTORS = "lts__t_sectors.sum"
GMMA = "sm__inst_executed_pipe_tensor_op_gmma.sum"
CLOCK = "sm__cycles_elapsed.avg.per_second"

# Every path of the tensor cores that tells 2:4 instructions from dense ones.
_PATHS = (
    "op_hgmma_src_bf16_dst_fp32",
    "op_hgmma_src_fp16",
    "op_hgmma_src_tf32_dst_fp32",
    "op_igmma_src_int8",
    "src_fp8",
    "op_hmma_src_bf16_dst_fp32",
    "op_hmma_src_fp16_dst_fp32",
    "op_imma_src_int8",
)
OPS_ON = tuple(f"sm__ops_path_tensor_{path}_sparsity_on.sum" for path in _PATHS)
OPS_OFF = tuple(f"sm__ops_path_tensor_{path}_sparsity_off.sum" for path in _PATHS)

#: All of them, as `ncu --metrics` takes them.
METRICS = (
    *(TIME, SM_ACTIVE, TENSOR, DRAM, L2, DRAM_READ, DRAM_WRITE, L2_SECTORS, GMMA, CLOCK),
    *OPS_ON,
    *OPS_OFF,
)

SECTOR_BYTES = 32
_RANGE = re.compile(r"hopsparse\.(subject|phase)\.([\w.+-]+)")


@dataclass(frozen=True)
class Kernel:
    """One launch, as a profiler saw it.

    Attributes:
        name: Of the function.
        metrics: Counters in nanoseconds, bytes, percent, operations; None where a counter has no
            value.
        ranges: Text of the NVTX ranges around it, from the outermost.
    """

    name: str
    metrics: Mapping[str, float | None]
    ranges: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """What was profiled; without our ranges the kernel itself.

        Example:
            >>> Kernel("k", {}, ("hopsparse.subject.nm", "hopsparse.phase.sparse.spmm_nm")).subject
            'nm'
        """
        return self._innermost("subject") or self.name

    @property
    def phase(self) -> str:
        """The innermost phase and what it is of, such as `sparse.spmm_nm`, or ""."""
        return self._innermost("phase")

    def value(self, metric: str) -> float | None:
        """A counter, or None where it was not read."""
        return self.metrics.get(metric)

    def _innermost(self, kind: str) -> str:
        found = [name for text in self.ranges for key, name in _RANGE.findall(text) if key == kind]
        return found[-1] if found else ""


@dataclass(frozen=True)
class Counted:
    """What the counters say of kernels together; None where one of them has no such counter.

    Attributes:
        kernels: How many.
        us: Their times added.
        sm_active: Percent of the time that SMs have a warp, on average.
        tensor: Percent of the time that tensor pipes are active.
        dram: Percent of the peak of device memory.
        l2: Percent of the peak of the L2 cache.
        dram_bytes: Read and written.
        l2_bytes: All traffic of the L2 cache.
        ops_sparse: Operations of tensor instructions with sparsity on.
        ops_dense: Those with sparsity off.
        gmma: Warpgroup instructions of the tensor cores.
        sm_ghz: Clock of the SMs.
    """

    kernels: int
    us: float | None
    sm_active: float | None
    tensor: float | None
    dram: float | None
    l2: float | None
    dram_bytes: float | None
    l2_bytes: float | None
    ops_sparse: float | None
    ops_dense: float | None
    gmma: float | None
    sm_ghz: float | None

    @property
    def sparse_share(self) -> float | None:
        """Part of the operations on tensor cores that ran with sparsity on, or None."""
        if self.ops_sparse is None or self.ops_dense is None:
            return None
        both = self.ops_sparse + self.ops_dense
        return self.ops_sparse / both if both else None


def counted(kernels: Sequence[Kernel]) -> Counted:
    """Add what adds up, and weigh percentages by time.

    Example:
        >>> halves = [Kernel("a", {TIME: 1000.0, TENSOR: 0.0}), Kernel("b", {TIME: 3000.0, TENSOR: 80.0})]
        >>> together = counted(halves)
        >>> together.us, together.tensor, together.dram
        (4.0, 60.0, None)
    """  # noqa: E501
    times = [kernel.value(TIME) for kernel in kernels]

    def added(*metrics: str) -> float | None:
        values = [kernel.value(metric) for kernel in kernels for metric in metrics]
        known = [value for value in values if value is not None]
        # A path that an older profiler does not count is left out; all of them is no answer.
        enough = known and (len(known) == len(values) or len(metrics) > 2)
        return sum(known) if enough else None

    def weighed(metric: str) -> float | None:
        pairs = list(zip((kernel.value(metric) for kernel in kernels), times, strict=True))
        known = [(value, time) for value, time in pairs if value is not None and time is not None]
        total = sum(time for _, time in known)
        return sum(v * t for v, t in known) / total if len(known) == len(pairs) and total else None

    time_ns, sectors, hertz = added(TIME), added(L2_SECTORS), weighed(CLOCK)
    return Counted(
        kernels=len(kernels),
        us=None if time_ns is None else time_ns / 1e3,
        sm_active=weighed(SM_ACTIVE),
        tensor=weighed(TENSOR),
        dram=weighed(DRAM),
        l2=weighed(L2),
        dram_bytes=added(DRAM_READ, DRAM_WRITE),
        l2_bytes=None if sectors is None else sectors * SECTOR_BYTES,
        ops_sparse=added(*OPS_ON),
        ops_dense=added(*OPS_OFF),
        gmma=added(GMMA),
        sm_ghz=None if hertz is None else hertz / 1e9,
    )
