"""The texts of the score_blocks and append_keys kernels, compiled for the CPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.ops.score_blocks import plan
from hopsparse.ops.score_blocks.choose import Choice, pack_choice
from hopsparse.ops.score_blocks.device import Wanted, pack, pack_append
from hopsparse.ops.score_blocks.starts import Asks
from tests.helpers.block_scores import Problem

ROOT = Path(__file__).parents[2]
FILES = (
    "device/order/rank.cuh",
    *(
        f"ops/score_blocks/{name}.cuh"
        for name in ("fold", "rows", "newest", "corners", "scores", "kernel", "choose", "append")
    ),
)

# What the texts ask of a GPU beyond cuda_on_cpu.hpp.
_HERE = """
#define LATE_COPIES
#include "mma_on_cpu.hpp"
thread_local Index gridDim;
// Nothing is read, but it could be: an address outside of what is there would end the process.
inline void prefetch_l2(const void* from) { (void)*static_cast<const volatile u8*>(from); }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
template <int N>
void load_written(u32 (&words)[N], bool inside, const void* from) {
  for (u32& word : words) word = 0;
  if (inside) std::memcpy(words, from, sizeof(words));
}
inline void load_written_over(u32 (&words)[4], bool inside, const void* from) {
  if (inside) std::memcpy(words, from, sizeof(words));
}
template <bool Bf16>
u32 larger_size(u32 one, u32 other) {
  u32 word = 0;
  for (u32 shift = 0; shift < 32; shift += 16) {
    // Bits of magnitudes are ordered as these are, and NaN is above infinity.
    word |= max(one >> shift & 0x7FFF, other >> shift & 0x7FFF) << shift;
  }
  return word;
}
"""

_ENTRY = """
template <int Kind_, int Type_, int Dim, int Heads, int Scores, bool Tensor>
struct Tested {
  static constexpr score_blocks::Kind kKind = static_cast<score_blocks::Kind>(Kind_);
  static constexpr Type kType = static_cast<Type>(Type_);
  static constexpr int kDim = Dim, kHeads = Heads, kWarps = 2, kScores = Scores, kRanks = 1024;
  static constexpr int kAhead = 2;
  static constexpr bool kTensor = Tensor;
  static constexpr int kOne = Kind_ == 2 || (Kind_ == 0 && kType == Type::f32) ? 1 : 2;
  static constexpr int kRows = Tensor ? (Dim == 64 ? 4 : 8) : kOne;
};
template <class C>
void score(const score_blocks::Args& a, u32 batch, int cluster) {
  launch({1, a.kv_heads, batch}, cluster, 64, sizeof(score_blocks::Smem<C>), [&] {
    gridDim = {u32(cluster), 1, 1};
    score_blocks::run<C>(a);
  });
}
template <class C>
void choose(const score_blocks::ChooseArgs& a, u32 batch, int cluster) {
  if constexpr (score_blocks::Facts<C>::kStep % 4 == 0) {
    launch({1, a.of.kv_heads, batch}, cluster, 64, sizeof(score_blocks::ChooseSmem<C>), [&] {
      gridDim = {u32(cluster), 1, 1};
      score_blocks::run_chosen<C>(a);
    });
  }
}
template <int Type_, int Dim>
struct Appended {
  static constexpr Type kType = static_cast<Type>(Type_);
  static constexpr int kDim = Dim, kWarps = 4;
};
template <int Type_, int Dim>
void append(const append_keys::Args& a, u32 grid, u32 batch) {
  launch({grid, batch, 1}, 1, 128, 8, [&] { append_keys::run<Appended<Type_, Dim>>(a); });
}
extern "C" void entry(const score_blocks::Args* a, u32 batch, int cluster, int number) {
  switch (number) {
CASES
  }
}
extern "C" void choose_entry(const score_blocks::ChooseArgs* a, u32 batch, int cluster,
                             int number) {
  switch (number) {
CHOOSE
  }
}
extern "C" void append_entry(const append_keys::Args* a, u32 grid, u32 batch, int wide, int dim) {
  if (dim == 64) wide ? append<2, 64>(*a, grid, batch) : append<0, 64>(*a, grid, batch);
  if (dim == 128) wide ? append<2, 128>(*a, grid, batch) : append<0, 128>(*a, grid, batch);
  if (dim == 256) wide ? append<2, 256>(*a, grid, batch) : append<0, 256>(*a, grid, batch);
}
"""


@dataclass(frozen=True)
class Variant:
    """A kernel that is compiled: few threads, and room for few scores."""

    kind: str
    dtype: torch.dtype
    dim: int
    heads: int
    scores: int = 512
    tensor: bool = False

    def __str__(self) -> str:
        name = f"{self.kind} {self.dtype} dim {self.dim} heads {self.heads} scores {self.scores}"
        return f"{name} tensor cores" if self.tensor else name


BF16, F16, F32 = TYPES = torch.bfloat16, torch.float16, torch.float32
VARIANTS = (
    Variant("bound", BF16, 64, 1),
    Variant("bound", BF16, 64, 4),
    Variant("bound", BF16, 64, 2, 70),  # less than the rows: scored twice
    Variant("bound", BF16, 128, 4),
    Variant("bound", BF16, 256, 2),
    Variant("bound", F32, 64, 4),
    Variant("bound", F32, 128, 2),
    Variant("mean", F32, 64, 4),
    Variant("mean", F32, 128, 1),
    Variant("mass", BF16, 64, 4),
    Variant("mass", BF16, 128, 2, 24),
    Variant("mass", F32, 64, 1),
    Variant("mass", F32, 256, 4),
    Variant("bound", BF16, 64, 8, tensor=True),
    Variant("bound", BF16, 64, 16, 350, tensor=True),  # less than the rows: scored twice
    Variant("bound", BF16, 128, 8, tensor=True),
    Variant("bound", F16, 128, 16, tensor=True),
    Variant("bound", F16, 256, 8, tensor=True),
    Variant("bound", BF16, 256, 16, tensor=True),
)


def _cases(name: str) -> str:
    """A branch for each variant."""
    return "\n".join(
        f"    case {number}: {name}<Tested<{plan.KINDS.index(t.kind)}, "
        f"{TYPES.index(t.dtype)}, {t.dim}, {t.heads}, {t.scores}, {str(t.tensor).lower()}>>"
        "(*a, batch, cluster); "
        "break;"
        for number, t in enumerate(VARIANTS)
    )


ASKS_ALL = Asks(first=True, later=True)


class Compiled:
    """The kernels of `VARIANTS`, and those that take in keys."""

    def __init__(self, folder: Path) -> None:
        files = [ROOT / "src/hopsparse" / name for name in FILES]
        kernels = "\n".join(file.read_text(encoding="utf-8") for file in files)
        text = re.sub(r"^\s*#(include|pragma).*$", "", kernels, flags=re.MULTILINE)
        shared = "extern __shared__ __align__(16) u8 memory[];"
        text = text.replace(shared, "u8* memory = shared_memory();")
        source, library = folder / "score.cpp", folder / "score.so"
        entry = _ENTRY.replace("CASES", _cases("score")).replace("CHOOSE", _cases("choose"))
        source.write_text(_HERE + text + entry)
        options = [
            "-std=c++20",
            "-O1",
            "-DCUT_SUMS",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            "-pthread",
        ]
        include = f"-I{Path(__file__).parent}"
        subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
        self._library = ctypes.CDLL(str(library))

    def scores(
        self,
        tested: Variant,
        p: Problem,
        cluster: int,
        *,
        per_head: bool,
        asks: Asks = ASKS_ALL,
        keys: Tensor | None = None,
    ) -> Tensor:
        """What the kernel writes; what it does not is 7."""
        heads = p.q.shape[1] if per_head else p.blocks.low.shape[1]
        scores = torch.full((p.q.shape[0], heads, p.blocks.low.shape[2]), 7.0)
        wanted = Wanted(tested.kind, p.scale, per_head, keys=keys)
        args = pack(scores, p.q, p.kept, p.lengths, p.blocks.block, wanted)
        args.ask_first, args.ask_later = asks
        number = VARIANTS.index(tested)
        self._library.entry(ctypes.byref(args), p.q.shape[0], cluster, number)
        return scores

    def chosen(
        self,
        tested: Variant,
        p: Problem,
        cluster: int,
        choice: Choice,
        asks: Asks = ASKS_ALL,
        keys: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The lists that the kernel writes; what it does not is -7."""
        batch, kv_heads = p.blocks.low.shape[:2]
        indices = torch.full((batch, kv_heads, choice.sizes[1]), -7, dtype=torch.int32)
        counts = torch.full((batch, kv_heads), -7, dtype=torch.int32)
        asked = (p.lengths, p.blocks.block, Wanted(tested.kind, p.scale, False, keys=keys), choice)
        args = pack_choice([indices, counts], p.q, p.kept, asked)
        args.of.ask_first, args.of.ask_later = asks
        number = VARIANTS.index(tested)
        self._library.choose_entry(ctypes.byref(args), batch, cluster, number)
        return indices, counts

    def append(
        self, p: Problem, keys: Tensor, starts: Tensor, counts: Tensor | None = None
    ) -> None:
        """Take in keys [batch, new, kv_heads, dim]."""
        args = pack_append(p.kept, keys, starts, counts, p.blocks.block)
        batch, new, kv_heads, dim = keys.shape
        grid = plan.append_grid(p.blocks.low.shape[2], p.blocks.block, kv_heads, new)
        wide = int(keys.dtype == F32)
        self._library.append_entry(ctypes.byref(args), grid, batch, wide, dim)
