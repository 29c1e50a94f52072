"""The text of spmm_bsr's kernel of small blocks, compiled for the CPU: its threads are threads."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.ops.spmm_bsr.fragments import STRIPS, Fragments
from hopsparse.ops.spmm_bsr.fragments_cost import rows_of_x
from hopsparse.ops.spmm_bsr.fragments_kernel import BEHIND, HELD, FragmentConfig
from hopsparse.ops.spmm_bsr.schedule import raster_group, token_tiles

ROOT = Path(__file__).parents[2] / "src/hopsparse"
THREADS = 640
Run = Callable[..., Tensor]


def _text(config: FragmentConfig, stages: int, residual: bool, direct: bool) -> str:
    return f"""
struct Config {{
  static constexpr int kHeight = {config.height}, kTokens = {config.tokens};
  static constexpr int kHeld = {HELD[config.height]}, kBehind = {BEHIND[config.height]};
  static constexpr int kCluster = {config.cluster}, kStages = {stages};
  static constexpr int kProducerRegisters = 32, kConsumerRegisters = 112;
  static constexpr bool kDirect = {str(direct).lower()}, kResidual = {str(residual).lower()};
  static constexpr Activation kActivation = Activation::relu;
  static constexpr Type kNumbers = Type::bf16, kOut = Type::bf16;
}};
extern "C" void entry(const void* const* pointers, const int* sizes, float alpha, int clusters) {{
  using namespace spmm_bsr;
  const Args args = {{
      {{static_cast<const u16*>(pointers[0]), sizes[0], sizes[6], sizes[5], {{}}}},
      static_cast<const u8*>(pointers[1]), static_cast<const u32*>(pointers[2]),
      static_cast<const int4*>(pointers[3]), static_cast<const int*>(pointers[4]),
      static_cast<const int4*>(pointers[5]), const_cast<void*>(pointers[6]), pointers[7],
      pointers[8], alpha, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]}};
  gridDim.x = clusters * {config.cluster};
  counters.clear();
  given.clear();
  launch({{static_cast<u32>(clusters), 1, 1}}, {config.cluster}, {THREADS}, Smem<Config>::kBytes,
         [&] {{ run<Config>(args, shared_memory()); }});
}}
"""


def compiled(
    folder: Path, config: FragmentConfig, *, stages: int, residual: bool, direct: bool
) -> Run:
    """The kernel for bfloat16 with a bias, alpha and relu; `stages` may be fewer than it has.

    y is stored by lines, or a number at a time: `direct`.
    """
    names = ("device/pipe/ring.cuh", "device/tile/raster.cuh", "device/epilogue/activation.cuh")
    kernel = (ROOT / "ops/spmm_bsr/fragments.cuh").read_text(encoding="utf-8")
    epilogue = (ROOT / "ops/spmm_bsr/slot_epilogue.cuh").read_text(encoding="utf-8")
    kernel = kernel.replace('#include "./slot_epilogue.cuh"', epilogue)
    parts = [*((ROOT / name).read_text(encoding="utf-8") for name in names), kernel]
    text = re.sub(r"^\s*#(include|pragma).*$", "", "\n".join(parts), flags=re.MULTILINE)
    source, library = folder / f"{config.name}.cpp", folder / f"{config.name}.so"
    body = _text(config, stages, residual, direct)
    source.write_text(f'#include "fragments_on_cpu.hpp"\n{text}{body}', encoding="utf-8")
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    include = f"-I{Path(__file__).parent}"
    subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
    entry = ctypes.CDLL(str(library)).entry

    def run(
        made: tuple[Fragments, Tensor],
        x: Tensor,
        bias: Tensor,
        rest: Tensor | None,
        out: int,
        alpha: float,
        clusters: int,
    ) -> Tensor:
        w, values = made
        y = torch.full((len(x), out), float("nan"), dtype=torch.bfloat16)
        tensors = (x, values, w.words, w.slots, w.slabs, w.pairs, y, bias, rest)
        addresses = [0 if each is None else each.data_ptr() for each in tensors]
        tiles = token_tiles(config, len(x))
        sizes = (len(x), out, len(w.pairs), tiles, raster_group(config, len(x)))
        items = len(w.pairs) * STRIPS // config.cluster * tiles
        entry(
            (ctypes.c_void_p * 9)(*addresses),
            (ctypes.c_int * 7)(*sizes, rows_of_x(config, len(x)), x.shape[1]),
            ctypes.c_float(alpha),
            min(clusters, items),
        )
        return y

    return run
