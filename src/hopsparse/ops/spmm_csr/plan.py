"""Which kernels multiply by a CSR matrix or sample at it, and the bytes of their argument."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

from ...errors import ArgumentError
from ...plan.spec import KernelSpec
from .tiles import tile_specs
from .wide import wide_specs

THREADS = 128
#: Threads that add the parts of a cut row: eight for each of 32 features.
COMBINE_THREADS = 256
#: Features that a block of them adds.
COMBINE_TILE = 32
#: Bytes of a vector load.
VECTOR_BYTES = 16

#: Bytes of a pointer and of a column: formats store (4, 4) and (8, 4), torch (4, 4) and (8, 8).
INDEX_BYTES = ((4, 4), (8, 4), (8, 8))
_TYPES = {"bfloat16": ("bf16", 2), "float16": ("f16", 2), "float32": ("f32", 4)}

Job = Literal["multiply", "sample"]
# Gathers that a team has in flight. Sampling loads both sides.
_BATCH: dict[Job, int] = {"multiply": 8, "sample": 4}
# Blocks that an SM shall hold. Told of it, ptxas takes the registers that this leaves (80) and lets
# a whole batch of loads start before it uses one; untold, it goes for more blocks, and spills.
_LEAST_BLOCKS = 6
_FILE = {"multiply": "kernel.cuh", "combine": "kernel.cuh", "sample": "sddmm.cuh"}


@dataclass(frozen=True)
class Team:
    """The lanes that have a span, and what a lane loads of a row of features.

    Attributes:
        lanes: Of a warp.
        vector: Whether a lane loads 16 bytes; else one feature.
    """

    lanes: int
    vector: bool

    def tile(self, itemsize: int) -> int:
        """Features of a team.

        Example:
            >>> Team(8, True).tile(2), Team(8, False).tile(2)
            (64, 8)
        """
        return self.lanes * (VECTOR_BYTES // itemsize if self.vector else 1)

    @property
    def name(self) -> str:
        """For people.

        Example:
            >>> Team(8, True).name
            '8 lanes of 16 bytes'
        """
        return f"{self.lanes} lanes of {'16 bytes' if self.vector else 'a feature'}"


#: The narrowest that holds a row runs, or the widest.
TEAMS = (*(Team(lanes, True) for lanes in (2, 4, 8, 16, 32)), Team(8, False), Team(32, False))


class Args(ctypes.Structure):
    """The argument of every kernel here; `struct Args` of stream.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("u", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("cuts", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_stride", ctypes.c_uint32),
        ("u_stride", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("features", ctypes.c_uint32),
        ("span_count", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


ARGS_BYTES = ctypes.sizeof(Args)


def team_for(features: int, itemsize: int, *, vector: bool) -> Team:
    """Who has a span.

    Args:
        features: Of a row of x.
        itemsize: Bytes of a feature.
        vector: Whether every row of x, and of what else has features, starts on 16 bytes, and the
            features fill whole pieces of 16 bytes.

    Example:
        >>> team_for(64, 2, vector=True), team_for(47, 2, vector=False)
        (Team(lanes=8, vector=True), Team(lanes=32, vector=False))
    """
    able = [team for team in TEAMS if team.vector == vector]
    return next((team for team in able if features <= team.tile(itemsize)), able[-1])


@cache
def spec_for(job: Job, dtype: str, team: Team, index_bytes: tuple[int, int]) -> KernelSpec:
    """The kernel that multiplies, or samples.

    Args:
        job: "multiply" is y = A @ x, "sample" the dot products at the entries of A.
        dtype: bfloat16, float16 or float32.
        team: One of `TEAMS`.
        index_bytes: One of `INDEX_BYTES`.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_for("multiply", "bfloat16", TEAMS[2], (4, 4)).name
        'multiply bfloat16, 8 lanes of 16 bytes, 32-bit pointers, 32-bit columns'
    """
    known = job in _BATCH and dtype in _TYPES
    if not known or team not in TEAMS or index_bytes not in INDEX_BYTES:
        raise ArgumentError(
            f"a spmm_csr kernel for {job}, {dtype}, {team}, indices of {index_bytes} bytes",
            need=f"one of {', '.join(_BATCH)}; of {', '.join(_TYPES)}; of TEAMS; of INDEX_BYTES",
            hint='spec_for("multiply", "bfloat16", TEAMS[2], (4, 4))',
        )
    pointer, column = index_bytes
    widths = f"{8 * pointer}-bit pointers, {8 * column}-bit columns"
    facts = f"""
  static constexpr bool kVector = {"true" if team.vector else "false"};
  static constexpr int kLanes = {team.lanes}, kBatch = {_BATCH[job]};
  static constexpr int kPointerBytes = {pointer}, kIndexBytes = {column};"""
    return _spec(job, f"{job} {dtype}, {team.name}, {widths}", dtype, THREADS, facts)


@cache
def combine_spec(dtype: str) -> KernelSpec:
    """The kernel that adds the parts of cut rows.

    Args:
        dtype: Of the result: bfloat16, float16 or float32.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> combine_spec("float32").name
        'combine float32'
    """
    if dtype not in _TYPES:
        raise ArgumentError(
            f"a spmm_csr kernel that combines {dtype}",
            need=f"one of {', '.join(_TYPES)}",
            hint='combine_spec("float32")',
        )
    # It shares the text of `multiply`, whose facts it does not use.
    facts = """
  static constexpr bool kVector = false;
  static constexpr int kLanes = 32, kBatch = 8;
  static constexpr int kPointerBytes = 4, kIndexBytes = 4;"""
    return _spec("combine", f"combine {dtype}", dtype, COMBINE_THREADS, facts)


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    if spec.name.startswith("combine"):
        return ("LDG.E", "FADD")
    if spec.name.startswith("tiles"):
        return ("HMMA.16816.F32", "POPC", "LDGSTS.E.BYPASS.128")
    if spec.name.startswith("arrange"):
        return ("LDG.E.128", "STG.E.128", "PREEXIT")
    if spec.name.startswith("wide"):
        return ("HGMMA", "POPC", "UBLKCP.S.G", "UTMALDG.2D", "ACQBULK")
    # Entries go round by shuffles, and the sums are float32.
    load = "LDG.E.128.CONSTANT" if "16 bytes" in spec.name else "LDG.E"
    return ("SHFL.IDX", "FFMA", load)


def every_spec() -> list[KernelSpec]:
    """All kernels that a call may run."""
    jobs: tuple[Job, ...] = ("multiply", "sample")
    streams = [spec_for(*each) for each in product(jobs, _TYPES, TEAMS, INDEX_BYTES)]
    return [*streams, *(combine_spec(dtype) for dtype in _TYPES), *tile_specs(), *wide_specs()]


def blocks_for(team: Team, spans: int) -> int:
    """Blocks along x: a span a team.

    Example:
        >>> blocks_for(Team(8, True), 17)
        2
    """
    return -(-spans // (THREADS // team.lanes))


def _spec(job: str, name: str, dtype: str, threads: int, facts: str) -> KernelSpec:
    entry = f"spmm_csr_{job}_kernel"
    return KernelSpec(
        op="spmm_csr",
        name=name,
        kernel=f"ops/spmm_csr/{_FILE[job]}",
        text=f"""
struct Config {{
  static constexpr Type kType = Type::{_TYPES[dtype][0]};
  static constexpr int kThreads = {threads};{facts}
}};
static_assert(sizeof(spmm_csr::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
extern "C" __global__ void __launch_bounds__({threads}, {_LEAST_BLOCKS})
    {entry}(const __grid_constant__ spmm_csr::Args a) {{
  spmm_csr::{job}<Config>(a);
}}
""",
        entry=entry,
        threads=threads,
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=ARGS_BYTES,
    )
