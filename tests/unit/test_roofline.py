from __future__ import annotations

import statistics

import pytest

from hopsparse.errors import ArgumentError
from hopsparse.measure import Product, choose, predict, whole_model
from hopsparse.plan import TARGETS

H200 = TARGETS["h200"]

# Measured on one H200: tokens, out, k, us of cuBLAS, us of the best 2:4 peer (cuSPARSELt with every
# algorithm, or CUTLASS). The predictions were fitted to these products.
BFLOAT16_ROWS = [
    (16, 28672, 4096, 57.2, 36.9),
    (16, 8192, 28672, 117.0, 65.9),
    (16, 4096, 4096, 13.6, 11.5),
    (16, 6144, 4096, 15.7, 12.0),
    (256, 4096, 4096, 17.8, 14.7),
    (1024, 4096, 14336, 177.9, 102.7),
    (1024, 8192, 8192, 207.5, 119.5),
    (4096, 4096, 4096, 210.4, 123.6),
    (4096, 28672, 4096, 1459.7, 991.7),
    (4096, 8192, 8192, 822.4, 540.9),
    (4096, 8192, 28672, 2839.0, 1827.3),
    (16384, 8192, 28672, 11687.1, 7190.7),
]


def nm(out: int, k: int, pattern: str = "2:4", dtype: str = "bfloat16") -> Product:
    return Product((out, k), dtype, "nm", pattern)


def test_predictions_agree_with_what_was_measured() -> None:
    off = []
    for tokens, out, k, dense_us, sparse_us in BFLOAT16_ROWS:
        choice = choose(nm(out, k), tokens, H200)
        off += [choice.dense.time_us / dense_us, choice.sparse.time_us / sparse_us]
    assert max(max(ratio, 1 / ratio) for ratio in off) < 1.28
    assert statistics.median(abs(ratio - 1) for ratio in off) < 0.08


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
