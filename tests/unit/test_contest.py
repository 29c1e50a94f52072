from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import NMPattern
from hopsparse.measure.clock import Timing
from hopsparse.measure.contest import (
    Contest,
    Reference,
    Result,
    as_rows,
    first_and_last,
    largest_excess,
    random_24,
)
from hopsparse.measure.peers import CuBLAS, CuSPARSELt
from hopsparse.measure.suite import Problem, read_suite, suite_names
from hopsparse.prune import magnitude

ANCHORS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (8192, 28672)]
X, W = (130, 96), (70, 96)


def test_anchors_are_six_layers_by_four_tokens_by_two_dtypes() -> None:
    problems = read_suite("anchors")
    assert list(dict.fromkeys((each.out, each.k) for each in problems)) == ANCHORS
    assert {(each.tokens, each.dtype) for each in problems} == {
        (tokens, dtype) for tokens in (256, 1024, 4096, 16384) for dtype in ("bfloat16", "float16")
    }
    assert len(problems) == len(set(problems)) == 48


def test_all_suites_together_have_each_problem_once() -> None:
    every = [(each.out, each.k, each.tokens, each.dtype) for each in read_suite("llm")]
    assert len(every) == len(set(every))
    for name in suite_names():
        for each in read_suite(name):
            assert (each.out, each.k, each.tokens, each.dtype) in every


@pytest.mark.parametrize("name", suite_names())
def test_problems_of_one_weight_are_neighbours(name: str) -> None:
    weights = [(each.out, each.k, each.dtype) for each in read_suite(name)]
    changes = 1 + sum(a != b for a, b in pairwise(weights))
    assert changes == len(set(weights))


def test_a_suite_that_is_not_there_is_refused() -> None:
    with pytest.raises(ArgumentError, match="anchors, few, llama-3-8b"):
        read_suite("gpt")


def test_random_weights_keep_the_two_largest_of_four() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = random_24((64, 128), torch.float32, generator)
    dense = torch.randn(64, 32, 4, generator=generator.manual_seed(3)).view(64, 128)
    assert torch.equal(weight, magnitude(dense, NMPattern(2, 4)))


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(X, generator=generator).to(dtype), random_24(W, dtype, generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_right_product_is_within_its_bound(dtype: torch.dtype) -> None:
    x, weight = operands(dtype)
    right = (x.float() @ weight.float().T).to(dtype)
    assert 0 < Reference(x, weight).excess(right) <= 1


@pytest.mark.parametrize("start", [(0, 0), (64, 0), (0, 64), (66, 6)])
def test_a_wrong_tile_is_seen_wherever_it_is(start: tuple[int, int]) -> None:
    x, weight = operands(torch.bfloat16)
    y = (x.float() @ weight.float().T).to(torch.bfloat16)
    row, column = start
    y[row : row + 64, column : column + 64] *= 1.5
    assert Reference(x, weight).excess(y) > 1


@pytest.mark.parametrize("place", [(0, 0), (129, 69), (77, 33)])
def test_one_entry_that_was_never_written_is_seen(place: tuple[int, int]) -> None:
    x, weight = operands(torch.float16)
    y = (x.float() @ weight.float().T).half()
    y[place] = float("nan")
    assert Reference(x, weight).excess(y) == float("inf")


def test_rows_of_a_contest_are_json_with_ratios_to_the_first() -> None:
    ours = Result(Timing("hopsparse", (10.0, 10.0), 40), 0.25, "nm")
    dense = Result(Timing("cublas", (15.0, 15.0), 40), 0.5, "dense")
    wrong = Result(Timing("other", error="wrong"), float("inf"))
    contest = Contest((ours, dense, wrong), 4, 650.0, 1500.0, 60.0, ("power cap",))
    rows = as_rows(Problem("o", 1000, 1000, 5), contest)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert [row["contender"] for row in rows] == ["hopsparse", "cublas", "other"]
    assert [row["ratio"] for row in rows] == [1.0, 1.5, None]
    assert [row["us"] for row in rows] == [10.0, 15.0, None]
    assert rows[0]["tflops"] == pytest.approx(1.0)
    assert rows[2]["error"] == "wrong"
    assert rows[2]["excess"] is None
    assert {row["watts"] for row in rows} == {650.0}


@pytest.mark.parametrize("bias", [None, torch.ones(70)])
def test_the_dense_peer_is_the_dense_product(bias: Tensor | None) -> None:
    x, weight = torch.ones(X), torch.ones(W)
    product: Callable[[Tensor], Tensor] = CuBLAS.prepare(weight, bias)
    assert torch.equal(product(x), torch.full((130, 70), 96.0 + (bias is not None)))


def test_cusparselt_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CuSPARSELt.available() == "no GPU"
    with pytest.raises(UnsupportedError, match="cuSPARSELt: no GPU"):
        CuSPARSELt.prepare(torch.ones(W))


def test_a_product_that_remembers_its_first_weight_is_seen() -> None:
    x, first = operands(torch.float16)
    weights = [first, first.flip(0)]
    references = first_and_last(x, weights)
    assert largest_excess(lambda index: x @ weights[index].T, references, x) <= 1
    assert largest_excess(lambda index: x @ first.T, references, x) > 1
