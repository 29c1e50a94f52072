"""Which format and kernel: sizes are those of the formats, times those of the models."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.formats import CSR, FORMATS, convert
from hopsparse.measure import Product, floor_us, predict
from hopsparse.measure.ranking import (
    BSR_SIDES,
    DENSE_KERNEL,
    choose_storage,
    cusparse_us,
    rank,
    stored_bytes,
)
from hopsparse.measure.structure import analyse
from hopsparse.plan import TARGETS, Structure
from tests.helpers.patterns import banded, blocks, scattered, shuffled_columns, two_four

H200 = TARGETS["h200"]
ROOT = Path(__file__).parents[2]
ANCHORS = ROOT / "benchmarks" / "results" / "h200" / "unstructured_anchors.jsonl"


def of(dense: Tensor) -> Structure:
    return analyse(CSR.from_dense(dense))


def layer(structure: Structure, out: int, k: int) -> Structure:
    """The same pattern stated of a matrix of another size, for predictions alone."""
    grown = out * k / (structure.shape[0] * structure.shape[1])
    fills = tuple(
        replace(b, kept=round(b.kept * grown), total=round(b.total * grown))
        for b in structure.blocks
    )
    return replace(structure, shape=(out, k), nnz=round(structure.nnz * grown), blocks=fills)


@given(
    rows=st.sampled_from([1, 16, 33, 130]),
    cols=st.sampled_from([4, 30, 64, 129]),
    density=st.sampled_from([0, 0.05, 0.6, 1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
@settings(max_examples=30, deadline=None)
def test_sizes_are_those_of_the_formats(
    rows: int, cols: int, density: float, dtype: torch.dtype
) -> None:
    matrix = CSR.from_dense(scattered(rows, cols, density).to(dtype))
    structure = analyse(matrix)
    for fmt in ("csr", "bitmask", "dense", *(("nm",) if structure.two_four.fits else ())):
        assert stored_bytes(structure, fmt, 0, dtype) == convert(matrix, fmt).nbytes
    for side in BSR_SIDES:
        stored = convert(matrix, "bsr", block=(side, side)).nbytes
        assert stored_bytes(structure, "bsr", side, dtype) == stored


@pytest.mark.parametrize("tokens", [1, 16, 2048])
def test_what_has_a_kernel_is_timed_by_the_model_of_the_roofline(tokens: int) -> None:
    structure = layer(of(two_four(64, 64)), 4096, 4096)
    ranking = rank(structure, tokens, H200, kernels=["spmm_nm"])
    by_label = {each.label: each for each in ranking.candidates}
    for label, product in (
        ("nm 2:4", Product((4096, 4096), "bfloat16", "nm", "2:4")),
        ("dense", Product((4096, 4096))),
    ):
        assert by_label[label].predicted_us == predict(product, tokens, H200).time_us
        assert by_label[label].floor_us == floor_us(product, tokens, H200)
    assert by_label["nm 2:4"].kernel == "spmm_nm"
    assert by_label["dense"].kernel == DENSE_KERNEL
    assert [each.label for each in ranking.candidates[:2]] == ["nm 2:4", "dense"]
    for each in ranking.candidates[2:]:
        assert (each.kernel, each.predicted_us) == ("", None)
        assert "no kernel yet" in each.note
    floors = [each.floor_us for each in ranking.candidates[2:]]
    assert floors == sorted(floors)


def test_only_kernels_that_exist_are_named() -> None:
    from hopsparse.ops.plans import plans

    assert "spmm_nm" in plans()
    none = rank(of(two_four(64, 64)), 16, H200)
    assert [each.kernel for each in none.candidates if each.kernel] == [DENSE_KERNEL]
    blocked = layer(of(blocks((8, 8), 64, 0.1)), 16384, 4096)
    timed = rank(blocked, 2048, H200, kernels=["spmm_bsr"])
    names = {each.format for each in timed.candidates if each.predicted_us is not None}
    assert names == {"dense", "bsr"}


def test_a_matrix_that_is_not_2_4_is_told_why() -> None:
    dense = shuffled_columns(two_four(256, 256))
    ranking = rank(of(dense), 16, H200, kernels=["spmm_nm"])
    assert "nm" not in {each.format for each in ranking.candidates}
    assert "all with its columns reordered" in ranking.left_out["nm 2:4"]
    full = rank(of(torch.ones(8, 8)), 16, H200)
    assert "holds 50.00 %" in full.left_out["nm 2:4"]
    assert "row 0, group 0" in full.left_out["nm 2:4"]


def test_what_no_gpu_holds_is_left_out() -> None:
    graph = replace(of(torch.eye(64)), shape=(4_000_000, 4_000_000))
    ranking = rank(graph, 64, H200, kernels=["spmm_nm"])
    assert ranking.candidates[0].format == "csr"
    assert {"dense", "nm 2:4", "bitmask"} <= set(ranking.left_out)
    assert "memory of h200" in ranking.left_out["dense"]


def test_floors_shrink_with_what_is_kept() -> None:
    half, tenth = (layer(of(blocks((10, 10), 64, share)), 16384, 4096) for share in (0.5, 0.1))
    for tokens in (16, 2048):
        floors = [
            next(c for c in rank(s, tokens, H200).candidates if c.label == "bsr 64x64").floor_us
            for s in (half, tenth)
        ]
        assert floors[1] < 0.3 * floors[0]


def test_bad_questions_are_refused() -> None:
    with pytest.raises(ArgumentError, match="0 tokens"):
        rank(of(torch.eye(4)), 0, H200)
    with pytest.raises(ArgumentError, match="float32"):
        rank(of(torch.eye(4)), 1, H200, dtype="float32")


def cusparse_error() -> str:
    """How far the model of cuSPARSE is off its rows, as docs/inspect.md says it."""
    rows = [json.loads(line) for line in ANCHORS.read_text(encoding="utf-8").splitlines()]
    ratios = []
    for row in rows:
        nnz = round(row["out"] * row["k"] * (1 - row["sparsity"]))
        ratios.append(cusparse_us(nnz, row["tokens"]) / row["csr_us"])
    off = [100 * (max(ratio, 1 / ratio) - 1) for ratio in ratios]
    return (
        f"{len(off)} rows, off by {statistics.median(off):.0f} % in the median, "
        f"{max(off):.0f} % at most"
    )


def test_the_page_says_how_far_the_model_of_cusparse_is_off() -> None:
    text = " ".join((ROOT / "docs" / "inspect.md").read_text(encoding="utf-8").split())
    assert cusparse_error() in text


@pytest.mark.parametrize(
    ("dense", "dtype", "wanted"),
    [
        (blocks((6, 8), 64, 0.25), torch.bfloat16, ("bsr", (64, 64))),
        (blocks((6, 8), 16, 0.25), torch.bfloat16, ("bsr", (16, 16))),
        (two_four(64, 128), torch.float32, ("nm", None)),
        (two_four(64, 128), torch.bfloat16, ("nm", None)),
        (scattered(256, 256, 0.3), torch.bfloat16, ("bitmask", None)),
        (scattered(256, 256, 0.01), torch.bfloat16, ("csr", None)),
        (torch.eye(300), torch.float32, ("csr", None)),
        (banded(512, 2, 2), torch.float32, ("csr", None)),
        (torch.ones(64, 64), torch.bfloat16, ("dense", None)),
    ],
)
def test_storage_of_matrices_that_are_known(
    dense: Tensor, dtype: torch.dtype, wanted: tuple[str, tuple[int, int] | None]
) -> None:
    matrix = CSR.from_dense(dense.to(dtype))
    chosen = choose_storage(analyse(matrix), dtype, H200)
    assert (chosen.format, chosen.block) == wanted
    stored = convert(matrix, chosen.format, block=chosen.block)
    assert torch.equal(stored.to_dense(), dense.to(dtype))
    assert stored.nbytes == chosen.bytes
    # Nothing that is compared is smaller.
    others = [convert(matrix, fmt) for fmt in set(FORMATS) - {"nm", "bsr", "bsr24", "csc", "hyb"}]
    others += [convert(matrix, "bsr", block=(side, side)) for side in BSR_SIDES]
    assert chosen.bytes <= min(other.nbytes for other in others)


def test_a_kernel_is_worth_some_bytes_but_not_all() -> None:
    layers = layer(of(two_four(64, 64)), 8192, 8192)
    chosen = choose_storage(layers, torch.bfloat16, H200, kernels=["spmm_nm"])
    assert chosen.format == "nm"
    assert "spmm_nm runs it" in chosen.why
    # Fits 2:4 as well, but csr is a thousandth of it.
    diagonal = layer(of(torch.eye(4096)), 8192, 8192)
    chosen = choose_storage(diagonal, torch.bfloat16, H200, kernels=["spmm_nm"])
    assert chosen.format == "csr"
    assert "no kernel yet" in chosen.why


def test_an_empty_matrix_is_stored_in_next_to_nothing() -> None:
    chosen = choose_storage(of(torch.zeros(512, 512)), torch.float32, H200)
    assert chosen.bytes <= 4 * 513
