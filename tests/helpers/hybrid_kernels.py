"""The kernels of hybrid_gradient on a CPU: their own text, compiled by g++ over `warps.h`."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.ops.hybrid_gradient import device, plan
from hopsparse.ops.hybrid_gradient.dispatch import empty_results

FOLDER = Path(plan.__file__).parent
NAMES = ("values", "counts", "offsets", "codes", "scales", "rest", "finite")
# Blocks come one after the other here: a few of them show what many would.
_MOST_BLOCKS = 3
_OPTIONS = ("-std=c++17", "-O1", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE")


class Emulated:
    """All kernels of the operator, compiled for this machine.

    Args:
        folder: Where to put what g++ makes.
    """

    def __init__(self, folder: Path) -> None:
        self.numbers = {spec: number for number, spec in enumerate(plan.every_spec())}
        texts = ['#include "warps.h"', *map(_text, ("coders.cuh", "kernel.cuh"))]
        texts.append("static hybrid_gradient::Args given;")
        texts += [_entry(number, spec) for spec, number in self.numbers.items()]
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        source.write_text("\n".join(texts))
        here = str(Path(__file__).parent)
        words = ["g++", *_OPTIONS, "-I", here, "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(words, check=True)
        self.library = ctypes.CDLL(str(library))

    def run(
        self, gradient: Tensor, residual: Tensor | None, k: int, remainder: str | None, *turn: int
    ) -> list[Tensor]:
        """As `device.run`, of tensors on the CPU; `turn` is `every` and `phase`."""
        results = empty_results(gradient, k, remainder, *turn)
        n, kept = gradient.numel(), results[5].numel()
        whole = torch.full((-(-n // plan.STRIP) * plan.STRIP,), torch.nan)
        results[5] = whole[:kept]
        for each in results[:5]:
            each.view(torch.uint8).fill_(0xA5)  # whatever was there
        workspace = torch.full((plan.Workspace.of(n).nbytes,), 0x5A, dtype=torch.uint8)
        args = device.arguments(results, workspace, gradient, residual)
        device.choose(args, k, remainder, *turn)
        histograms = args.histogram
        for step in plan.STEPS:
            step.aim(args, histograms)
            spec = plan.spec_for(step.entry, device.NAMES[gradient.dtype], remainder)
            blocks = min(plan.blocks_for(step.entry, n), _MOST_BLOCKS)
            self.library[f"run_{self.numbers[spec]}"](bytes(args), blocks)
        return results


def _text(name: str) -> str:
    """A file of the operator without what it includes, which `warps.h` has, and without advice."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def _entry(number: int, spec: plan.KernelSpec) -> str:
    config = re.search(r"struct Config \{.*?\n\};", spec.text, re.DOTALL)
    called = re.search(r"hybrid_gradient::\w+(?:<Config>)?(?=\(a\);)", spec.text)
    assert config is not None
    assert called is not None
    return f"""
namespace of_{number} {{
{config[0]}
static void kernel() {{ {called[0]}(given); }}
}}
extern "C" void run_{number}(const void* args, u32 blocks) {{
  std::memcpy(&given, args, sizeof given);
  launch(of_{number}::kernel, blocks, {spec.threads});
}}"""
