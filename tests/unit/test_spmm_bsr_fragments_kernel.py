"""The text of the kernel of small blocks, run by threads of the CPU: ring, cluster, epilogue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hopsparse.formats import BSR
from hopsparse.ops.spmm_bsr.fragments import fragments_of
from hopsparse.ops.spmm_bsr.fragments_kernel import FragmentConfig
from hopsparse.ops.spmm_bsr.kernel import stores_directly
from tests.helpers.blocks import blocked
from tests.helpers.fragments_on_cpu import compiled

CPU = torch.device("cpu")


# Two stages, so that every warp waits for every other; several items a cluster, the last tokens
# overlapping those before; strips without rows; more words than lanes, and rows of y that are no
# whole lines.
@pytest.mark.parametrize(
    ("config", "shape", "kept", "clusters"),
    [
        (FragmentConfig(1, 32, 2), (40, 304, 656), 0.3, 1),
        (FragmentConfig(1, 16, 1), (20, 44, 1168), 0.9, 3),
        (FragmentConfig(2, 32, 2), (35, 552, 400), 0.2, 1),
    ],
    ids=lambda each: getattr(each, "name", None),
)
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_its_text_computes_the_product(
    config: FragmentConfig,
    shape: tuple[int, int, int],
    kept: float,
    clusters: int,
    residual: bool,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    (tokens, out, k), side = shape, 16 * config.height
    dense = blocked(out, k, (side, side), torch.bfloat16, CPU, kept=kept, largest=1)
    w = BSR.from_dense(dense, (side, side))
    x = torch.randint(-1, 2, (tokens, k)).bfloat16()
    bias, rest = torch.randint(-3, 4, (out,)).bfloat16(), None
    if residual:
        rest = torch.randint(-9, 10, (tokens, out)).bfloat16()
    made = fragments_of(w)
    direct = stores_directly(out, "bfloat16")
    run = compiled(tmp_path, config, stages=2, residual=residual, direct=direct)
    y = run((made, made.pack(w.values)), x, bias, rest, out, 0.5, clusters)
    expected = (0.5 * (x.double() @ dense.double().T) + bias.double()).relu()
    expected = expected if rest is None else expected + rest.double()
    assert torch.equal(y, expected.bfloat16())
