"""The text of the attend_decode kernel, compiled for the CPU: blocks and warps are threads."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.ops import PagedKV
from hopsparse.ops.attend_decode import plan
from hopsparse.ops.attend_decode.device import pack

ROOT = Path(__file__).parents[2]

_ENTRY = """
struct Config {
  static constexpr Type kType = Type::bf16;
  static constexpr int kDim = 64, kGroup = 4, kCluster = 2, kWarps = 2;
};
extern "C" void entry(const attend_decode::Args* a, u32 batch) {
  launch({1, a->kv_heads, batch}, 2, 64, sizeof(attend_decode::Smem<Config>),
         [&] { attend_decode::run<Config>(*a); });
}
"""

Run = Callable[..., tuple[Tensor, Tensor]]


def compiled(folder: Path) -> Run:
    """The kernel for bfloat16, dim 64, groups up to 4, in clusters of two blocks of two warps."""
    kernel = (ROOT / "src/hopsparse/ops/attend_decode/kernel.cuh").read_text(encoding="utf-8")
    text = re.sub(r"^\s*#(include|pragma unroll).*$", "", kernel, flags=re.MULTILINE)
    shared = "extern __shared__ __align__(16) u8 memory[];"
    text = text.replace(shared, "u8* memory = shared_memory();")
    source, library = folder / "decode.cpp", folder / "decode.so"
    source.write_text(f'#include "cuda_on_cpu.hpp"\n{text}{_ENTRY}')
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    include = f"-I{Path(__file__).parent}"
    subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
    entry = ctypes.CDLL(str(library)).entry

    def run(
        q: Tensor, cache: PagedKV, indices: Tensor | None, counts: Tensor | None, block: int
    ) -> tuple[Tensor, Tensor]:
        out = torch.full_like(q, float("nan"))
        lse = torch.full(q.shape[:2], float("nan"))
        args = pack((out, lse), q, cache, (indices, counts), block, q.shape[2] ** -0.5)
        entry(ctypes.byref(args), q.shape[0])
        return out, lse

    assert plan.group_for(4) == 4
    return run
