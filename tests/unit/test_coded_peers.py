"""Peers of 8 bits, as far as torch runs them without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.measure import coded_peers, cusparselt
from hopsparse.measure.coded_contest import CodedReference
from hopsparse.measure.coded_peers import (
    CodedCuSPARSELt,
    FastestCoded,
    IntMM,
    ScaledMM,
    coded_ways,
    scales_of_columns,
)
from hopsparse.measure.codes import (
    SCALINGS,
    CodedInput,
    CodedWeight,
    random_input,
    random_weight,
)
from hopsparse.measure.cusparselt import Algorithm, last_id, multiplied
from hopsparse.measure.rescale import rescale

E4M3 = torch.float8_e4m3fn


def operands(dtype: torch.dtype, scaling: str, tokens: int) -> tuple[CodedInput, CodedWeight]:
    generator = torch.Generator().manual_seed(0)
    weight = random_weight((48, 96), dtype, scaling, generator)
    return random_input((tokens, 96), dtype, scaling, generator), weight


@pytest.mark.parametrize("tokens", [1, 16, 17, 40])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_the_dense_product_is_right_for_any_tokens(
    dtype: torch.dtype, scaling: str, tokens: int
) -> None:
    x, weight = operands(dtype, scaling, tokens)
    way = coded_ways(dtype)[0]
    y = way.prepare(weight, None)(x)
    assert tuple(y.shape) == (tokens, 48)
    assert CodedReference(x, weight).excess(y, way.sums, way.roundings) <= 1


def test_int8_without_scales_is_left_in_int32() -> None:
    x, weight = operands(torch.int8, "none", 20)
    product = IntMM.prepare(weight)
    assert product(x).dtype == torch.int32
    assert IntMM.describe(product, x) == "dense, int32 sums"
    for scaling in ("tensor", "rows"):
        x, weight = operands(torch.int8, scaling, 20)
        product = IntMM.prepare(weight)
        assert product(x).dtype == torch.bfloat16
        assert "kernel for scales" in IntMM.describe(product, x)


def test_what_runs_for_e4m3_is_told() -> None:
    for scaling in SCALINGS:
        x, weight = operands(E4M3, scaling, 20)
        told = ScaledMM.describe(ScaledMM.prepare(weight), x)
        assert ("scales of rows" in told) == (scaling == "rows")


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_contenders_are_the_peers_that_can_run_here(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = "exact" if dtype == torch.int8 else "fast"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [(way.name, way.sums) for way in coded_ways(dtype)] == [("cublas", sums)]
    monkeypatch.setattr(coded_peers, "why_unavailable", lambda: None)
    ways = coded_ways(dtype)
    assert [(way.name, way.sums) for way in ways] == [("cublas", sums), ("cusparselt", sums)]
    # Only who multiplies scales of tokens in a second pass rounds twice.
    assert [way.roundings for way in ways] == [1, 2]


def test_other_dtypes_have_no_peers() -> None:
    with pytest.raises(ArgumentError, match="float8_e5m2"):
        coded_ways(torch.float8_e5m2)


def test_cusparselt_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="cuSPARSELt: no GPU"):
        CodedCuSPARSELt.prepare(operands(torch.int8, "none", 16)[1])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scales_of_columns_are_all_that_is_known_before_x(scaling: str) -> None:
    x, weight = operands(E4M3, scaling, 20)
    columns = scales_of_columns(weight)
    if columns is None:
        assert scaling == "none"
        return
    assert columns.is_contiguous()
    assert tuple(columns.shape) == (48,)
    sums = x.codes.float() @ weight.codes.float().T
    y = rescale(sums.to(torch.bfloat16), x.scale, columns)
    assert CodedReference(x, weight).excess(y, "fast", roundings=2) <= 1


def stored(scaling: str) -> tuple[FastestCoded, CodedWeight]:
    _, weight = operands(E4M3, scaling, 16)
    return FastestCoded(weight.codes, 48, scales_of_columns(weight), False), weight


def test_an_algorithm_is_chosen_anew_for_other_tokens_scales_and_dtypes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What took alpha for one token count may refuse it for another."""
    problems: list[Any] = []

    def remember(product: object, x: object, codes: Tensor, problem: Any) -> Algorithm:
        problems.append(problem)
        return Algorithm(0)

    monkeypatch.setattr(coded_peers, "fastest", remember)
    for scaling in SCALINGS:
        for tokens in (16, 17, 4096):
            stored(scaling)[0].algorithm(operands(E4M3, scaling, tokens)[0])
    stored("none")[0].algorithm(operands(torch.int8, "none", 16)[0])
    assert len(set(problems)) == len(problems) == 10
    # Tokens are padded to 16: 1 and 16 are one problem.
    stored("none")[0].algorithm(operands(E4M3, "none", 1)[0])
    assert problems[-1] == problems[0]


def test_an_id_is_tried_with_and_without_scales_where_there_are_some() -> None:
    assert stored("none")[0].forms(3) == (Algorithm(3),)
    for scaling in ("tensor", "rows"):
        assert stored(scaling)[0].forms(3) == (Algorithm(3), Algorithm(3, alpha=True))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("alpha", [False, True])
