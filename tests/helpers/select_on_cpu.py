"""The text of the select kernel, compiled for the CPU: blocks and warps are threads."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.ops.select import plan, reference

ROOT = Path(__file__).parents[2]
#: Columns that a kernel of tests takes; its blocks are small, since each thread is one.
LONGEST = 2048

_ENTRY = """
template <int By_>
struct Tested : Config {
  static constexpr select_::By kBy = static_cast<select_::By>(By_);
  static constexpr int kCluster = CLUSTER, kThreads = 64, kCapacity = 2048 / CLUSTER;
};
template <int By_>
void run(const select_::Args& a, u32 rows) {
  using C = Tested<By_>;
  launch({rows, 1, 1}, CLUSTER, 64, sizeof(select_::Smem<C>), [&] { select_::run<C>(a); });
}
extern "C" void entry(const select_::Args* a, u32 rows, int by) {
  by == 0 ? run<0>(*a, rows) : by == 1 ? run<1>(*a, rows) : run<2>(*a, rows);
}
"""

Run = Callable[..., list[Tensor]]


def compiled(folder: Path, cluster: int) -> Run:
    """The kernel with clusters of so many blocks; its arguments are those of the reference."""
    package = ROOT / "src/hopsparse"
    files = (package / "device/order/rank.cuh", package / "ops/select/kernel.cuh")
    kernel = "\n".join(file.read_text(encoding="utf-8") for file in files)
    spec = plan.spec_for("float32", "rank", plan.SHAPES[0])
    config = spec.text[: spec.text.index("static_assert")]
    text = re.sub(r"^#(include|pragma unroll).*$", "", kernel + config, flags=re.MULTILINE)
    text = re.sub(r"^\s*#pragma unroll.*$", "", text, flags=re.MULTILINE)
    # select is a function of the C library too.
    text = text.replace("namespace select ", "namespace select_ ").replace("select::", "select_::")
    text = text.replace(
        "extern __shared__ __align__(16) u8 memory[];", "u8* memory = shared_memory();"
    )
    source, library = folder / f"select{cluster}.cpp", folder / f"select{cluster}.so"
    source.write_text(f'#define CLUSTER {cluster}\n#include "cuda_on_cpu.hpp"\n{text}{_ENTRY}')
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
    include = f"-I{Path(__file__).parent}"
    subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
    entry = ctypes.CDLL(str(library)).entry
    return lambda *arguments: _run(entry, *arguments)


def _run(
    entry: Callable[..., None],
    scores: Tensor,
    k: Tensor | None,
    lengths: Tensor | None,
    by: plan.By,
    limit: Tensor | None,
    number: float,
    sizes: reference.Sizes,
) -> list[Tensor]:
    rows, columns = scores.shape
    # What is not written shows.
    indices = torch.full((rows, sizes.width), -7, dtype=torch.int32)
    counts = torch.full((rows,), -7, dtype=torch.int32)
    tensors = (scores, k, lengths, limit, indices, counts)
    addresses = [0 if each is None else each.data_ptr() for each in tensors]
    whole = (columns, sizes.width, sizes.k, sizes.sink, sizes.recent)
    entry(ctypes.byref(plan.Args(*addresses, *whole, number)), rows, plan.BYS.index(by))
    return [indices, counts]
