from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.measure.clock import Timing
from hopsparse.measure.coded_contest import CodedLayer, CodedReference, layer_for
from hopsparse.measure.coded_peers import coded_ways as coded_peers
from hopsparse.measure.codes import LARGEST, SCALINGS, CodedInput, random_input, random_weight
from hopsparse.measure.contest import Contest, Result, Way, as_rows
from hopsparse.measure.suite import CodedProblem, Problem, coded_suite, read_suite
from hopsparse.ops.spmm_nm.contenders import coded_ways as our_ways

OUT, K, TOKENS = 80, 512, 130
DTYPES = tuple(LARGEST)
E4M3 = torch.float8_e4m3fn


def layer_of(dtype: torch.dtype, scaling: str, ways: list[Way]) -> CodedLayer:
    """As `CodedLayer.drawn` makes it, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    weights: list[Any] = [random_weight((OUT, K), dtype, scaling, generator) for _ in range(2)]
    made = [[way.prepare(weight, None) for weight in weights] for way in ways]
    layer = CodedLayer(ways, weights, [*made], dtype, scaling)
    layer.exact = [[way.prepare(layer.integer_weights[way.sums], None)] for way in ways]
    return layer


def excesses(layer: CodedLayer) -> list[float]:
    excess = layer._excess_on(layer._inputs(TOKENS, 1))
    return [excess(way, layer.products[n]) for n, way in enumerate(layer.ways)]  # type: ignore[arg-type]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ours_and_the_dense_peer_are_right(dtype: torch.dtype, scaling: str) -> None:
    ways = [*our_ways(dtype), *coded_peers(dtype)]
    found = excesses(layer_of(dtype, scaling, ways))
    assert len(found) == len(ways)
    assert max(found) <= 1


def changed(how: Callable[[Tensor, CodedInput], Tensor], sums: str = "fast") -> Way:
    """The dense peer of E4M3 with something done to its results."""
    dense = coded_peers(E4M3)[0]

    def prepare(weight: Any, bias: Tensor | None) -> Callable[[CodedInput], Tensor]:
        product = dense.prepare(weight, bias)
        return lambda x: how(product(x), x)

    return Way("changed", prepare, lambda product, x: "", sums)


def test_who_rounds_twice_may_and_who_says_once_may_not() -> None:
    """Half a unit off, as a result that was rounded on its way may be."""
    dense = coded_peers(torch.int8)[0]

    def prepare(weight: Any, bias: Tensor | None) -> Callable[[CodedInput], Tensor]:
        product = dense.prepare(weight, bias)
        return lambda x: (product(x).float() * (1 + 2**-8)).bfloat16()

    once, twice = (
        Way("rounds", prepare, lambda product, x: "", "exact", count) for count in (1, 2)
    )
    found = excesses(layer_of(torch.int8, "none", [once, twice]))
    assert found[0] > 1
    assert found[1] <= 1


def shifted(y: Tensor, x: CodedInput) -> Tensor:
    return y.roll(1, 1)


def one_step_off(y: Tensor, x: CodedInput) -> Tensor:
    """What the bounds of fast sums allow, and whole numbers do not."""
    return y * (1 + 2**-7)


def not_written(y: Tensor, x: CodedInput) -> Tensor:
    y[TOKENS - 1, OUT - 1] = float("nan")
    return y


def without_last_columns(y: Tensor, x: CodedInput) -> Tensor:
    y[:, 64:] = 0
    return y


@pytest.mark.parametrize("how", [shifted, one_step_off, not_written, without_last_columns])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_wrong_is_seen(how: Callable[[Tensor, CodedInput], Tensor], scaling: str) -> None:
    assert excesses(layer_of(E4M3, scaling, [changed(how)]))[0] > 1


def test_a_way_that_remembers_its_first_weight_is_seen() -> None:
    dense = coded_peers(E4M3)[0]
    first: list[Any] = []

    def prepare(weight: Any, bias: Tensor | None) -> Callable[[CodedInput], Tensor]:
        first.append(weight)
        return dense.prepare(first[0], bias)

    layer = layer_of(E4M3, "rows", [Way("stale", prepare, lambda product, x: "", "fast")])
    assert excesses(layer)[0] > 1


def test_each_way_is_held_to_the_sums_that_it_claims() -> None:
    """One result, an error between the two bounds of one entry."""
    generator = torch.Generator().manual_seed(0)
    weight = random_weight((OUT, K), E4M3, "none", generator)
    x = random_input((TOKENS, K), E4M3, "none", generator)
    reference = CodedReference(x, weight)
    y = (x.codes.double() @ weight.codes.double().T).float()
    assert reference.excess(y, "promoted") < 1
    off = y * (1 + 2**-6)
    assert reference.excess(off, "promoted") > 1.3 * reference.excess(off, "fast")


def test_scales_that_are_left_out_are_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = random_weight((OUT, K), torch.int8, "rows", generator)
    x = random_input((TOKENS, K), torch.int8, "rows", generator)
    assert x.scale is not None
    assert weight.scale is not None
    sums = x.codes.double() @ weight.codes.double().T
    reference = CodedReference(x, weight)
    assert reference.excess((sums * x.scale * weight.scale.T).bfloat16(), "exact") <= 1
    assert reference.excess((sums * x.scale).bfloat16(), "exact") > 1
    assert reference.excess((sums * weight.scale.T).bfloat16(), "exact") > 1


def test_int32_sums_are_exact_or_wrong() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = random_weight((OUT, K), torch.int8, "none", generator)
    x = random_input((TOKENS, K), torch.int8, "none", generator)
    sums = (x.codes.double() @ weight.codes.double().T).int()
    reference = CodedReference(x, weight)
    assert reference.excess(sums, "exact") == 0
    assert reference.excess(sums + 1, "exact") > 1
    assert reference.equals(sums)
    assert not reference.equals(sums + 1)


def test_a_way_that_refuses_integers_says_so() -> None:
    layer = layer_of(torch.int8, "none", coded_peers(torch.int8))
    layer.exact[0] = "no integers"
    with pytest.raises(ArgumentError, match="cublas took random codes, and refuses integers"):
        excesses(layer)


def test_what_cannot_be_prepared_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="sees no GPU"):
        layer_for(CodedProblem("", 64, 64, 16, "int8"), our_ways(torch.int8))
    with pytest.raises(ArgumentError, match="scaling 'row'"):
        CodedLayer.drawn((64, 64), torch.int8, "row", our_ways(torch.int8))


def test_rows_of_a_contest_of_codes_have_their_dtype_and_scaling() -> None:
    ours = Result(Timing("hopsparse_fast", (10.0, 10.0), 40), 0.25, "wgmma.sp")
    dense = Result(Timing("cublas", (15.0, 15.0), 40), 0.5, "dense")
    contest = Contest((ours, dense), 4, 650.0, 1500.0, 60.0, ())
    problem = CodedProblem("o", 64, 64, 5, "float8_e4m3fn", "rows")
    rows = as_rows(problem, contest)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert {(row["dtype"], row["scaling"]) for row in rows} == {("float8_e4m3fn", "rows")}
    assert [row["ratio"] for row in rows] == [1.0, 1.5]
    assert "scaling" not in as_rows(Problem("o", 64, 64, 5), contest)[0]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_suite_in_8_bits_has_the_layers_and_tokens_of_the_suite(dtype: str) -> None:
    problems = coded_suite("anchors", dtype, "tensor")
    of_16_bits = [each for each in read_suite("anchors") if each.dtype == "bfloat16"]
    sides = [(each.layer, each.out, each.k, each.tokens) for each in of_16_bits]
    assert [(each.layer, each.out, each.k, each.tokens) for each in problems] == sides
    assert {(each.dtype, each.scaling) for each in problems} == {(dtype, "tensor")}


@pytest.mark.parametrize(
    ("dtype", "scaling", "told"),
    [("bfloat16", "none", "dtype 'bfloat16'"), ("int8", "row", "scaling 'row'")],
)
def test_a_suite_in_other_numbers_is_refused(dtype: str, scaling: str, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        coded_suite("anchors", dtype, scaling)


def test_16_bit_problems_take_no_codes() -> None:
    with pytest.raises(ArgumentError, match="dtype 'int8'"):
        Problem("", 64, 64, 1, "int8")
