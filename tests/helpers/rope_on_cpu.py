"""The text of the rope_append kernel, compiled for the CPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.ops.rope_append import plan
from hopsparse.ops.rope_append.device import pack
from tests.helpers.rope import Problem

ROOT = Path(__file__).parents[2]

_HERE = """
#include "cuda_on_cpu.hpp"
template <int N>
void load_written(u32 (&words)[N], bool inside, const void* from) {
  for (u32& word : words) word = 0;
  if (inside) std::memcpy(words, from, sizeof(words));
}
inline void load_written(u32 (&words)[1], bool inside, const void* from) {
  words[0] = 0;
  if (inside) std::memcpy(words, from, 4);
}
template <Type T>
u32 pack(float low, float high) {
  u16 both[2];
  store_value<T>(both, 0, low);
  store_value<T>(both, 1, high);
  return both[0] | u32(both[1]) << 16;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
"""

_ENTRY = """
template <int Dim, bool Norm>
struct Tested {
  static constexpr Type kType = Type::bf16;
  static constexpr u32 kDim = Dim, kThreads = THREADS;
  static constexpr bool kNorm = Norm;
};
template <int Dim, bool Norm>
void rope(const rope_append::Args& a, u32 rows, u32 shares) {
  launch({rows, shares, 1}, 1, THREADS, 8, [&] { rope_append::run<Tested<Dim, Norm>>(a, shares); });
}
extern "C" void entry(const rope_append::Args* a, u32 rows, u32 shares, int dim, int norm) {
  if (dim == 64) norm ? rope<64, true>(*a, rows, shares) : rope<64, false>(*a, rows, shares);
  if (dim == 128) norm ? rope<128, true>(*a, rows, shares) : rope<128, false>(*a, rows, shares);
  if (dim == 256) norm ? rope<256, true>(*a, rows, shares) : rope<256, false>(*a, rows, shares);
}
"""


class Compiled:
    """All kernels of bfloat16."""

    def __init__(self, folder: Path) -> None:
        kernel = (ROOT / "src/hopsparse/ops/rope_append/kernel.cuh").read_text(encoding="utf-8")
        text = re.sub(r"^\s*#(include|pragma).*$", "", kernel, flags=re.MULTILINE)
        source, library = folder / "rope.cpp", folder / "rope.so"
        source.write_text(_HERE + text + _ENTRY.replace("THREADS", str(plan.THREADS)))
        options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
        include = f"-I{Path(__file__).parent}"
        subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
        self._library = ctypes.CDLL(str(library))

    def run(self, p: Problem, shares: int, count: Tensor | None = None) -> Tensor:
        """What the kernel writes; what it does not is 7."""
        batch, tokens, width = p.qkv.shape
        _, kv_heads, _, dim = p.cache[0].shape
        q = torch.full((batch, tokens, width // dim - 2 * kv_heads, dim), 7.0, dtype=p.qkv.dtype)
        args = pack(q, p.qkv, p.turns, p.cache, p.ends, p.norms, 1e-5, count)
        norm = int(p.norms is not None)
        self._library.entry(ctypes.byref(args), batch * tokens, shares, dim, norm)
        return q
