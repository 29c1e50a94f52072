"""A process that runs a kernel's text on the CPU after an edit: run as a program.

Its arguments are a path relative to the package, text that stands there once, what stands there
instead, and a folder to compile in. Exit code 1: a wrong number; 0: all were right. A barrier that
nobody completes ends the process with another code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from hopsparse.formats import BSR, CSR
from hopsparse.ops.attend_prefill import plan
from hopsparse.ops.spmm_bsr.fragments import fragments_of
from hopsparse.ops.spmm_bsr.fragments_kernel import FragmentConfig
from hopsparse.ops.spmm_csr.packed import pack
from hopsparse.ops.spmm_csr.wide import Config
from tests.helpers import decode_on_cpu, fragments_on_cpu, prefill_on_cpu, wide_on_cpu
from tests.helpers.attention import Shape, assert_attention, paged, tokens_of
from tests.helpers.blocks import blocked
from tests.helpers.mutations import Mutation, copy_of_kernels
from tests.helpers.prefill import assert_prefill, problem


def prefill(package: Path, folder: Path) -> None:
    prefill_on_cpu.FOLDER, prefill_on_cpu.SOURCES = package / "ops/attend_prefill", package
    run = prefill_on_cpu.compiled(folder, plan.Config(64, 2))
    p = problem(Shape(heads=2, kv_heads=1, dim=64, page=64), [(130, 400)], block=64, lists=None)
    assert_prefill(p, *run(p.q, p.starts, p.cache, p.lists, p.block))


def decode(package: Path, folder: Path) -> None:
    decode_on_cpu.FOLDER = package / "ops/attend_decode"
    built = decode_on_cpu.Built()
    run = decode_on_cpu.compiled(built, folder)
    group = built.heads - 3
    shape = Shape(heads=2 * group, kv_heads=2, dim=built.dim)
    sequences = tokens_of(shape, [40, 200], built.dtype)
    q = torch.randn(2, shape.heads, shape.dim).to(built.dtype)
    out, lse = run(q, paged(shape, sequences), None, None, 16, 2)
    for b, (keys, values) in enumerate(sequences):
        for head in range(shape.heads):
            pair = (keys[head // group], values[head // group])
            assert_attention((out[b, head], lse[b, head]), q[b, head], *pair, shape.scale)


def fragments(package: Path, folder: Path) -> None:
    fragments_on_cpu.ROOT = package
    config = FragmentConfig(1, 32, 2)
    dense = blocked(304, 656, (16, 16), torch.bfloat16, torch.device("cpu"), kept=0.3, largest=1)
    w, x = BSR.from_dense(dense, (16, 16)), torch.randint(-1, 2, (40, 656)).bfloat16()
    bias, made = torch.zeros(304).bfloat16(), fragments_of(w)
    run = fragments_on_cpu.compiled(folder, config, stages=2, residual=False, direct=False)
    y = run((made, made.pack(w.values)), x, bias, None, 304, 1.0, 1)
    assert torch.equal(y, (x.double() @ dense.double().T).relu().bfloat16())


def wide(package: Path, folder: Path) -> None:
    wide_on_cpu.FOLDER, wide_on_cpu.SOURCES = package / "ops/spmm_csr", package
    dense = torch.randint(-2, 3, (200, 640)).bfloat16() * (torch.rand(200, 640) < 0.25)
    w, x = CSR.from_dense(dense), torch.randint(-2, 3, (40, 640)).bfloat16()
    packed = pack(w.indptr, w.indices, w.values, 640)
    assert packed is not None
    run = wide_on_cpu.compiled(folder, Config(16, 1, 2, 2))
    assert torch.equal(run(packed, x, None), (x.float() @ dense.float().T).bfloat16())


RUNS: dict[str, Callable[[Path, Path], None]] = {
    "ops/attend_prefill": prefill,
    "ops/attend_decode": decode,
    "ops/spmm_bsr": fragments,
    "ops/spmm_csr": wide,
}


def main(path: str, old: str, new: str, folder: Path) -> int:
    torch.manual_seed(0)
    package = copy_of_kernels(folder / "package")
    Mutation("on the CPU", path, old, new, "", "").apply(package)
    try:
        RUNS[str(Path(path).parent)](package, folder)
    except AssertionError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
