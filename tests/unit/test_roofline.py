from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from hopsparse.errors import ArgumentError
from hopsparse.measure import Product, choose, floor_us, predict, whole_model
from hopsparse.plan import TARGETS

H200 = TARGETS["h200"]
ROOT = Path(__file__).parents[2]
ANCHORS = ROOT / "benchmarks" / "results" / "h200" / "peers_anchors.jsonl"
PAGES = ROOT / "docs" / "ops"


def nm(out: int, k: int, pattern: str = "2:4", dtype: str = "bfloat16") -> Product:
    return Product((out, k), dtype, "nm", pattern)


def error_table() -> list[str]:
    """How far predictions are off the peers, as docs/ops/spmm_nm.md has it.

    The best 2:4 peer is known where both were timed: cuSPARSELt with every algorithm, and CUTLASS.
    """
    rows = [json.loads(line) for line in ANCHORS.read_text(encoding="utf-8").splitlines()]
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        dense, sparse = [], []
        for row in (row for row in rows if row["dtype"] == dtype and row["dense_us"]):
            choice = choose(nm(row["out"], row["k"], dtype=dtype), row["tokens"], H200)
            dense.append(choice.dense.time_us / row["dense_us"])
            if row["cutlass_us"]:
                best = min(row["cutlass_us"], row["cusparselt_us"])
                sparse.append(choice.sparse.time_us / best)
        for plan, ratios in (("dense", dense), ("2:4", sparse)):
            off = [100 * (max(ratio, 1 / ratio) - 1) for ratio in ratios]
            facts = (dtype, plan, len(off), f"{statistics.median(off):.0f} %", f"{max(off):.0f} %")
            lines.append(f"| {' | '.join(map(str, facts))} |")
    return lines


def floor_table(product: Product) -> list[str]:
    """The arithmetic floor of one layer, as the page of its operator has it."""
    lines = []
    for tokens in (1, 16, 256, 4096):
        choice = choose(product, tokens, H200)
        times = (
            floor_us(replace(product, fmt="dense"), tokens, H200),
            floor_us(product, tokens, H200),
            choice.dense.time_us,
            choice.sparse.time_us,
        )
        lines.append(f"| {tokens} | {' | '.join(f'{time:.1f}' for time in times)} |")
    return lines


def test_the_error_in_the_docs_is_the_one_of_the_measured_rows() -> None:
    expected = "\n".join(error_table())
    print(expected)
    assert expected in (PAGES / "spmm_nm.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "product"),
    [
        ("spmm_nm", Product((4096, 4096), "bfloat16", "nm", "2:4")),
        ("spmm_bsr", Product((4096, 4096), "bfloat16", "bsr", "block:64x64:0.5", 0.5)),
    ],
)
def test_the_floors_in_the_docs_are_computed(page: str, product: Product) -> None:
    expected = "\n".join(floor_table(product))
    print(expected)
    assert expected in (PAGES / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("fmt", ["dense", "nm", "csr"])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_no_prediction_is_below_its_floor(fmt: str, tokens: int) -> None:
    product = Product((4096, 4096), "bfloat16", fmt, "2:4")
    assert floor_us(product, tokens, H200) < predict(product, tokens, H200).time_us


def test_bytes_of_2_4_are_nine_sixteenths_in_16_bits_and_five_eighths_in_8() -> None:
    for dtype, size, factor in (("bfloat16", 2, 0.5625), ("float8_e4m3fn", 1, 0.625)):
        product = nm(4096, 4096, dtype=dtype)
        moved = predict(product, 1, H200).bytes
        weight = moved - (4096 * size + 4096 * 2)
        assert weight == factor * 4096 * 4096 * size


@pytest.mark.parametrize(("pattern", "factor"), [("2:4", 1.0), ("4:6", 4 / 3), ("6:8", 1.5)])
def test_windows_lengthen_k(pattern: str, factor: float) -> None:
    found = predict(nm(4096, 4608, pattern), 4096, H200)
    assert found.flops == pytest.approx(2 * 4096 * 4096 * 4608 * factor)
    assert ("gathered" in found.note) == (pattern != "2:4")
    plain = predict(nm(4096, 4608), 4096, H200)
    assert found.time_us >= plain.time_us


def test_decode_is_bound_by_memory_and_prefill_by_compute() -> None:
    assert predict(nm(8192, 28672), 16, H200).bound == "memory"
    assert predict(nm(8192, 28672), 4096, H200).bound == "compute"


@pytest.mark.parametrize("tokens", [1, 3, 16, 256, 4096])
@pytest.mark.parametrize(
    "product",
    [
        nm(576, 576),
        nm(192, 576),
        nm(28672, 8192),
        nm(4096, 4096, "6:8"),
        Product((4096, 4096), "bfloat16", "bsr", "block:64x64:0.5", 0.5),
        Product((4096, 4096), "bfloat16", "bitmask", "unstructured:0.5", 0.5),
    ],
    ids=str,
)
def test_the_chosen_plan_is_never_slower_than_dense(product: Product, tokens: int) -> None:
    choice = choose(product, tokens, H200)
    assert choice.chosen.time_us <= choice.dense.time_us
    assert choice.chosen.plan in ("dense", product.fmt)


def test_small_layers_run_dense_and_large_ones_sparse() -> None:
    assert choose(nm(576, 576), 1, H200).chosen.plan == "dense"
    assert choose(nm(28672, 8192), 1, H200).chosen.plan == "nm"


@pytest.mark.parametrize("fmt", ["bitmask", "csr", "csc", "hyb"])
def test_formats_without_kernel_say_so(fmt: str) -> None:
    found = predict(Product((256, 256), "bfloat16", fmt, "unstructured:0.5", 0.5), 16, H200)
    assert found.plan == "dense"
    assert f"no kernel for {fmt}" in found.note
    assert found.time_us == predict(Product((256, 256)), 16, H200).time_us


def test_whole_model_is_the_sum_of_its_layers() -> None:
    layers = [nm(576, 576)] * 3 + [nm(28672, 8192)] * 2
    (total,) = whole_model(layers, [16], H200)
    choices = [choose(layer, 16, H200) for layer in layers]
    assert total.dense_us == pytest.approx(sum(each.dense.time_us for each in choices))
    assert total.chosen_us == pytest.approx(sum(each.chosen.time_us for each in choices))
    assert (total.sparse_layers, total.layers) == (2, 5)
    assert total.speedup > 1


def test_no_layers_gain_nothing() -> None:
    (total,) = whole_model([], [1], H200)
    assert total.speedup == 1


def test_slower_memory_slows_decode_but_not_prefill() -> None:
    layer = nm(8192, 28672)
    assert predict(layer, 1, TARGETS["h100"]).time_us > predict(layer, 1, H200).time_us
    assert predict(layer, 4096, TARGETS["h100"]).time_us == predict(layer, 4096, H200).time_us


@pytest.mark.parametrize(
    "make",
    [
        lambda: Product((0, 4)),
        lambda: Product((4, 4), "float32"),
        lambda: predict(Product((4, 4)), 0, H200),
        lambda: predict(Product((4, 4), "bfloat16", "nm", "unstructured:0.5"), 1, H200),
        lambda: predict(Product((4, 4), "bfloat16", "bsr", "2:4"), 1, H200),
    ],
)
def test_what_means_nothing_is_refused(make: object) -> None:
    with pytest.raises(ArgumentError):
        make()  # type: ignore[operator]
