"""What is worked out of a weight once: checked, dropped, and never older than the weight."""

from __future__ import annotations

import gc

import pytest
import torch

from hopsparse.errors import FormatError
from hopsparse.formats import BSR, HYB
from hopsparse.launch import holding
from hopsparse.nn import SparseConv, SparseLinear
from hopsparse.ops import csr_matmul
from hopsparse.ops.spmm_bsr.ready import keep_for_graph, ready
from hopsparse.ops.spmm_csr.pattern import ByMemory


def blocks() -> BSR:
    return BSR.from_dense(torch.eye(128, dtype=torch.bfloat16), (64, 64))


def test_indices_that_lie_outside_are_refused_before_a_layout_is_made() -> None:
    w = blocks()
    w.indices.fill_(9)
    with pytest.raises(FormatError, match="9"):
        ready(w)
    w = blocks()
    w.indptr.copy_(torch.tensor([0, 2, 1]))
    with pytest.raises(FormatError, match="indptr falls"):
        ready(w)


def test_a_graph_is_told_when_blocks_change() -> None:
    w = blocks()
    _, values = ready(w)
    with holding() as found:
        keep_for_graph(w)
    (held,) = found
    assert held.is_current()
    w.values.mul_(2)
    assert not held.is_current()
    assert ready(w)[1] is values  # Written again in place: what the graph reads is right.
    assert held.is_current()
    w.indices.add_(0)
    assert not held.is_current()
    ready(w)
    assert not held.is_current()


def test_what_was_worked_out_of_freed_memory_is_dropped_at_the_next_look() -> None:
    known, one = ByMemory[str](), torch.ones(3)
    known.keep("found", (one,), 3)
    assert known.find((one,), 3) == "found"
    del one
    gc.collect()
    assert known.find((torch.ones(4),), 3) is None
    assert len(known) == 0


def test_hyb_that_changed_is_converted_again() -> None:
    a = HYB.from_dense(torch.eye(4))
    x = torch.ones(4, 1)
    assert csr_matmul(a, x).flatten().tolist() == [1.0] * 4
    a.ell_values.mul_(3)
    assert csr_matmul(a, x).flatten().tolist() == [3.0] * 4


@pytest.mark.parametrize("aggregation", ["gcn", "mean", "sum"])
def test_a_graph_seen_in_inference_mode_can_be_trained_on(aggregation: str) -> None:
    conv = SparseConv(4, 2, aggregation)
    x, edges = torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])
    with torch.inference_mode():
        inside = conv(x, edges)
    outside = conv(x, edges)
    torch.testing.assert_close(outside, inside)
    outside.sum().backward()
    assert all(each.grad is not None for each in conv.parameters())


def test_an_activation_that_no_strip_has_follows_the_product() -> None:
    layer = SparseLinear(BSR.from_dense(torch.randn(64, 64), (64, 64)))
    plain = layer(torch.ones(2, 64))
    layer.act = "swiglu"
    gate, up = plain.view(2, 4, 2, 8).unbind(-2)
    right = (torch.nn.functional.silu(gate) * up).flatten(-2)
    torch.testing.assert_close(layer(torch.ones(2, 64)), right)
    layer.prepare(16)
