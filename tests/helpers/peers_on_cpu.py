"""The text of the peer_sum kernel, compiled for the CPU: ranks, blocks and warps are threads."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.ops.peer_sum import plan

ROOT = Path(__file__).parents[2]

# Ranks run at once, each a sequence of launches as a stream has them. A flag that is not set in two
# minutes ends the process, as a trap ends a kernel.
_BEFORE = """
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include "cuda_on_cpu.hpp"
inline void signal_peer(u32* flag, u32 turn) {
  std::atomic_ref<u32>(*flag).store(turn, std::memory_order_release);
}
inline void wait_peer(const u32* flag, u32 turn, u32 patience_ms) {
  std::atomic_ref<u32> word(*const_cast<u32*>(flag));
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
  while (int(word.load(std::memory_order_acquire) - turn) < 0) {
    if (std::chrono::steady_clock::now() > until) {
      std::fputs("a peer does not come\\n", stderr);
      std::abort();
    }
    std::this_thread::yield();
  }
}
inline u32 load_turn(const u32* from) { return *from; }
inline void load_peer(u32 (&words)[4], bool inside, const void* from) {
  inside ? std::memcpy(words, from, 16) : std::memset(words, 0, 16);
}
inline void load_written(u32 (&words)[4], bool inside, const void* from) {
  load_peer(words, inside, from);
}
template <Type T>
u32 pack(float low, float high) {
  static_assert(T == Type::bf16);
  u16 both[2];
  store_value<T>(both, 0, low), store_value<T>(both, 1, high);
  return both[0] | u32(both[1]) << 16;
}
"""
_ENTRY = """
// Calls of a rank: what it copies to its part first, and the launch behind.
struct Call {
  peer_sum::Args args;
  const void* part;
  u64 part_bytes;
};
extern "C" void entry(const Call* calls, u32 ranks, u32 count) {
  std::vector<std::thread> all;
  for (u32 r = 0; r < ranks; ++r) {
    all.emplace_back([=] {
      for (u32 i = 0; i < count; ++i) {
        const Call& call = calls[r * count + i];
        std::memcpy(call.args.base[r] + call.args.slot, call.part, call.part_bytes);
        launch({call.args.blocks, 1, 1}, 1, Config::kThreads, 16,
               [&] { peer_sum::run<Config>(call.args); });
      }
    });
  }
  for (auto& each : all) each.join();
}
"""


class Call(ctypes.Structure):
    """`struct Call` above."""

    _fields_ = (("args", plan.Args), ("part", ctypes.c_void_p), ("part_bytes", ctypes.c_uint64))


Run = Callable[[Sequence[Sequence[Call]]], None]


def compiled(folder: Path, name: str, threads: int, depth: int) -> Run:
    """A kernel; its blocks are small, since each thread is one of the CPU.

    Args:
        folder: For the library.
        name: Of a spec that makes bfloat16, or gathers.
        threads: Of a block.
        depth: Chunks of a thread at a time.
    """
    spec = next(each for each in plan.every_spec() if each.name == name)
    kernel = (ROOT / "src/hopsparse" / spec.kernel).read_text(encoding="utf-8")
    config = spec.text[: spec.text.index('extern "C"')]
    config = re.sub(
        r"kDepth = \d+, kThreads = \d+", f"kDepth = {depth}, kThreads = {threads}", config
    )
    text = re.sub(r"^#include.*$|^\s*#pragma unroll.*$", "", kernel + config, flags=re.MULTILINE)
    stem = re.sub(r"\W", "_", name)
    source, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
    source.write_text(_BEFORE + text + _ENTRY)
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    include = f"-I{Path(__file__).parent}"
    subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
    entry = ctypes.CDLL(str(library)).entry

    def run(calls: Sequence[Sequence[Call]]) -> None:
        flat = [call for of_rank in calls for call in of_rank]
        entry((Call * len(flat))(*flat), len(calls), len(calls[0]))

    return run


def memory(ranks: int, slots: int, slot_bytes: int) -> list[Tensor]:
    """Symmetric memory of each rank: flags that are zero, and parts that hold noise."""
    sizes = plan.HEADER_BYTES + slots * slot_bytes
    found = []
    for _ in range(ranks):
        tensor = torch.full((sizes + 16,), 0xA5, dtype=torch.uint8)
        tensor = tensor[-tensor.data_ptr() % 16 :][:sizes]
        tensor[: plan.HEADER_BYTES] = 0
        found.append(tensor)
    return found
