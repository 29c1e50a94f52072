"""Products of 8-bit codes in a contest, cuSPARSELt at its strongest, on an H100 or H200."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.measure.coded_contest import CodedLayer, CodedReference
from hopsparse.measure.coded_peers import CodedCuSPARSELt, coded_ways
from hopsparse.measure.codes import SCALINGS, CodedInput, random_input, random_weight
from hopsparse.measure.contest import Way
from hopsparse.measure.cusparselt import last_id, why_unavailable
from hopsparse.measure.error import scaled_bound
from hopsparse.measure.rescale import rescale
from hopsparse.ops.spmm_nm.contenders import coded_ways as our_ways

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.int8, E4M3]
OUT, K = 512, 1024


@pytest.mark.parametrize("sums_dtype", [torch.int32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (33, 1040), (300, 4096)], ids=str)
def test_the_kernel_for_scales_is_its_definition(
    shape: tuple[int, int], sums_dtype: torch.dtype, device: torch.device
) -> None:
    sums = torch.randint(-(2**20), 2**20, shape, device=device).to(sums_dtype)
    rows = torch.rand(shape[0], 1, device=device)
    columns = torch.rand(shape[1], device=device) / 64
    for of_rows, of_columns in ((rows, columns), (rows, None), (None, columns), (None, None)):
        y = rescale(sums, of_rows, of_columns)
        scale = torch.ones(1, dtype=torch.float64, device=device)
        for each in (of_rows, of_columns):
            scale = scale if each is None else scale * each.double()
        exact = sums.double()
        bound = scaled_bound(exact, torch.zeros(1, device=device), scale, torch.bfloat16)
        assert y.dtype == torch.bfloat16
        assert ((y.double() - exact * scale).abs() <= bound).all()


@pytest.mark.parametrize("tokens", [16, 100, 256])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_ways_of_8_bits_are_right_and_are_timed(
    dtype: torch.dtype, scaling: str, tokens: int, device: torch.device
) -> None:
    ways = [*our_ways(dtype), *coded_ways(dtype)]
    layer = CodedLayer.drawn((OUT, K), dtype, scaling, ways, device=device)
    found = layer.contest(tokens, rounds=3).results
    assert [each.timing.name for each in found] == [way.name for way in ways]
    for each in found:
        assert each.timing.error == ""
        assert each.timing.samples_us
        assert each.excess is not None
        assert each.excess <= 1
        assert each.plan


@pytest.mark.parametrize("tokens", [1, 15, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peers_pad_what_they_must(dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    weight = random_weight((OUT, K), dtype, "rows", generator)
    x = random_input((tokens, K), dtype, "rows", generator)
    for way in coded_ways(dtype):
        y = way.prepare(weight, None)(x)
        assert tuple(y.shape) == (tokens, OUT)
        assert CodedReference(x, weight).excess(y, way.sums, way.roundings) <= 1


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cusparselt_is_right_by_every_form_that_the_search_accepts(
    dtype: torch.dtype, scaling: str, device: torch.device
) -> None:
    if (why := why_unavailable()) is not None:
        assert "without cuSPARSELt" in why
        return
    generator = torch.Generator(device).manual_seed(0)
    weight = random_weight((OUT, K), dtype, scaling, generator)
    x = random_input((64, K), dtype, scaling, generator)
    product = CodedCuSPARSELt.prepare(weight)
    chosen = product.algorithm(x)
    assert chosen.id <= last_id(dtype)
    sums = "exact" if dtype == torch.int8 else "fast"
    reference = CodedReference(x, weight)
    for form in {chosen, product.forms(chosen.id)[0]}:
        assert reference.excess(product.run(x, form), sums, roundings=2) <= 1
    assert str(chosen) in CodedCuSPARSELt.describe(product, x)


def test_a_graph_captures_peers_with_scales(device: torch.device) -> None:
    """One number for all columns is not read by the host."""
    generator = torch.Generator(device).manual_seed(0)
    for dtype in DTYPES:
        for scaling in SCALINGS:
            weight = random_weight((OUT, K), dtype, scaling, generator)
            x = random_input((64, K), dtype, scaling, generator)
            for way in coded_ways(dtype):
                product = way.prepare(weight, None)
                expected = product(x).clone()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = product(x)
                y.zero_()
                graph.replay()
                assert torch.equal(y, expected), (dtype, scaling, way.name)


def test_a_wrong_way_of_codes_is_named_and_not_timed(device: torch.device) -> None:
    (dense,) = coded_ways(E4M3)[:1]

    def twice(weight: Any, bias: Tensor | None) -> Any:
        product = dense.prepare(weight, bias)

        def run(x: CodedInput) -> Tensor:
            return 2 * product(x)

        return run

    wrong = Way("twice", twice, lambda product, x: "twice", "fast")
    layer = CodedLayer.drawn((OUT, K), E4M3, "rows", [dense, wrong], device=device)
    right, doubled = layer.contest(64, rounds=3).results
    assert right.timing.samples_us
    assert doubled.timing.samples_us == ()
    assert "wrong" in doubled.timing.error


def test_fast_sums_do_not_pass_for_promoted_ones(device: torch.device) -> None:
    fast, promoted = our_ways(E4M3)
    posing = Way("posing", fast.prepare, fast.describe, "promoted")
    layer = CodedLayer.drawn((OUT, 8192), E4M3, "none", [fast, promoted, posing], device=device)
    results, running = layer.checked(64)
    assert [each.timing.error == "" for each in results] == [True, True, False]
    assert list(running) == [0, 1]
