"""Block-sparse layers on a GPU: what runs, under torch.compile, in graphs and on other streams."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hopsparse.errors import UnsupportedError
from hopsparse.formats import BSR
from hopsparse.nn import SparseLinear
from hopsparse.ops import spmm_bsr
from hopsparse.ops.spmm_bsr import op
from hopsparse.ops.spmm_bsr.kernel import deepest
from tests.helpers.blocks import blocked, exact_product, small
from tests.helpers.prepared import refuse_to_compile
from tests.helpers.waiting import nothing_waits


class TestChoice:
    """Layers of 16384 x 4096: the kernel where few blocks are kept, dense where all are."""

    def layer(self, kept: float, block: int, device: torch.device) -> SparseLinear:
        torch.manual_seed(0)
        sides = (block, block)
        dense = blocked(16384, 4096, sides, torch.bfloat16, device, kept=kept, largest=1)
        linear = nn.Linear(4096, 16384, bias=False, device=device, dtype=torch.bfloat16)
        linear.weight = nn.Parameter(dense, requires_grad=False)
        return SparseLinear.from_linear(linear, "bsr", block=sides)

    @pytest.mark.parametrize("block", [64, 128])
    def test_few_blocks_run_the_kernel_and_nothing_is_decoded(
        self, block: int, device: torch.device
    ) -> None:
        layer = self.layer(0.1, block, device)
        x = small(2048, 4096, torch.bfloat16, device)
        assert layer.plan(x).name == "kernel"
        assert torch.equal(layer(x), exact_product(x, layer.to_dense()))
        assert layer._kept_weight() is None

    def test_all_blocks_run_dense(self, device: torch.device) -> None:
        layer = self.layer(1.0, 64, device)
        x = small(512, 4096, torch.bfloat16, device)
        assert layer.plan(x).name == "dense"
        assert "us" in layer.plan(x).describe()
        assert torch.equal(layer(x), exact_product(x, layer.to_dense()))
        assert layer._kept_weight() is not None

    def test_copies_and_what_was_saved_give_the_same(self, device: torch.device) -> None:
        layer = self.layer(0.1, 128, device)
        x = small(300, 4096, torch.bfloat16, device)
        y = layer(x)
        assert torch.equal(copy.deepcopy(layer)(x), y)
        assert torch.equal(layer.cpu().to(device)(x), y)

    def test_nothing_is_left_to_do_after_prepare(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = self.layer(0.1, 64, device)
        layer.act = "relu"
        layer.prepare(2048)
        refuse_to_compile(monkeypatch)
        for tokens in (1, 40, 300, 2048):
            x = small(tokens, 4096, torch.bfloat16, device)
            assert torch.equal(layer(x), exact_product(x, layer.to_dense()).relu())

    def test_a_planned_call_waits_for_nothing(self, device: torch.device) -> None:
        layer, x = self.layer(0.1, 64, device), small(64, 4096, torch.bfloat16, device)
        first = layer(x)
        with nothing_waits():
            second = layer(x)
        assert torch.equal(first, second)


def test_compiles_to_one_graph(device: torch.device) -> None:
    dense = blocked(256, 256, (64, 64), torch.bfloat16, device, largest=1)
    w = BSR.from_dense(dense, (64, 64))
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: spmm_bsr(w, x), fullgraph=True, backend=count)
    for tokens in (5, 17, 64, 100, 333):
        x = small(tokens, 256, torch.bfloat16, device)
        assert torch.equal(compiled(x), exact_product(x, dense))
    assert len(graphs) <= 2  # the first shape, then any
    nodes = [str(node.target) for node in graphs[-1].graph.nodes]
    assert any("spmm_bsr" in name for name in nodes)


def test_a_cold_capture_is_refused_and_goes_on(device: torch.device) -> None:
    w = BSR.from_dense(blocked(128, 128, (64, 64), torch.float16, device), (64, 64))
    x = torch.ones(5, 128, device=device).half()
    doubled = x * 2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
            spmm_bsr(w, x)
        after = x * 2
    after.fill_(0)
    graph.replay()
    assert torch.equal(after, doubled)


def test_replayed_graph_follows_its_inputs(device: torch.device) -> None:
    """And values that were changed, once a call outside has laid them out again."""
    dense = blocked(256, 256, (64, 64), torch.bfloat16, device)
    w, x = BSR.from_dense(dense, (64, 64)), torch.zeros(40, 256, device=device).bfloat16()
    config = deepest(1, 64, 64)
    spmm_bsr(w, x, config=config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = spmm_bsr(w, x, config=config)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randint(-2, 3, x.shape))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, exact_product(x, dense))
    w.values.neg_()
    spmm_bsr(w, x, config=config)
    graph.replay()
    assert torch.equal(y, exact_product(x, -dense))


def test_streams_and_what_other_dtypes_and_blocks_get(device: torch.device) -> None:
    dense = blocked(64, 64, (16, 16), torch.bfloat16, device)
    x = small(9, 64, torch.bfloat16, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = spmm_bsr(BSR.from_dense(dense, (16, 16)), x)
    side.synchronize()
    assert torch.equal(y, exact_product(x, dense))
    wide, narrow = BSR.from_dense(dense.float(), (16, 16)), BSR.from_dense(dense, (8, 8))
    assert op.plan(wide, x.float()).name == "dense"
    assert torch.equal(spmm_bsr(wide, x.float()), x.float() @ dense.float().T)
    assert "multiples of 16" in op.plan(narrow, x).describe()
    assert torch.equal(spmm_bsr(narrow, x), exact_product(x, dense))
