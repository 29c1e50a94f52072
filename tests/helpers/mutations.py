"""Kernels that forget to wait: edits of their text, and what has to notice each.

An edit takes one wait, one arrival or one fence away. Under delays (`compiler/delays.py`) the
checks of `hopsparse verify` must then see a wrong number, or the kernel must fail.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src/hopsparse"


@dataclass(frozen=True)
class Mutation:
    """One edit.

    Attributes:
        name: What is forgotten.
        path: File, relative to the package.
        old: Text that stands there once.
        new: What stands there instead.
        op: Operator whose checks have to notice.
        case: What the cases of those checks have in their names.
        dtype: What their dtypes start with.
    """

    name: str
    path: str
    old: str
    new: str
    op: str
    case: str
    dtype: str = "bfloat16"

    def apply(self, root: Path) -> None:
        """Edit the file below a copy of the package."""
        file = root / self.path
        text = file.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, (
            f"{self.name}: {self.path} has it {text.count(self.old)} x"
        )
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")


def copy_of_kernels(folder: Path) -> Path:
    """The device code of the package, and nothing else, in a folder of its own."""

    def others(where: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(where, name).is_file() and name[-4:] != ".cuh"}

    for part in ("device", "ops"):
        shutil.copytree(PACKAGE / part, folder / part, ignore=others)
    return folder


_NM, _BSR = "ops/spmm_nm/", "ops/spmm_bsr/"
_PREFILL, _DECODE = "ops/attend_prefill/", "ops/attend_decode/"
_WIDE = "ops/spmm_csr/wide.cuh"
_WRITE = "  write_sums<C>(d, smem, way, panel);\n"
_SYNC = "  if constexpr (C::kParts > 1) {\n    cluster_sync();\n"
_EMPTY = "mbarrier_wait(smem + Smem<C>::kEmptyAt + ring.stage * 8, ring.parity);\n"
# Where threads waited for each other they still come late.
_PAUSE = "  delay(__LINE__);\n"
_FULL = "mbarrier_wait(smem + S::kFullAt + ring.stage * 8, ring.parity);\n"

#: Each of these has to be noticed on a GPU.
CAUGHT = (
    Mutation(
        "spmm_nm multiplies a stage that is not full",
        *(_NM + "kernel.cuh", _FULL, "", "spmm_nm", "tile-128x128x128"),
    ),
    Mutation(
        "spmm_nm fills a stage that is not empty",
        *(_NM + "producer.cuh", _EMPTY, "\n", "spmm_nm", "tile-128x128x128"),
    ),
    Mutation(
        "spmm_nm adds parts that have not come",
        *(_NM + "kernel.cuh", "  mbarrier_wait(smem + S::kPartsAt, 0);\n", ""),
        *("spmm_nm", "c1x1x2"),
    ),
    Mutation(
        "spmm_nm begins before its barriers are there",
        *(_NM + "kernel.cuh", "  } else {\n    __syncthreads();\n  }\n", "  }\n"),
        *("spmm_nm", "tile-128x128x128_w2_s4_c1x1"),
    ),
    Mutation(
        "spmm_nm stores lines that are not written",
        _NM + "epilogue.cuh",
        "  named_barrier<128>(1 + wg);\n  const u32 buffer = piece_buffer<C>(smem, wg, turn++);",
        "  const u32 buffer = piece_buffer<C>(smem, wg, turn++);",
        *("spmm_nm", "tile-128x128x128"),
    ),
    Mutation(
        "spmm_nm tells no producer that a stage was read",
        *(_NM + "kernel.cuh", "      mbarrier_arrive(address + stage * 8);\n", ""),
        *("spmm_nm", "tile-64x64x128_w1_s8_c1x1"),
    ),
    Mutation(
        "spmm_nm_scaled widens tokens into a stage that is not empty",
        *(_NM + "four_bit_tokens.cuh", _EMPTY, "\n", "spmm_nm_scaled", "tile-", "e4m3-int4-fast"),
    ),
    Mutation(
        "spmm_bsr multiplies a stage that is not full",
        *(_BSR + "kernel.cuh", _FULL, "", "spmm_bsr", "tile-64x64x1x64"),
    ),
    Mutation(
        "spmm_bsr fills a stage that is not empty",
        *(_BSR + "kernel.cuh", _EMPTY, "\n", "spmm_bsr", "tile-64x64x1x64"),
    ),
    Mutation(
        "spmm_bsr takes no turns",
        *(_BSR + "kernel.cuh", "  if (!first) wait_for_turn(wg);\n", ""),
        *("spmm_bsr", "tile-64x64x1x64_s8-turns"),
    ),
    Mutation(
        "spmm_bsr of small blocks reads a slab that is not there",
        _BSR + "fragments.cuh",
        "    mbarrier_wait(smem + Smem<C>::kFullAt + ring.stage * 8, ring.parity);\n",
        *("", "spmm_bsr", "tile-mma_256x64"),
    ),
    Mutation(
        "spmm_bsr of small blocks fills a slab that is not empty",
        *(_BSR + "fragments.cuh", _EMPTY, "\n", "spmm_bsr", "tile-mma_256x64"),
    ),
    Mutation(
        "attend_prefill scores keys that are not there",
        _PREFILL + "kernel.cuh",
        "    mbarrier_wait(Bars<C>(smem).keys_full(ring.stage), ring.parity);\n",
        *("", "attend_prefill", "64-block-64"),
    ),
    Mutation(
        "attend_prefill weighs values that are not there",
        _PREFILL + "kernel.cuh",
        "  mbarrier_wait(Bars<C>(smem).values_full(ring.stage), ring.parity);\n",
        *("", "attend_prefill", "64-block-64"),
    ),
    Mutation(
        "attend_prefill scores queries that are not there",
        *(_PREFILL + "kernel.cuh", "      mbarrier_wait(bars.q_full(wg), q_parity);\n", ""),
        *("attend_prefill", "64-block-64"),
    ),
    Mutation(
        "attend_prefill overwrites values that are read",
        _PREFILL + "producer.cuh",
        "  wait_together(bars.values_empty(stage), ring.parity);\n",
        *("", "attend_prefill", "64-block-64"),
    ),
    Mutation(
        "attend_decode reads copies that are under way",
        *(_DECODE + "kernel.cuh", "    wait_copies<C::kStages - 1>();\n", ""),
        *("attend_decode", "64x4"),
    ),
    Mutation(
        "attend_decode merges parts that have not come",
        _DECODE + "kernel.cuh",
        "  mbarrier_wait(shared_address(&s.arrived), 0);\n",
        *("", "attend_decode", "64x4"),
    ),
    Mutation(
        "select adds masses of other warps that are not there",
        "ops/select/kernel.cuh",
        "s.warp_sums[1][warp] = of_forced;\n  __syncthreads();\n",
        f"s.warp_sums[1][warp] = of_forced;\n{_PAUSE}",
        *("select", "one-block-top-p", "float32"),
    ),
    Mutation(
        "select adds digits that other blocks still count",
        "ops/select/kernel.cuh",
        "    sync_row<C>();\n    if constexpr (!kAlone<C>) {",
        *(_PAUSE + "    if constexpr (!kAlone<C>) {", "select", "cluster-rank", "float32"),
    ),
    Mutation(
        "quantize_rows takes maxima of warps that are not there",
        "ops/quantize_rows/kernel.cuh",
        "= mine;\n  __syncthreads();\n  return __reduce_max_sync",
        f"= mine;\n{_PAUSE}  return __reduce_max_sync",
        *("quantize_rows", "block", "bfloat16-int8"),
    ),
    Mutation(
        "score_blocks merges shares that have not come",
        "ops/score_blocks/scores.cuh",
        "      mbarrier_wait(shared_address(&s.parts_are_there), 0);\n",
        *("", "score_blocks", "groups-of-16-128-bound"),
    ),
    Mutation(
        "select_blocks chooses among ranks that have not come",
        *("ops/score_blocks/choose.cuh", "  mbarrier_wait(bar, 0);\n", ""),
        *("select_blocks", "128x4-bound"),
    ),
    Mutation(
        "csr_matmul adds slices that are not there",
        "ops/spmm_csr/kernel.cuh",
        "  of_slice[slice][lane] = sum;\n  __syncthreads();\n",
        *("  of_slice[slice][lane] = sum;\n" + _PAUSE, "csr_matmul", "one-huge-row", "float32"),
    ),
    Mutation(
        "spmm_csr multiplies units that are under way",
        "ops/spmm_csr/tiles.cuh",
        "    wait_for_copies<kAhead - 1>();\n",
        *("", "spmm_csr", "three-tokens"),
    ),
    Mutation(
        "spmm_csr unpacks a unit that is not there",
        *(_WIDE, "      if (next < args.steps) warp.wait(ring);\n", ""),
        *("spmm_csr", "tile-128x256_w1_p1_c2"),
    ),
    Mutation(
        "spmm_csr fills a stage that is not empty",
        _WIDE,
        "      mbarrier_wait(smem + Smem<C>::kEmptyAt + ring.stage * 8, ring.parity);\n",
        *("", "spmm_csr", "tile-128x256_w1_p1_c2"),
    ),
    Mutation(
        "spmm_csr adds parts that are not there",
        _WIDE,
        _WRITE + _SYNC,
        _SYNC + _PAUSE + _WRITE,
        *("spmm_csr", "tile-128x64_w2_p4_c1"),
    ),
)

#: Nothing notices these, on a GPU or a CPU, and why.
NOT_CAUGHT = {
    "a stage released while wgmma reads it (spmm_nm, spmm_bsr: wgmma_wait<1> taken away)": "a copy "
    "takes longer to come than the product takes to read, and no pause can be put into wgmma; for "
    "attend_prefill the text on the CPU notices, where products are done when they are waited for",
    "async_proxy_fence": "what it orders happens in that order in every run that was looked at",
    "mbarrier_init_fence": "the same; the copy engine comes thousands of cycles later",
    "griddepcontrol.wait": "checks launch one kernel at a time; tests/unit/test_launch.py and the "
    "compiler's check of `pdl` see whether it is there",
    "__syncwarp before an arrival": "lanes of a warp that have not diverged arrive together",
    "the last barrier of a cluster": "a block that leaves early has its memory until the next one "
    "is put there; compute-sanitizer sees reads of it",
}
