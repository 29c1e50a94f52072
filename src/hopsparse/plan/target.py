"""The GPUs that are planned for: their limits, and where each number comes from.

`h200` holds ceilings measured on one H200 (141 GB, 700 W) by issuing wgmma from shared memory
with no memory traffic, and by reading 4 GiB. `h100` is the same chip with other memory: its
bandwidth is the datasheet's, scaled by what the H200 reaches of its own datasheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from ..errors import ArgumentError

Source = Literal["measured", "datasheet", "slice"]

_H200_DATASHEET_TBPS = 4.8
_H100_DATASHEET_TBPS = 3.35


@dataclass(frozen=True)
class Peak:
    """Tensor-core ceiling of one dtype, in dense-equivalent operations a second.

    Attributes:
        first: Over the first milliseconds, before power limits the clock.
        sustained: Over two seconds.
    """

    first: float
    sustained: float

    def scaled(self, factor: float) -> Peak:
        """The ceiling of a part of the GPU."""
        return Peak(self.first * factor, self.sustained * factor)


@dataclass(frozen=True)
class Target:
    """One kind of GPU.

    Attributes:
        name: The word users type.
        arch: NVRTC architecture; `sm_90` without the `a` has no wgmma.
        sm_count: Streaming multiprocessors.
        smem_per_block: Shared memory a block may opt in to, bytes.
        smem_per_sm: Shared memory of an SM, bytes.
        registers_per_sm: 32-bit registers.
        memory_bytes: Device memory, as the driver counts it.
        l2_bytes: Size of the L2 cache.
        read_bandwidth: Bytes a second from device memory, reading only.
        dense_peak: Ceiling by dtype.
        sparse_peak: Ceiling of 2:4 products by dtype, counted as if dense.
        launch_us: One small kernel as a node of a CUDA graph.
        source: Where the numbers come from.
    """

    name: str
    arch: str
    sm_count: int
    smem_per_block: int
    smem_per_sm: int
    registers_per_sm: int
    memory_bytes: int
    l2_bytes: int
    read_bandwidth: float
    dense_peak: Mapping[str, Peak]
    sparse_peak: Mapping[str, Peak]
    launch_us: float
    source: Source


def _by_dtype(half: Peak, fp8: Peak, int8: Peak) -> Mapping[str, Peak]:
    # float16 was not measured apart: it runs through the same tensor-core path as bfloat16.
    return MappingProxyType(
        {
            "bfloat16": half,
            "float16": half,
            "float8_e4m3fn": fp8,
            "float8_e5m2": fp8,
            "int8": int8,
        }
    )


_H200 = Target(
    name="h200",
    arch="sm_90a",
    sm_count=132,
    smem_per_block=227 * 1024,
    smem_per_sm=228 * 1024,
    registers_per_sm=65_536,
    memory_bytes=150_109_880_320,
    l2_bytes=60 * 1024 * 1024,
    read_bandwidth=4.35e12,
    dense_peak=_by_dtype(
        Peak(944.6e12, 868.9e12), Peak(1939.0e12, 1735.8e12), Peak(1945.9e12, 1881.0e12)
    ),
    sparse_peak=_by_dtype(
        Peak(1696.5e12, 1441.7e12), Peak(3415.6e12, 2807.8e12), Peak(3424.2e12, 3169.9e12)
    ),
    launch_us=1.13,
    source="measured",
)

#: Every GPU that hopsparse plans for, by name.
TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "h200": _H200,
        "h100": replace(
            _H200,
            name="h100",
            memory_bytes=80 * 1024**3,
            l2_bytes=50 * 1024 * 1024,
            read_bandwidth=_H200.read_bandwidth * _H100_DATASHEET_TBPS / _H200_DATASHEET_TBPS,
            source="datasheet",
        ),
    }
)


def target(name: str) -> Target:
    """Look up a GPU by name.

    Raises:
        ArgumentError: The table has no such GPU.

    Example:
        >>> target("h200").arch
        'sm_90a'
    """
    try:
        return TARGETS[name.lower()]
    except KeyError:
        known = ", ".join(TARGETS)
        raise ArgumentError(f"target {name!r}", need=f"one of {known}", hint="h200") from None


# Shares of memory that come with the shares of compute of an H100 or H200, and the SMs that such a
# slice has, as `nvidia-smi mig -lgip` lists them.
_SLICES = {1: (Fraction(1, 8), 16), 2: (Fraction(2, 8), 32), 3: (Fraction(4, 8), 60)}
_SLICES |= {4: (Fraction(4, 8), 64), 7: (Fraction(1), 132)}


def parse_target(text: str) -> Target:
    """Read a GPU, or a MIG slice of one: `h200`, or `h200:1/7`.

    Raises:
        ArgumentError: The table has no such GPU, or the GPU no such slice.

    Example:
        >>> parse_target("h200:1/7").sm_count
        16
    """
    name, colon, share = text.partition(":")
    whole = target(name)
    if not colon:
        return whole
    sevenths = {f"{count}/7": count for count in _SLICES}.get(share)
    if sevenths is None:
        raise ArgumentError(
            f"target {text!r}",
            need=f"a slice of {name}: " + ", ".join(f"{count}/7" for count in _SLICES),
            hint=f"{name}:1/7",
        )
    memory, sm_count = _SLICES[sevenths]
    return mig_slice(whole, Fraction(sevenths, 7), memory, sm_count=sm_count)


def mig_slice(
    whole: Target, compute: Fraction, memory: Fraction, *, sm_count: int | None = None
) -> Target:
    """The part of a GPU that a MIG instance owns: a 1g.18gb slice is 1/7 and 1/8.

    Args:
        whole: The full GPU.
        compute: Its share of the compute slices.
        memory: Its share of memory, bandwidth and L2.
        sm_count: SMs as the driver reports them for the slice. Without it the share of all SMs,
            which is an upper bound: the driver leaves some of them out of every slice.

    Raises:
        ArgumentError: A share is outside (0, 1], or there are more SMs than the GPU has.

    Example:
        >>> mig_slice(TARGETS["h200"], Fraction(1, 7), Fraction(1, 8), sm_count=16).sm_count
        16
    """
    for label, share in (("compute", compute), ("memory", memory)):
        if not 0 < share <= 1:
            raise ArgumentError(
                f"{label} share {share}", need="more than 0 and at most 1", hint="Fraction(1, 7)"
            )
    sms = int(whole.sm_count * compute) if sm_count is None else sm_count
    if not 0 < sms <= whole.sm_count:
        raise ArgumentError(
            f"{sms} SMs",
            need=f"1 to {whole.sm_count}, the SMs of {whole.name}",
            hint="the count that `hopsparse doctor` prints",
        )
    factor = sms / whole.sm_count
    return replace(
        whole,
        name=f"{whole.name} slice of {sms} SMs",
        sm_count=sms,
        memory_bytes=int(whole.memory_bytes * memory),
        l2_bytes=int(whole.l2_bytes * memory),
        read_bandwidth=whole.read_bandwidth * float(memory),
        dense_peak=_scaled(whole.dense_peak, factor),
        sparse_peak=_scaled(whole.sparse_peak, factor),
        source="slice",
    )


def _scaled(peaks: Mapping[str, Peak], factor: float) -> Mapping[str, Peak]:
    return MappingProxyType({dtype: peak.scaled(factor) for dtype, peak in peaks.items()})
