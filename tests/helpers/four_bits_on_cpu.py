"""kernel.cuh of spmm_nm with weights of 4 bits, compiled for the CPU: its threads are threads."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.formats import Quantized
from hopsparse.ops.spmm_nm.cost import Problem, rows_of_x, stages_of_k
from hopsparse.ops.spmm_nm.kernel import ARGS_BYTES, SCALARS, Config, Numbers, spec_of_numbers

SOURCES = Path(__file__).parents[2] / "src/hopsparse"
FOLDER = SOURCES / "ops/spmm_nm"
Run = Callable[[Quantized, Tensor, int], Tensor]

# PTX that becomes a function of four_bits_on_cpu.hpp; each must be there.
_STATEMENTS = {
    r'asm\("lop3\.b32 .*?\);': "bits = (twice & P::kMask) ^ P::kFlip;",
    r'asm\("fma\.rn\.bf16x2 .*?\);': "pair = pair_fma(bits, times, P::kPlus);",
    r'asm\("fma\.rn\.f16x2 .*?\);': "pair = 0;",
    r'asm\("mul\.rn\.bf16x2 %0, %0, .*?\);': "both = pair_mul(both, NibblePair<T>::kScale);",
    r'asm\("mul\.rn\.bf16x2 %0, %1, .*?\);': "product = pair_mul(pair, scale);",
}

# In place of epilogue.cuh, and of what only x of 4 bits and promoted sums need.
_EPILOGUE = """
namespace spmm_nm {
template <class C>
struct Terms {
  Terms(const Args&, Origin, int) {}
};
template <class C>
void store_tile(const Args& args, Sums<C>& d, u32, u32 wg, u32&, Origin from, const Terms<C>&) {
  for (int p = 0; p < C::kPanels; ++p) {
    for (int i = 0; i < C::kTokens / 2; ++i) {
      const int row = (from.panel + wg * C::kPanels + p) * 64 + row_of_panel(i / 2 % 2);
      const int token = from.token + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
      if (row >= args.out || token >= args.tokens) continue;
      static_cast<float*>(args.y)[static_cast<long>(token) * args.out + row] = d[p][i];
    }
  }
}
template <class C, class... Rest>
void sum_promoted(Rest&&...) {}
template <class C, class... Rest>
void produce_from_four_bits(Rest&&...) {}
}
"""


def _text_of(path: Path) -> str:
    """A file with those of its own folder that it includes, without any other."""
    text = path.read_text(encoding="utf-8")
    stands_in = ("epilogue.cuh", "four_bit_tokens.cuh", "promoted.cuh")

    def included(found: re.Match[str]) -> str:
        name = found[1]
        if name in stands_in:
            return _EPILOGUE if name == "epilogue.cuh" else ""
        return _text_of(path.parent / name)

    text = re.sub(r'#include "\./(\w+\.cuh)"', included, text)
    return re.sub(r"^\s*#(include|pragma).*$", "", text, flags=re.MULTILINE)


def nibbles_text() -> str:
    """epilogue/nibbles.cuh, its PTX in C++."""
    text = _text_of(SOURCES / "device/epilogue/nibbles.cuh")
    for pattern, statement in _STATEMENTS.items():
        text, count = re.subn(pattern, statement, text, flags=re.DOTALL)
        assert count == 1, pattern
    return text


def _config_text(config: Config) -> str:
    """The Config of the kernel, its instructions in C++, and the entry."""
    spec = spec_of_numbers(config, Numbers("int4", "bfloat16", "float32"), "none", False, True)
    head, rest = spec.text.split("  using Number = float;")
    total = re.search(r"  using Total = .*?;\n\};", rest, re.DOTALL)
    assert total
    sums = f"sums[{config.panels}][{config.tokens // 2}]"
    return f"""
