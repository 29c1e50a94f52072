from __future__ import annotations

from dataclasses import replace

import pytest

from hopsparse.errors import ArgumentError
from hopsparse.formats import NM, Bitmask, parse_form
from hopsparse.measure import (
    Decoder,
    Product,
    Workload,
    choose,
    decode_step,
    floor_us,
    layer_cost,
    predict,
    weight_bytes,
)
from hopsparse.plan import TARGETS
from hopsparse.prune import magnitude

H200 = TARGETS["h200"]
SIDE = 8192
WEIGHT = SIDE * SIDE
FORMS = [
    pattern + scheme
    for pattern in ("dense", "6:8", "4:6", "2:4", "unstructured:0.5", "block:32x32:0.5")
    for scheme in (
        "",
        "+int8",
        "+fp8",
        "+int4:64",
        "+int4:128/fp8",
        "+int8/none",
        "+fp8/fp8:static",
    )
]


def product(form: str, shape: tuple[int, int] = (SIDE, SIDE)) -> Product:
    return Product.of(shape, parse_form(form))


@pytest.mark.parametrize(
    ("form", "bits", "scales"),
    [
        ("dense", 16, 0),
        ("dense+int8", 8, 4 * SIDE),
        ("dense+fp8:64", 8, 2 * WEIGHT // 64),
        ("dense+int4:64", 4, 2 * WEIGHT // 64),
        ("dense+int8/int8:static", 8, 4 * SIDE + 4),
        # Half of the values, and 2 bits of metadata for each of them.
        ("2:4", 8 + 1, 0),
        ("2:4+int8", 4 + 1, 4 * SIDE),
        ("2:4+int4:64", 2 + 1, 2 * WEIGHT // 64),
        ("6:8+fp8", 1.5 * 5, 4 * SIDE),
        # Half of the values, and a bit for each entry.
        ("unstructured:0.5", 8 + 1, 0),
        ("unstructured:0.5+int4:128", 2 + 1, 2 * WEIGHT // 128),
        # Half of the values, and 4 bytes a kept block of 32 x 32.
        ("block:32x32:0.5", 8 + 32 * 0.5 / 1024, 0),
    ],
)
def test_stored_bytes_by_hand(form: str, bits: float, scales: int) -> None:
    assert weight_bytes(product(form)) == WEIGHT * bits / 8 + scales


def test_stored_bytes_are_those_of_the_formats() -> None:
    import torch

    for pattern, kind in (("2:4", NM), ("6:8", NM), ("unstructured:0.5", Bitmask)):
        form = parse_form(pattern)
        assert form.pattern is not None
        pruned = magnitude(torch.randn(96, 144), form.pattern).to(torch.bfloat16)
        stored = kind.from_dense(pruned, form.pattern) if kind is NM else kind.from_dense(pruned)
        assert weight_bytes(Product.of((96, 144), form)) == stored.nbytes


def test_one_layer_of_a_decode_step_by_hand() -> None:
    """2:4 with int8: half of the values, 2 bits each for their places, scales, x and y."""
    weight = WEIGHT // 2 + WEIGHT // 8 + 4 * SIDE
    moved = weight + 3 * (SIDE + 4 + 2 * SIDE)
    found = predict(product("2:4+int8"), 3, H200)
    assert (found.bytes, found.flops, found.plan) == (moved, 2 * 3 * WEIGHT, "nm")
    # 5 us of a 2:4 product, and 95 % of 4.35 TB/s.
    assert found.time_us == pytest.approx(5 + 1e6 * moved / (0.95 * 4.35e12))
    assert floor_us(product("2:4+int8"), 3, H200) == pytest.approx(1e6 * moved / 4.35e12)


def test_four_bit_weights_multiply_sixteen_bit_inputs() -> None:
    found = predict(product("dense+int4:64"), 4096, H200)
    moved = WEIGHT // 2 + 2 * WEIGHT // 64 + 4096 * (2 * SIDE + 2 * SIDE)
    assert found.bytes == moved
    assert found.bound == "compute"
    assert found.time_us == pytest.approx(2.5 + 1e6 * 2 * 4096 * WEIGHT / (868.9e12 * 0.76))
    assert "widened to 16 bits" in found.note


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ("dense", "bfloat16"),
        ("dense+int8", "int8"),
        ("2:4+fp8", "float8_e4m3fn"),
        ("dense+int4:64", "bfloat16"),
        ("dense+int4:64/int8", "int8"),
        ("dense+int4:64/fp8", "float8_e4m3fn"),
        ("dense+int4:64/int4", "int8"),
        ("dense+int8/none", "bfloat16"),
        ("dense+int8/fp8", "bfloat16"),
    ],
)
def test_the_path_is_eight_bit_where_both_sides_are(form: str, path: str) -> None:
    assert product(form).compute_dtype == path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", [576, 8192])
@pytest.mark.parametrize("batch", [1, 64, 4096])
def test_no_form_is_slower_than_dense_in_its_scheme_or_faster_than_its_floor(
    form: str, side: int, batch: int
) -> None:
    shape = (side, side)
    found = layer_cost(shape, form, batch, H200)
    dense = layer_cost(shape, replace(parse_form(form), pattern=None), batch, H200)
    assert found.time_us <= dense.time_us
    assert found.floor_us <= dense.floor_us
    assert found.floor_us < found.time_us


def test_unstructured_saves_bytes_and_no_time() -> None:
    dense, sparse = (
        layer_cost((SIDE, SIDE), form, 1, H200) for form in ("dense", "unstructured:0.5")
    )
    assert (sparse.time_us, sparse.floor_us) == (dense.time_us, dense.floor_us)
    assert sparse.bytes < dense.bytes
    assert "no kernel for bitmask yet" in sparse.note


def test_a_small_sparse_layer_runs_dense_and_says_so() -> None:
    found = layer_cost((576, 576), "2:4+int8", 1, H200)
    assert found.runs == "dense"
    assert "slower" in found.note
    assert found.time_us == layer_cost((576, 576), "dense+int8", 1, H200).time_us


def test_a_step_is_projections_head_and_cache() -> None:
    shapes = {"q": (4096, 4096), "up": (14336, 4096)}
    model = Decoder(shapes, (128256, 4096), blocks=3, kv_width=1024)
    step = decode_step(model, {"up": "2:4"}, Workload(2, 1000), H200)
    parts = [layer_cost(shapes["q"], "dense", 2, H200), layer_cost(shapes["up"], "2:4", 2, H200)]
    assert step.projections.time_us == sum(part.time_us for part in parts)
    assert step.weight_bytes == sum(part.bytes for part in parts) + 2 * 128256 * 4096
    # Keys and values of 3 blocks, 2 sequences of 1,000 tokens, 2 bytes; and one more token.
    assert step.cache.bytes == 2 * 3 * 1024 * 2 * 1000 * 2
    moved = step.cache.bytes * 1001 / 1000
    assert step.cache.floor_us == pytest.approx(1e6 * moved / 4.35e12)
    assert step.cache.time_us == pytest.approx(3 * 2.5 + 1e6 * moved / (0.95 * 4.35e12))
    assert step.time_us == step.projections.time_us + step.head.time_us + step.cache.time_us
    assert step.floor_us < step.time_us
    values = [step.value(objective) for objective in ("time", "floor", "bytes")]
    assert values == [step.time_us, step.floor_us, step.weight_bytes]


def test_more_context_and_a_larger_batch_take_longer() -> None:
    model = Decoder({"q": (4096, 4096)}, (32000, 4096), 1, 1024)
    base = decode_step(model, {}, Workload(1, 2048), H200)
    assert decode_step(model, {}, Workload(1, 4096), H200).time_us > base.time_us
    assert decode_step(model, {}, Workload(8, 2048), H200).time_us > base.time_us


def test_a_sparse_layer_is_compared_with_dense_in_its_scheme_and_gains_over_dense() -> None:
    found = choose(product("2:4+int8"), 1, H200)
    assert found.fallback == predict(product("dense+int8"), 1, H200)
    assert found.dense == predict(product("dense"), 1, H200)
    small = choose(product("2:4+int8", (576, 576)), 1, H200)
    assert small.chosen is small.fallback


@pytest.mark.parametrize(
    "make",
    [
        lambda: Workload(0, 1),
        lambda: Workload(1, 0),
        lambda: Product((4, 4), "float8_e4m3fn", scheme="int8"),
        lambda: decode_step(Decoder({}, (4, 4), 1, 4), {"q": "2:4"}, Workload(), H200),
        lambda: layer_cost((4, 4), "2of4", 1, H200),
    ],
)
def test_what_means_nothing_is_refused(make: object) -> None:
    with pytest.raises(ArgumentError):
        make()  # type: ignore[operator]
