"""The text of the attend_prefill kernels, compiled for the CPU: a block's threads are threads."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.compiler.wgmma_chain import chained_products
from hopsparse.ops import PagedKV
from hopsparse.ops.attend_prefill import plan
from hopsparse.ops.attend_prefill.device import Lists, _cut, pack, pack_order

SOURCES = Path(__file__).parents[2] / "src/hopsparse"
FOLDER = SOURCES / "ops/attend_prefill"
_ORDER_THREADS = 64  # of 1024: nothing but its speed depends on it


class Run:
    """Both kernels for bfloat16, in one block; results are NaN where nothing is written."""

    def __init__(self, library: Path) -> None:
        self.entries = ctypes.CDLL(str(library))

    def __call__(
        self, q: Tensor, starts: Tensor, cache: PagedKV, lists: Lists, block: int
    ) -> tuple[Tensor, Tensor]:
        out = torch.full_like(q, float("nan"))
        lse = torch.full(q.shape[:2], float("nan"))
        work = self.order(q, starts, cache, lists, block)
        args = pack((out, lse), q, starts, cache, lists, work, (block, q.shape[2] ** -0.5))
        memory = ctypes.create_string_buffer(plan.ARGS_BYTES + 64)
        aligned = -(-ctypes.addressof(memory) // 64) * 64
        ctypes.memmove(aligned, maps(q, cache) + bytes(args), plan.ARGS_BYTES)
        self.entries.attend(ctypes.c_void_p(aligned))
        assert work[0, 0] >= work[0, 1] * _cut(q, cache, lists, block).units
        return out, lse

    def order(self, q: Tensor, starts: Tensor, cache: PagedKV, lists: Lists, block: int) -> Tensor:
        """The table of items, as the kernel that sorts them writes it."""
        cut = _cut(q, cache, lists, block)
        work = torch.full((1 + cut.bundles, 4), -1, dtype=torch.int32)
        most = 0 if lists[0] is None else lists[0].shape[3]
        args = pack_order(cut, starts, cache, lists, work, (q.shape[0], block, most))
        self.entries.order(ctypes.byref(args))
        return work


def text_of(path: Path, *kept: str) -> str:
    """A file without its includes, but for those in `kept`, which are put in their place."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        name = re.match(r'#include "\./(.*)"', line)
        if name and name[1] in kept:
            lines.append(text_of(path.parent / name[1]))
        elif not re.match(r"\s*#(include|pragma)", line):
            lines.append(line)
    return "\n".join(lines)


def offsets(text: str, register: str) -> list[int]:
    """What the generated text of a product adds to the descriptor of an operand, in order."""
    return [int(each) for each in re.findall(rf"add\.s64 {register}, %\d+, (\d+)", text)]


def config_text(config: plan.Config) -> str:
    """`struct Config` with products that read where the generated instructions would."""
    made = chained_products("bf16", plan.KEYS, config.dim)
    score, weigh = made.split("void weigh(")
    steps = {"a": offsets(score, "a"), "k": offsets(score, "b"), "v": offsets(weigh, "b")}
    assert len(steps["a"]) == len(steps["k"]) == config.dim // 16
    assert len(steps["v"]) == plan.KEYS // 16
    lists = {name: ", ".join(map(str, each)) for name, each in steps.items()}
    return f"""
struct Config {{
  static constexpr Type kType = Type::bf16;
  static constexpr int kDim = {config.dim}, kStages = {config.stages};
  static constexpr bool kTurns = {str(config.turns).lower()};
  static constexpr int kProducerRegisters = 0, kConsumerRegisters = 0;
  static void score(float (&s)[{plan.KEYS // 2}], u64 q, u64 k) {{
    issued.push_back([&s, q, k] {{
      const u64 of_q[] = {{{lists["a"]}}}, of_k[] = {{{lists["k"]}}};
      for (float& each : s) each = 0;
      for (int step = 0; step < {config.dim // 16}; ++step) {{
        const Operand a(q + of_q[step]), b(k + of_k[step]);
        multiply_16<{plan.KEYS}>(s, [&](u32 row, u32 k) {{ return a.k_major(row, k); }},
                                 [&](u32 row, u32 k) {{ return b.k_major(row, k); }});
      }}
    }});
  }}
  static void weigh(float (&o)[{config.dim // 2}], const u32 (&p)[{plan.KEYS // 4}], u64 v) {{
    issued.push_back([&o, &p, v] {{
      const u64 of_v[] = {{{lists["v"]}}};
      for (int step = 0; step < {plan.KEYS // 16}; ++step) {{
        const Operand b(v + of_v[step]);
        multiply_16<{config.dim}>(o, gather(p + 4 * step),
                                  [&](u32 column, u32 k) {{ return b.n_major(column, k); }});
      }}
    }});
  }}
}};
static_assert(sizeof(attend_prefill::Args) == {plan.ARGS_BYTES});
static_assert(attend_prefill::Smem<Config>::kBytes == {config.smem_bytes});
static_assert(sizeof(attend_prefill_order::Args) == {plan.ORDER_ARGS_BYTES});
extern "C" void order(const attend_prefill_order::Args* a) {{
  launch({{1, 1, 1}}, 1, {_ORDER_THREADS}, 0, [&] {{ attend_prefill_order::run(*a); }});
}}
extern "C" void attend(const attend_prefill::Args* a) {{
  launch({{1, 1, 1}}, 1, 384, {config.smem_bytes},
         [&] {{ attend_prefill::run<Config>(*a, shared_memory()); }});
}}
"""


def compiled(folder: Path, config: plan.Config) -> Run:
    """Both kernels of a config."""
    kernel = text_of(FOLDER / "kernel.cuh", "producer.cuh", "softmax.cuh")
    kernel = re.sub(r'asm volatile\("" : .*', ";", kernel)
    order = text_of(FOLDER / "order.cuh").replace("__shared__", "static")
    order = order.replace("kThreads = 1024", f"kThreads = {_ORDER_THREADS}")
    wgmma = (SOURCES / "device/ptx/wgmma.cuh").read_text(encoding="utf-8")
    found = re.search(r"__device__ [^\n]* swizzled_descriptor\(.*?\n\}", wgmma, re.DOTALL)
    assert found
    ring = text_of(SOURCES / "device/pipe/ring.cuh")
    parts = ['#include "hopper_on_cpu.hpp"', ring, found[0], kernel, order, config_text(config)]
    source, library = folder / f"prefill{config.dim}.cpp", folder / f"prefill{config.dim}.so"
    source.write_text("\n".join(parts))
    options = ["-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    include = f"-I{Path(__file__).parent}"
    subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
    return Run(library)


def maps(q: Tensor, cache: PagedKV) -> bytes:
    """Tensor maps as hopper_on_cpu.hpp has them, of the sizes, strides and boxes of device.py."""
    tokens, heads, dim = q.shape
    pages, kv_heads, page, _ = cache.keys.shape
    made = _map(q, (dim, heads, tokens), (2 * dim, 2 * heads * dim), (64, 1, plan.ROWS))
    for pool in (cache.keys, cache.values):
        steps = tuple(2 * pool.stride(i) for i in (2, 1, 0))
        made += _map(pool, (dim, page, kv_heads, pages), steps, (64, page, 1, 1))
    return made


def _map(
    tensor: Tensor, sizes: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    padded = [
        (*each, *[0] * (width - len(each))) for each, width in ((sizes, 4), (steps, 3), (box, 4))
    ]
    words = (tensor.data_ptr(), len(sizes), *padded[0], *padded[1], *padded[2], 0, 0, 0)
    return bytes((ctypes.c_uint64 * 16)(*words))
