"""The text of the attend_decode kernel, compiled for the CPU: blocks and warps are threads."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.ops import PagedKV
from hopsparse.ops.attend_decode.device import pack

FOLDER = Path(__file__).parents[2] / "src/hopsparse/ops/attend_decode"

_ENTRY = """
struct Config {{
  static constexpr Type kType = Type::{kind};
  static constexpr int kDim = {dim}, kHeads = {heads}, kWarps = {warps}, kStages = {stages};
  static constexpr bool kSharedQueries = {shared};
}};
extern "C" void entry(const attend_decode::Args* a, u32 batch) {{
  launch({{1, a->kv_heads, batch}}, a->splits, 32 * {warps}, sizeof(attend_decode::Smem<Config>),
         [&] {{ attend_decode::run<Config>(*a); }});
}}
"""

Run = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Built:
    """How the kernel is compiled: fewer warps and stages than on a GPU, so that rings turn."""

    kind: str = "bf16"
    dim: int = 64
    heads: int = 8
    warps: int = 2
    stages: int = 2
    is_late: bool = True
    shares_queries: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}, dim {self.dim}, {self.heads} heads, {self.stages} stages"

    @property
    def dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "f16": torch.float16}[self.kind]


def compiled(built: Built, folder: Path) -> Run:
    """The kernel, as a function of what `pack` takes and of the blocks that share a list."""
    parts = (FOLDER / f"{name}.cuh" for name in ("facts", "pages", "merge", "kernel"))
    kernel = "\n".join(part.read_text(encoding="utf-8") for part in parts)
    text = re.sub(r"^\s*#(include|pragma).*$", "", kernel, flags=re.MULTILINE)
    shared = "extern __shared__ __align__(128) u8 memory[];"
    assert shared in text
    text = text.replace(shared, "u8* memory = shared_memory();")
    entry = _ENTRY.format(
        **{name: getattr(built, name) for name in ("kind", "dim", "heads", "warps", "stages")},
        shared=str(built.shares_queries).lower(),
    )
    source, library = folder / "decode.cpp", folder / "decode.so"
    late = "#define LATE_COPIES\n" if built.is_late else ""
    source.write_text(f'{late}#include "mma_on_cpu.hpp"\n{text}{entry}')
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    include = f"-I{Path(__file__).parent}"
    subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
    run_entry = ctypes.CDLL(str(library)).entry

    def run(
        q: Tensor,
        cache: PagedKV,
        indices: Tensor | None,
        counts: Tensor | None,
        block: int,
        splits: int = 2,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        out = torch.full_like(q, float("nan"))
        lse = torch.full(q.shape[:2], float("nan"))
        factor = q.shape[2] ** -0.5 if scale is None else scale
        args = pack((out, lse), q, cache, (indices, counts), block, factor, splits)
        run_entry(ctypes.byref(args), q.shape[0])
        return out, lse

    return run
