"""Kernels that widen 4 bits, played on the CPU: every code, teams of warpgroups, edges."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

from hopsparse.formats import NM, Quantized
from hopsparse.formats.quantized import pack_nibbles
from hopsparse.formats.scheme import parse_scheme
from hopsparse.ops.spmm_nm.kernel import Config
from hopsparse.ops.spmm_nm.widen import ARGS, THREADS, pieces_of
from tests.helpers.four_bits_on_cpu import SOURCES, compiled, nibbles_text

BF16 = torch.bfloat16


def tile(warpgroups: int, panels: int, tokens: int, units: int, stages: int, ways: int) -> Config:
    return Config(warpgroups, panels, tokens, units, stages, four_bit_w=True, ways=ways)


def weight(out: int, k: int, group: int) -> Quantized:
    """All codes, all pairs of columns, and scales that round."""
    rank = torch.rand(out, k // 4, 4).argsort(-1)
    codes = torch.randint(-8, 8, (out, k)) * (rank < 2).flatten(1)
    scales = (torch.rand(out, -(-k // group)) + 0.5) * 2.0 ** torch.randint(-30, 30, (out, 1))
    form = parse_scheme(f"int4:{group}")
    return Quantized.of(NM.from_dense(codes.to(torch.int8)), scales.to(BF16), form, BF16)


# Three of a team over a ring that no team divides; two teams of two; one warpgroup with two panels;
# two without a team. Tiles of out and tokens, and stages of k, are cut. A scale is for so many
# columns, and one block walks over all tiles, or two over half of them each.
TILES = [
    (tile(3, 1, 16, 2, 7, 3), 64, 1),
    (tile(4, 1, 16, 1, 5, 2), 128, 1),
    (tile(1, 2, 16, 1, 2, 1), 64, 2),
    (tile(2, 1, 16, 2, 3, 1), 128, 1),
]


@pytest.mark.parametrize(("config", "group", "blocks"), TILES, ids=[c.name for c, *_ in TILES])
def test_it_is_the_product_with_what_the_weight_decodes_to(
    config: Config, group: int, blocks: int, tmp_path: Path
) -> None:
    """A token has one column, so that no sum rounds."""
    torch.manual_seed(0)
    run, out, k, tokens = compiled(tmp_path, config), config.out + 8, 272, 19
    w = weight(out, k, group)
    columns = torch.randperm(k)[:tokens]
    x = torch.zeros(tokens, k, dtype=BF16)
    x[torch.arange(tokens), columns] = 1
    assert torch.equal(run(w, x, blocks), w.to_dense().T[columns].float())


def test_sums_of_a_team_are_those_of_all_its_stages(tmp_path: Path) -> None:
    run, (out, k) = compiled(tmp_path, TILES[0][0]), (64, 1040)
    w = weight(out, k, 64)
    w = Quantized.of(w.codes(), torch.ones(out, 17).to(BF16), w.scheme, BF16)
    x = torch.randint(-3, 4, (5, k)).to(BF16)
    assert torch.equal(run(w, x, 1).double(), x.double() @ w.to_dense().double().T)


@pytest.mark.parametrize(("rows", "k", "pitch"), [(1, 8192, 4096), (3, 96, 48), (37, 96, 64)])
def test_a_pass_widens_every_code_once(rows: int, k: int, pitch: int, tmp_path: Path) -> None:
    """Rows side by side are one long row; others lie `pitch` apart. Nothing else is written."""
    kernel = (SOURCES / "ops/spmm_nm/widen.cuh").read_text(encoding="utf-8")
    text = re.sub(r"^\s*#(include|pragma).*$", "", kernel, flags=re.MULTILINE)
    entry = f"""
static_assert(sizeof(widen::Args) == {ARGS.size});
extern "C" void entry(const widen::Args* args) {{
  gridDim.x = 2;
  launch({{2, 1, 1}}, 1, {THREADS}, 0, [&] {{ widen::run(*args); }});
}}
"""
    source, library = tmp_path / "widen.cpp", tmp_path / "widen.so"
    source.write_text(f'#include "four_bits_on_cpu.hpp"\n{nibbles_text()}\n{text}\n{entry}')
    include = f"-I{SOURCES.parents[1] / 'tests/helpers'}"
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", include]
    subprocess.run(["g++", *options, "-o", str(library), str(source)], check=True)
    codes = torch.randint(-8, 8, (rows, k), dtype=torch.int8)
    x = torch.full((rows, pitch), 0x7F, dtype=torch.uint8)
    x[:, : k // 2] = pack_nibbles(codes).view(rows, -1)
    y = torch.full((rows * k + 16,), 0xA5, dtype=torch.uint8)
    pieces = pieces_of(k)
    size = (1, rows * pieces) if pitch == k // 2 else (rows, pieces)
    args = ARGS.pack(x.data_ptr(), y.data_ptr(), pitch, *size)
    ctypes.CDLL(str(library)).entry(args)
    wide = y[: rows * k].view(torch.float8_e4m3fn).view(rows, k)
    assert torch.equal(wide.float() * 2.0**9, codes.float())
    assert (y[rows * k :] == 0xA5).all()
