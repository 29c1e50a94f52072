"""Several weights in one product: what it means, what it refuses, which tile it would run on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.formats import NM
from hopsparse.ops import spmm_nm, spmm_nm_experts
from hopsparse.ops.spmm_nm.cost import predicted_us
from hopsparse.ops.spmm_nm.experts.op import plan_experts
from hopsparse.ops.spmm_nm.experts.plan import (
    ExpertsProblem,
    candidates_experts,
    choose_experts,
    most_clusters,
)
from hopsparse.ops.spmm_nm.kernel import MOST_EXPERTS, Config
from hopsparse.ops.spmm_nm.plan import CANDIDATES, for_experts

BF16 = torch.bfloat16
EXPERTS, OUT, K, TOKENS = 3, 64, 48, 11
# No tokens for the first, in the middle, for the last; all for one; some for none.
SHARINGS = [[4, 7, 11], [0, 5, 11], [5, 5, 11], [3, 11, 11], [0, 0, 11], [2, 3, 9], [0, 0, 0]]


def weight(dtype: torch.dtype = BF16) -> NM:
    dense = torch.randint(-3, 4, (EXPERTS * OUT, K)).to(dtype)
    dense.view(EXPERTS * OUT, -1, 4)[..., ::2] = 0
    return NM.from_dense(dense)


def offsets(ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def rows_of(w: NM, expert: int) -> NM:
    return NM.from_dense(w.to_dense()[expert * OUT : (expert + 1) * OUT])


@pytest.mark.parametrize("ends", SHARINGS, ids=str)
@pytest.mark.parametrize("act", [None, "silu", "swiglu"])
def test_each_expert_is_a_product_of_its_own(ends: list[int], act: str | None) -> None:
    w, x = weight(), torch.randint(-3, 4, (TOKENS, K)).to(BF16)
    bias = torch.randn(EXPERTS, OUT).to(BF16)
    y = spmm_nm_experts(w, x, offsets(ends), bias=bias, act=act, out_dtype=torch.float32)
    for expert, (begin, end) in enumerate(pairwise([0, *ends])):
        right = spmm_nm(
            rows_of(w, expert), x[begin:end], bias=bias[expert], act=act, out_dtype=torch.float32
        )
        assert torch.equal(y[begin:end], right)
    assert not y[ends[-1] :].any()
    assert y.shape == (TOKENS, OUT // 2 if act == "swiglu" else OUT)


def test_gradients_are_those_of_the_experts() -> None:
    w, x = weight(torch.float32), torch.randn(TOKENS, K, requires_grad=True)
    bias = torch.randn(EXPERTS, OUT, requires_grad=True)
    spmm_nm_experts(w, x, offsets([4, 4, 9]), bias=bias).sum().backward()
    dense = w.to_dense().view(EXPERTS, OUT, K).sum(1)
    counts = torch.tensor([4.0, 0.0, 5.0])
    right = torch.cat([dense[0].expand(4, K), dense[2].expand(5, K), torch.zeros(2, K)])
    assert torch.allclose(x.grad, right)
    assert torch.equal(bias.grad, counts[:, None].expand(EXPERTS, OUT))


def test_torch_compile_sees_one_operator() -> None:
    w, x, offs = weight(), torch.randint(-3, 4, (TOKENS, K)).to(BF16), offsets([4, 7, 11])
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    made = torch.compile(
        lambda x, offs: spmm_nm_experts(w, x, offs), backend=backend, fullgraph=True
    )
    assert torch.equal(made(x, offs), spmm_nm_experts(w, x, offs))
    assert [each for each in seen if "hopsparse" in each] == ["hopsparse.spmm_nm_experts.default"]
    # Another sharing of as many tokens is the same graph.
    assert torch.equal(made(x, offsets([0, 9, 9])), spmm_nm_experts(w, x, offsets([0, 9, 9])))


def test_it_says_what_runs() -> None:
    w, x = weight(), torch.zeros(TOKENS, K).to(BF16)
    assert plan_experts(w, x, offsets([1, 2, 3])).name == "reference"


X = torch.zeros(TOKENS, K).to(BF16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offs": torch.tensor([1, 2, 3])}, "offs [3] torch.int64"),
        ({"offs": offsets([1, 2, 3])[None]}, "offs [1, 3]"),
        ({"offs": offsets([])}, "offs [0]"),
        ({"offs": offsets([1] * (MOST_EXPERTS + 1))}, "offs [257]"),
        ({"offs": [1, 2, 3]}, "offs [1, 2, 3]"),
        ({"offs": offsets([1, 2])}, "192 rows of w for 2 experts"),
        ({"offs": offsets([1] * 5)}, "192 rows of w for 5 experts"),
        ({"x": X[0]}, "x [48]"),
        ({"x": X[:, 1:]}, "x [11, 47]"),
        ({"x": X.float()}, "x [11, 48] torch.float32"),
        ({"x": X[None]}, "x [1, 11, 48]"),
        ({"x": X.tolist()}, "x of type list"),
        ({"bias": 1.0}, "bias of type float"),
        ({"bias": torch.zeros(OUT).to(BF16)}, "bias [64]"),
        ({"bias": torch.zeros(EXPERTS, OUT)}, "bias [3, 64] torch.float32"),
        ({"act": "tanh"}, "act='tanh'"),
        ({"out_dtype": torch.float16}, "out_dtype=torch.float16"),
        ({"config": CANDIDATES[0]}, "Config("),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_does_not_fit_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    call = {"x": X, "offs": offsets([1, 2, 3])} | arguments
    with pytest.raises(ArgumentError) as refused:
        spmm_nm_experts(weight(), call.pop("x"), call.pop("offs"), **call)
    assert message in str(refused.value)
    assert "spmm_nm_experts" in str(refused.value)


@pytest.mark.parametrize("experts", [0, MOST_EXPERTS + 1, 2.0])
def test_a_problem_has_experts(experts: Any) -> None:
    with pytest.raises(ArgumentError, match="experts"):
        ExpertsProblem(1, experts, 64, 64)


@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    config=st.sampled_from(for_experts()),
    out=st.integers(1, 20),
)
def test_no_sharing_needs_more_clusters_than_are_counted_with(
    counts: list[int], config: Config, out: int
) -> None:
    tokens = config.tokens * config.cluster_tokens
    tiles = sum(ceil(count / tokens) for count in counts)
    problem = ExpertsProblem(max(1, sum(counts)), len(counts), 64 * out, 64)
    along_out = ceil(ceil(64 * out / config.out) / config.cluster_out)
    assert tiles * along_out <= most_clusters(problem, config)


@pytest.mark.parametrize("out", [64, 128, 768, 14336])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_the_tile_is_the_fastest_of_those_whose_clusters_stay_in_one_weight(
    out: int, tokens: int
) -> None:
    problem = ExpertsProblem(tokens, 16, out, 2048)
    ordered = candidates_experts(problem, 132)
    assert ordered[0] == choose_experts(problem, 132)
    times = [predicted_us(each, problem.stacked, 132) for each in ordered]
    assert times == sorted(times)
    assert all(ceil(out / each.out) >= each.cluster_out for each in ordered)
    assert all(each.experts and each.cluster_k == 1 for each in ordered)


@pytest.mark.parametrize("config", for_experts(), ids=lambda config: config.name)
def test_a_table_takes_room_and_all_other_room_is_stages(config: Config) -> None:
    plain = replace(config, experts=False)
    assert config.smem_bytes() == plain.smem_bytes() + 4 * MOST_EXPERTS
    assert config.stages == min(8, config.most_stages) <= plain.most_stages
