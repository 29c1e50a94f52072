"""wide.cuh and arrange.cuh of spmm_csr, compiled for the CPU: their threads are threads."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.ops.spmm_csr.packed import Packed
from hopsparse.ops.spmm_csr.tiles import UNIT
from hopsparse.ops.spmm_csr.wide import (
    ARGS_BYTES,
    ARRANGE_ARGS,
    ARRANGE_THREADS,
    PIECE_COLUMNS,
    SCALARS,
    Config,
    wide_spec,
)

SOURCES = Path(__file__).parents[2] / "src/hopsparse"
FOLDER = SOURCES / "ops/spmm_csr"
Run = Callable[[Packed, Tensor, Tensor | None], Tensor]

# What the PTX of unpack.cuh does.
_TAKE = """
  u32 entry[8];
  for (u32 i = 0; i < 8; ++i) {
    const u32 is_set = word >> shift >> i & 1;
    entry[i] = is_set ? load_shared_u16(next) : 0;
    next += 2 * is_set;
  }
  for (u32 i = 0; i < 4; ++i) w[i] = entry[2 * i] | entry[2 * i + 1] << 16;
"""


def text_of(path: Path) -> str:
    """A file without its includes."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^\s*#(include|pragma).*$", "", text, flags=re.MULTILINE)


def unpack_text() -> str:
    """unpack.cuh, its PTX in C++."""
    text, count = re.subn(
        r"#define HOPSPARSE_TAKE.*#undef HOPSPARSE_TAKE",
        lambda _: _TAKE,
        text_of(FOLDER / "unpack.cuh"),
        flags=re.DOTALL,
    )
    assert count == 1
    return text


def _config_text(config: Config, room: int, stages: int) -> str:
    """The Config of the kernel with fewer stages, its instructions in C++, and the entries."""
    spec = wide_spec(config, "bfloat16", room)
    head, rest = spec.text.split("  using Number = float;")
    # Operands in registers, four for each 16 columns: a tile of unpack.cuh each.
    assert re.findall(r"\}, \{%(\d+), .*?\}, %(\d+), add, 1, 1, 0;", rest) == [
        (str(4 * step), str(16 + step)) for step in range(4)
    ]
    head, count = re.subn(r"kStages = \d+", f"kStages = {stages}", head)
    assert count == 1
    return f"""
static thread_local float sums[{config.tokens // 2}];  // not inline: libraries would share one
{head}
  static void declare() {{}}
  template <int Panel>
  static void zero() {{
    for (float& sum : sums) sum = 0;
  }}
  template <int Panel>
  static void read(float (&d)[{config.tokens // 2}]) {{
    std::memcpy(d, sums, sizeof(d));
  }}
  // Operands are read when the product is done, as late as the wait for it.
  template <int Panel>
  static void multiply(const u32 (&a)[4][4], const u64 (&b)[4]) {{
    issued.push_back([&a, at = std::array<u64, 4>{{b[0], b[1], b[2], b[3]}}] {{
      for (u32 step = 0; step < 4; ++step) {{
        const Operand tokens(at[step]);
        multiply_16<{config.tokens}>(sums, gather(a[step]), [&](u32 token, u32 k) {{
          return tokens.k_major(token, k);
        }});
      }}
    }});
  }}
}};
static_assert(sizeof(spmm_csr_wide::Args) == {ARGS_BYTES});
extern "C" void multiply(const spmm_csr_wide::Args* args, u32 clusters) {{
  launch({{clusters, 1, 1}}, {config.parts * config.share}, {spec.threads},
         spmm_csr_wide::Smem<Config>::kBytes,
         [&] {{ spmm_csr_wide::run<Config>(*args, shared_memory()); }});
}}
extern "C" void arrange(const spmm_csr_arrange::Args* args, u32 blocks) {{
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {{
    for (threadIdx.x = 0; threadIdx.x < {ARRANGE_THREADS}; ++threadIdx.x) {{
      spmm_csr_arrange::run(*args);
    }}
  }}
}}
"""


def compiled(folder: Path, config: Config, room: int = 1024, stages: int = 2) -> Run:
    """Both kernels for bfloat16: x @ w.T + bias, NaN where nothing is stored."""
    wgmma = (SOURCES / "device/ptx/wgmma.cuh").read_text(encoding="utf-8")
    descriptor = re.search(r"__device__ [^\n]* swizzled_descriptor\(.*?\n\}", wgmma, re.DOTALL)
    assert descriptor
    parts = [text_of(SOURCES / "device/pipe/ring.cuh"), descriptor[0], unpack_text()]
    parts += [text_of(FOLDER / "wide.cuh"), text_of(FOLDER / "arrange.cuh")]
    source, library = folder / f"{config.name}.cpp", folder / f"{config.name}_{room}.so"
    text = "\n".join([*parts, _config_text(config, room, stages)])
    source.write_text(f'#include <array>\n#include "four_bits_on_cpu.hpp"\n{text}')
    options = ["-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    include = f"-I{Path(__file__).parent}"
    subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
    entries = ctypes.CDLL(str(library))

    def run(w: Packed, x: Tensor, bias: Tensor | None) -> Tensor:
        assert w.room == room
        laid = arranged(entries, w, x)
        y = torch.full((x.shape[0], w.shape[0]), torch.nan, dtype=x.dtype)
        memory = ctypes.create_string_buffer(ARGS_BYTES + 64)
        aligned = -(-ctypes.addressof(memory) // 64) * 64
        ctypes.memmove(aligned, _args(config, w, laid, bias, y), ARGS_BYTES)
        blocks = config.blocks(w.shape[0], x.shape[0])
        entries.multiply(ctypes.c_void_p(aligned), blocks // (config.parts * config.share))
        return y

    return run


def arranged(entries: ctypes.CDLL, w: Packed, x: Tensor) -> Tensor:
    """Tokens as arrange.cuh lays them; NaN where it writes nothing."""
    (tokens, k), columns = x.shape, w.units * UNIT
    laid = torch.full((tokens, columns), torch.nan, dtype=x.dtype)
    pitch, pieces = x.stride(0) * 2, columns // PIECE_COLUMNS
    vector = k % 8 == 0 and x.data_ptr() % 16 == 0 and pitch % 16 == 0
    args = ARRANGE_ARGS.pack(x.data_ptr(), laid.data_ptr(), pitch, tokens, k, pieces, vector)
    entries.arrange(args, -(-tokens * pieces // ARRANGE_THREADS))
    return laid


def _args(config: Config, w: Packed, laid: Tensor, bias: Tensor | None, y: Tensor) -> bytes:
    """What wide_device.py packs, with a tensor map as hopper_on_cpu.hpp has it."""
    tokens, k = laid.shape
    x_rows = config.rows_of_x(tokens)
    x_map = (laid.data_ptr(), 2, k, tokens, 0, 0, 2 * k, 0, 0, UNIT, x_rows, *([0] * 5))
    parts = (each.data_ptr() for each in (w.words, w.prefixes, w.values, w.starts))
    pointers = (*parts, 0 if bias is None else bias.data_ptr(), y.data_ptr())
    sizes = (w.shape[0], tokens, w.units, config.steps(w.units))
    tiles = config.token_tiles(tokens), x_rows
    return bytes((ctypes.c_uint64 * 16)(*x_map)) + SCALARS.pack(*pointers, *sizes, *tiles)
