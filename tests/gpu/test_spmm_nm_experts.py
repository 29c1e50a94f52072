"""Several weights in one launch on an H100 or H200: exact, whoever has how many tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hopsparse.errors import UnsupportedError
from hopsparse.formats import NM
from hopsparse.launch import capture
from hopsparse.measure.error import finish_bound
from hopsparse.ops import spmm_nm, spmm_nm_experts
from hopsparse.ops.spmm_nm.experts.op import plan_experts
from hopsparse.ops.spmm_nm.kernel import ACTIVATIONS, MOST_EXPERTS, Config
from hopsparse.ops.spmm_nm.plan import for_experts
from hopsparse.ops.spmm_nm.reference import apply_activation
from tests.helpers.waiting import nothing_waits

DTYPES = (torch.bfloat16, torch.float16)
TILES = [pytest.param(config, id=config.name) for config in for_experts()]
# Tokens of each expert, tokens that none has, out, k: even; some without; one token each; one has
# all; none has any; more experts than SMs; ends off every tile; k off every stage.
SHARINGS = [
    ([256, 256], 0, 256, 256),
    ([0, 513, 0, 0, 7, 1, 0], 0, 320, 1096),
    ([1] * 8, 3, 64, 64),
    ([0, 0, 1000], 5, 576, 512),
    ([0, 0], 33, 128, 128),
    ([2] * 150, 0, 64, 448),
    ([37, 300, 129, 64], 19, 1088, 2064),
]


def weights(experts: int, out: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Integers [experts * out, k], two of every four columns."""
    dense = torch.randint(-3, 4, (experts * out, k), device=device)
    rank = torch.rand(experts * out, -(-k // 4), 4, device=device).argsort(-1)
    return (dense * (rank < 2).flatten(1)[:, :k]).to(dtype)


def ends_of(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


def exact(x: Tensor, dense: Tensor, offs: Tensor) -> Tensor:
    """In float64, one expert after the other; zeros for what none has."""
    experts = len(offs)
    each, y = dense.view(experts, -1, dense.shape[1]), x.new_zeros(len(x), len(dense) // experts)
    y = y.double()
    for expert, (begin, end) in enumerate(pairwise([0, *offs.tolist()])):
        y[begin:end] = x[begin:end].double() @ each[expert].double().T
    return y


@pytest.mark.parametrize("config", TILES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tile_is_exact(config: Config, dtype: torch.dtype, device: torch.device) -> None:
    for counts, nobodys, out, k in SHARINGS:
        torch.manual_seed(len(counts))
        dense, offs = weights(len(counts), out, k, dtype, device), ends_of(counts, device)
        x = torch.randint(-2, 3, (sum(counts) + nobodys, k), device=device).to(dtype)
        if out < config.out * config.cluster_out and config.cluster_out > 1:
            continue  # No tile of a problem whose clusters would leave a weight.
        y = spmm_nm_experts(NM.from_dense(dense), x, offs, config=config)
        assert torch.equal(y, exact(x, dense, offs).to(dtype)), (counts, nobodys, out, k)


@pytest.mark.parametrize("config", TILES)
def test_rows_of_nan_beside_an_expert_stay_there(config: Config, device: torch.device) -> None:
    """A tile reads tokens of the next expert; what it makes of them is nobody's."""
    counts, out, k = [5, 17, 40], 256, 256
    dense, offs = weights(3, out, k, torch.bfloat16, device), ends_of(counts, device)
    x = torch.randint(-2, 3, (62, k), device=device).bfloat16()
    right = exact(x, dense, offs).bfloat16()
    x[5:22] = float("nan")
    y = spmm_nm_experts(NM.from_dense(dense), x, offs, config=config)
    assert torch.equal(y[:5], right[:5])
    assert torch.equal(y[22:], right[22:])
    assert y[5:22].isnan().all()


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_epilogues(act: str, out_dtype: torch.dtype | None, device: torch.device) -> None:
    counts, out, k = [3, 0, 40, 9], 192, 128
    dense, offs = weights(4, out, k, torch.bfloat16, device), ends_of(counts, device)
    x = torch.randint(-2, 3, (sum(counts) + 4, k), device=device).bfloat16()
    bias = torch.randn(4, out, device=device).bfloat16()
    y = spmm_nm_experts(
        NM.from_dense(dense),
        x,
        offs,
        bias=bias,
        act=None if act == "none" else act,
        out_dtype=out_dtype,
    )
    whose = torch.repeat_interleave(torch.tensor(counts, device=device))
    sums = exact(x, dense, offs)[: len(whose)] + bias.double()[whose]
    right, none = apply_activation(sums, act), torch.zeros(1, device=device)
    bound = finish_bound(sums.abs(), right, none, y.dtype)
    assert ((y[: len(whose)].double() - right).abs() <= bound).all()
    assert not y[len(whose) :].any()


def test_swiglu_is_that_of_each_expert_alone(device: torch.device) -> None:
    counts, out, k = [3, 0, 40, 9], 192, 128
    dense, offs = weights(4, out, k, torch.bfloat16, device), ends_of(counts, device)
    x = torch.randint(-2, 3, (sum(counts) + 4, k), device=device).bfloat16()
    y = spmm_nm_experts(NM.from_dense(dense), x, offs, act="swiglu")
    assert y.shape == (len(x), out // 2)
    begin = 0
    for expert, count in enumerate(counts):
        alone = NM.from_dense(dense[expert * out : (expert + 1) * out])
        rows = x[begin : begin + count]
        assert torch.equal(y[begin : begin + count], spmm_nm(alone, rows, act="swiglu"))
        begin += count
    assert not y[begin:].any()


def test_one_graph_serves_every_sharing_and_nothing_waits(device: torch.device) -> None:
    experts, out, k, tokens = 6, 128, 256, 90
    dense = weights(experts, out, k, torch.bfloat16, device)
    w, offs = NM.from_dense(dense), torch.zeros(experts, dtype=torch.int32, device=device)
    x = torch.randint(-2, 3, (tokens, k), device=device).bfloat16()
    assert plan_experts(w, x, offs).name == "kernel"
    spmm_nm_experts(w, x, offs)
    with nothing_waits():
        spmm_nm_experts(w, x, offs)
    graph = capture(lambda: spmm_nm_experts(w, x, offs))
    for counts in ([15] * 6, [0, 0, 90, 0, 0, 0], [1, 2, 3, 4, 5, 6], [0] * 6):
        offs.copy_(ends_of(counts, device))
        graph.outputs.fill_(float("nan"))
        graph.replay()
        assert torch.equal(graph.outputs, exact(x, dense, offs).bfloat16())


@pytest.mark.parametrize(
    "ends", [[5, 3, 90], [-4, 200, 300], [2**31 - 1, -(2**31), 7], [90, 0, 0]], ids=str
)
def test_ends_that_mean_nothing_touch_no_other_memory(
    ends: list[int], device: torch.device
) -> None:
    w = NM.from_dense(weights(3, 128, 64, torch.bfloat16, device))
    x = torch.ones(90, 64, device=device).bfloat16()
    spmm_nm_experts(w, x, torch.tensor(ends, dtype=torch.int32, device=device))
    torch.cuda.synchronize()  # A fault would be raised here.
    right = spmm_nm_experts(w, x, ends_of([30, 30, 30], device))
    assert torch.equal(right, exact(x, w.to_dense(), ends_of([30] * 3, device)).bfloat16())


def test_as_many_experts_as_there_may_be(device: torch.device) -> None:
    dense = weights(MOST_EXPERTS, 64, 64, torch.bfloat16, device)
    counts = torch.randint(0, 4, (MOST_EXPERTS,)).tolist()
    x, offs = torch.ones(sum(counts), 64, device=device).bfloat16(), ends_of(counts, device)
    y = spmm_nm_experts(NM.from_dense(dense), x, offs)
    assert torch.equal(y, exact(x, dense, offs).bfloat16())


def test_a_cold_capture_is_refused(device: torch.device) -> None:
    w = NM.from_dense(weights(2, 64, 64, torch.float16, device))
    x, offs = torch.ones(4, 64, device=device).half(), ends_of([2, 2], device)
    doubled = x * 2  # loads what the capture runs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
            spmm_nm_experts(w, x, offs, act="gelu_tanh", config=for_experts()[3])
        after = x * 2
    after.fill_(0)
    graph.replay()
    assert torch.equal(after, doubled)