def test_every_form_of_an_algorithm_gives_the_scaled_product(
    scaling: str, alpha: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuSPARSELt needs a GPU: here a dense product stands for its one call."""
    calls: list[dict[str, Any]] = []

    def call(packed: Tensor, x: Tensor, by: Algorithm, **how: Any) -> Tensor:
        calls.append(how)
        sums = x.float() @ packed.float().T
        return (sums if how["alpha"] is None else sums * how["alpha"]).to(how["out_dtype"])

    monkeypatch.setattr(coded_peers, "multiplied", call)
    product, weight = stored(scaling)
    x, _ = operands(E4M3, scaling, 20)
    by = Algorithm(0, alpha=alpha and scaling != "none")
    assert CodedReference(x, weight).excess(product.run(x, by), "fast", roundings=2) <= 1
    assert (calls[0]["alpha"] is not None) == by.alpha


def test_x_is_padded_to_whole_16_tokens_in_any_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def call(packed: Tensor, x: Tensor, **how: Any) -> Tensor:
        seen.append(x)
        return x.t().float() @ packed.float().T

    monkeypatch.setattr(torch, "_cslt_sparse_mm", call)
    for dtype in (torch.int8, E4M3, torch.bfloat16):
        packed = torch.ones(8, 4).to(dtype)
        y = multiplied(packed, torch.ones(5, 4).to(dtype), Algorithm(0))
        assert torch.equal(y, torch.full((5, 8), 4.0))
        assert y.is_contiguous()
        assert tuple(seen[-1].shape) == (4, 16)
        assert seen[-1].dtype == dtype
        assert (seen[-1].float()[:, 5:] == 0).all()


def test_ids_of_8_bits_end_where_they_were_measured() -> None:
    assert (last_id(torch.int8), last_id(E4M3)) == (26, 24)
    assert last_id(torch.float16) == 35
    assert last_id(torch.bfloat16) == 63


def test_algorithms_are_told_apart() -> None:
    every = [
        Algorithm(1),
        Algorithm(1, alpha=True),
        Algorithm(1, 2, 1),
        Algorithm(1, 2, 2),
        Algorithm(1, 2, 2, True),
    ]
    assert len({str(each) for each in every}) == len(every)


def test_results_that_differ_by_more_than_roundings_do_not_agree() -> None:
    y = torch.randn(600, 32).to(torch.bfloat16)
    assert cusparselt._agree(y, y)
    assert cusparselt._agree((y.float() * (1 + 2**-8)).to(torch.bfloat16), y)
    assert not cusparselt._agree(y * 1.05, y)
    assert not cusparselt._agree(y.roll(1, 1), y)


class Library:
    """A library with ids that it refuses, and one that does not do with alpha what it should."""

    split_k = False

    def __init__(self, refused: set[int], wrong: set[int], dtype: torch.dtype = E4M3) -> None:
        self.x = torch.ones(4, 4).to(dtype)
        self.packed, self.out = self.x, 4
        self.refused, self.wrong = refused, wrong
        self.tried: list[int] = []

    def run(self, x: Tensor, by: Algorithm) -> Tensor:
        self.tried.append(by.id)
        if by.id in self.refused:
            raise RuntimeError("CUSPARSE_STATUS_NOT_SUPPORTED")
        y = torch.full((4, 4), 3.0).to(torch.bfloat16)
        return 2 * y if by.alpha and by.id in self.wrong else y

    def forms(self, number: int) -> tuple[Algorithm, ...]:
        return Algorithm(number), Algorithm(number, alpha=True)


@pytest.fixture
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cusparselt, "wait_for", lambda device: lambda: None)


@pytest.mark.usefixtures("without_waiting")
def test_an_id_that_misuses_alpha_is_kept_without_it() -> None:
    library = Library(refused={0}, wrong={2})
    found = cusparselt._accepted(library, library.x, library.x)
    assert found[:3] == [Algorithm(1), Algorithm(1, alpha=True), Algorithm(2)]
    assert Algorithm(2, alpha=True) not in found
    assert Algorithm(0) not in found


@pytest.mark.usefixtures("without_waiting")
def test_ids_end_at_the_limit_or_behind_eight_that_are_refused() -> None:
    every = Library(refused=set(), wrong=set())
    cusparselt._accepted(every, every.x, every.x)
    assert max(every.tried) == last_id(E4M3)
    few = Library(refused=set(range(3, 64)), wrong=set())
    found = cusparselt._accepted(few, few.x, few.x)
    assert {each.id for each in found} == {0, 1, 2}
    assert max(few.tried) == 10
    gaps = Library(refused=set(range(3, 10)), wrong=set())
    assert cusparselt._accepted(gaps, gaps.x, gaps.x)[-1].id == last_id(E4M3)


def test_scales_behind_a_product_need_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from hopsparse.measure.rescale import check_triton

    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnsupportedError, match="pip install triton"):
        check_triton()