static thread_local float {sums};  // not inline: libraries would share one
{head}
  using Number = float;
  static void declare() {{}}
  template <int Panel>
  static void zero() {{
    for (float& sum : sums[Panel]) sum = 0;
  }}
  template <int Panel>
  static void read(float (&d)[{config.tokens // 2}]) {{
    std::memcpy(d, sums[Panel], sizeof(d));
  }}
  // Operands are read when the product is done, as late as the wait for it.
  template <int Index>
  static void multiply(const u32 (&a)[4], u64 b, u32 e) {{
    Windows windows{{{{}}, Index % 2}};
    meet(e, [&](const u32* lanes) {{
      std::memcpy(windows.word, lanes, sizeof(windows.word));
      return 0u;
    }});
    issued.push_back([&a, windows, b] {{
      multiply_kept<{config.tokens}>(sums[Index / 2], gather(a), windows, b);
    }});
  }}
{total[0]}
static_assert(sizeof(spmm_nm::Args) == {ARGS_BYTES});
extern "C" void entry(const spmm_nm::Args* args, int blocks) {{
  gridDim.x = blocks;
  for (int block = 0; block < blocks; ++block) {{
    mbarriers.clear();
    for (Named& each : named) each = {{}};
    launch({{1, 1, 1}}, 1, {spec.threads}, {config.smem_bytes(direct=True) + 1024}, [&] {{
      blockIdx.x = block;
      spmm_nm::run<Config>(*args, shared_memory());
    }});
  }}
}}
"""


def compiled(folder: Path, config: Config) -> Run:
    """The kernel of a tile for bfloat16, which gives float32."""
    names = ("pipe/ring.cuh", "tile/raster.cuh")
    parts = [_text_of(SOURCES / "device" / name) for name in names]
    ways = _text_of(SOURCES / "device/pipe/ways.cuh")
    parts.append(ways[: ways.index("// For those who wait at it")])
    wgmma = (SOURCES / "device/ptx/wgmma.cuh").read_text(encoding="utf-8")
    parts += re.findall(r"__device__ [^\n]*_descriptor\(.*?\n\}", wgmma, re.DOTALL)
    enums = "enum class Activation { none, relu, gelu, gelu_tanh, silu };"
    kernel = _text_of(FOLDER / "kernel.cuh")
    text = "\n".join([*parts, nibbles_text(), enums, kernel, _config_text(config)])
    source, library = folder / f"{config.name}.cpp", folder / f"{config.name}.so"
    source.write_text(f'#include "four_bits_on_cpu.hpp"\n{text}', encoding="utf-8")
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    include = f"-I{Path(__file__).parent}"
    subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
    entry = ctypes.CDLL(str(library)).entry

    def run(w: Quantized, x: Tensor, blocks: int) -> Tensor:
        y = torch.full((x.shape[0], w.shape[0]), torch.nan)
        args = _args(config, w, x, y)
        storage = ctypes.create_string_buffer(args, len(args))
        assert ctypes.addressof(storage) % 16 == 0
        entry(storage, blocks)
        return y

    return run


def _args(config: Config, w: Quantized, x: Tensor, y: Tensor) -> bytes:
    """What device.py packs, with tensor maps as hopper_on_cpu.hpp has them."""
    (out, k), tokens = w.shape, x.shape[0]
    problem, panels, words = Problem(tokens, out, k), -(-out // 64), -(-k // 64)
    values, meta, scales = (w.tensors[name] for name in ("values", "meta", "scales"))
    rows = rows_of_x(config, tokens)
    maps = _map(x, 2, (k, tokens), (2 * k,), (64, rows))
    steps = (128, panels, words)
    box = (128, config.all_panels, config.units)
    maps += _map(values, 8, steps, (words * 1024, 1024), box, plain=True)
    box = (128, config.units, config.all_panels)
    maps += _map(meta, 4, (128, words, panels), (512, words * 512), box, plain=True)
    tiles = -(-out // config.out), -(-tokens // config.tokens)
    pointers = (y.data_ptr(), 0, 0, scales.data_ptr(), 0, 0, 0)
    sizes = (tokens, out, stages_of_k(config, problem), *tiles, 1, rows)
    group = w.scheme.group
    layout = (scales.shape[1], 0, 0, 0, group.bit_length() - 1, 0)
    return maps + SCALARS.pack(*pointers, 1.0, 1.0, *sizes, *layout, 0)


def _map(
    tensor: Tensor,
    size: int,
    sizes: tuple[int, ...],
    steps: tuple[int, ...],
    box: tuple[int, ...],
    *,
    plain: bool = False,
) -> bytes:
    padded = [
        (*each, *[0] * (width - len(each))) for each, width in ((sizes, 4), (steps, 3), (box, 4))
    ]
    words = (tensor.data_ptr(), len(sizes), *padded[0], *padded[1], *padded[2], size, plain, 0)
    return bytes((ctypes.c_uint64 * 16)(*words))
