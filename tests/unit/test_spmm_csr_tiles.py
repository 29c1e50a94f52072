"""Weights packed for tensor cores: what is packed, and that lanes which follow it multiply."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.formats import CSR
from hopsparse.ops.spmm_csr import dispatch, op
from hopsparse.ops.spmm_csr.packed import Packed, pack, rows_for_lanes
from hopsparse.ops.spmm_csr.tiles import ROOMS, tile_spec, token_tiles
from tests.helpers.tile_walk import A_AT, B_AT, walk


def weight(rows: int, k: int, density: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    dense = torch.randint(-2, 3, (rows, k)).to(dtype)
    return dense * (torch.rand(rows, k) < density)


def packed(dense: Tensor) -> Packed:
    w = CSR.from_dense(dense)
    found = pack(w.indptr, w.indices, w.values, w.shape[1])
    assert found is not None
    return found


@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(
    ("tokens", "rows", "k"), [(1, 64, 64), (3, 5, 7), (9, 70, 130), (17, 64, 530), (35, 129, 64)]
)
def test_lanes_that_follow_the_words_multiply(
    tokens: int, rows: int, k: int, density: float
) -> None:
    dense = weight(rows, k, density)
    x = torch.randint(-2, 3, (tokens, k)).bfloat16()
    assert torch.equal(walk(packed(dense), x), x.float() @ dense.float().T)


def test_lanes_have_every_entry_of_a_tile_once() -> None:
    for places, cols in ((A_AT, 16), (B_AT, 8)):
        count = torch.zeros(16, cols, dtype=torch.int64)
        for row, col in places:
            count[row, col] += 1
        assert (count == 1).all()


@pytest.mark.parametrize("density", [0.05, 0.45, 1.0])
def test_a_room_holds_every_unit_and_no_smaller_one_does(density: float) -> None:
    dense = weight(200, 300, density).abs() + (torch.rand(200, 300) < density)
    w = packed(dense)
    counts = torch.nn.functional.pad(dense != 0, (0, 20, 0, 56)).view(4, 64, 5, 64).sum((1, 3))
    assert w.room == min(room for room in ROOMS if room >= counts.max())
    assert torch.equal(w.starts.diff().long(), -(-counts.flatten() // 8))
    assert w.values.numel() == int(w.starts[-1]) * 8
    assert w.values.count_nonzero() == dense.count_nonzero()
    bits = sum(int(word).bit_count() for word in (w.words.long() & 0xFFFFFFFF).flatten())
    assert bits == dense.count_nonzero()


def test_columns_in_any_order_pack_alike_and_repeated_ones_do_not() -> None:
    dense = weight(64, 64, 0.3)
    w, known = CSR.from_dense(dense), packed(dense)
    order = torch.argsort(torch.repeat_interleave(w.indptr.diff()) * 64 - w.indices)
    turned = pack(w.indptr, w.indices[order], w.values[order], 64)
    assert turned is not None
    for name in ("words", "prefixes", "values", "starts"):
        assert torch.equal(getattr(turned, name), getattr(known, name))
    twice = torch.tensor([3, 3])
    assert pack(torch.tensor([0, 2]), twice, torch.ones(2).half(), 64) is None


def test_tokens_are_copied_only_where_a_lane_cannot_read_four_columns() -> None:
    whole = torch.randn(9, 72).bfloat16()
    for x in (whole, whole[::2], whole[:, :68], whole[:, 4:], whole[:1].expand(5, 72)):
        assert rows_for_lanes(x) is x
    odd = torch.randn(9 * 72 + 1).bfloat16()[1:].view(9, 72)
    for x in (whole[:, 1:69], whole[:, :70], whole.T, whole[:, ::2], odd):
        laid = rows_for_lanes(x)
        assert torch.equal(laid[:, : x.shape[1]], x)
        assert not laid[:, x.shape[1] :].any()
        assert laid.shape[1] == -(-x.shape[1] // 4) * 4
        assert laid.stride(1) == 1
        assert laid.data_ptr() % 8 == 0


def test_a_weight_that_is_kept_is_found_until_it_changes() -> None:
    w = CSR.from_dense(weight(64, 64, 0.3))
    parts = (w.indptr, w.indices, w.values)
    known = dispatch.packed_of(*parts, 64)
    assert known is not None
    assert dispatch.packed_of(*parts, 64) is known
    assert dispatch.known_packed(*parts, 64) == (True, known)
    w.values[0] = 9
    assert dispatch.known_packed(*parts, 64) == (False, None)
    again = dispatch.packed_of(*parts, 64)
    assert again is not None
    assert (again.values != known.values).sum() == 1


def test_what_cannot_be_packed_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(dispatch, "pack", lambda *given: asked.append(given))
    w = CSR.from_dense(weight(64, 64, 0.3))
    for _ in range(3):
        assert dispatch.packed_of(w.indptr, w.indices, w.values, 64) is None
    assert len(asked) == 1


def test_what_suits_tensor_cores() -> None:
    half, shape = torch.float16, (100, 100)
    assert dispatch.suits_tiles(2000, shape, 512, half)
    assert not dispatch.suits_tiles(2000, shape, 513, half)
    assert not dispatch.suits_tiles(2000, shape, 1, torch.float32)
    assert not dispatch.suits_tiles(100, shape, 1, half)


def test_kernels_that_do_not_exist_are_refused() -> None:
    assert token_tiles(33) == 4
    with pytest.raises(ArgumentError, match="float32"):
        tile_spec("float32", 1, 1024)


def test_gradients_of_tokens() -> None:
    dense = weight(6, 9, 0.5, torch.float32).double()
    row, col = dense.nonzero().unbind(1)
    indptr = torch.zeros(7, dtype=torch.int64)
    torch.cumsum((dense != 0).sum(1), 0, out=indptr[1:])
    values = dense[row, col].requires_grad_()
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def run(values: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        return dispatch.spmm_csr(indptr, col, values, x, bias, True)

    assert torch.autograd.gradcheck(run, (values, x, bias))
    assert torch.autograd.gradgradcheck(run, (values, x, bias))


class TestTheWayOfFewTokens:
    """As on a Hopper GPU, with what the CPU runs instead of a kernel."""

    @pytest.fixture(autouse=True)
    def _few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(op, "_gathers", lambda w, x: True)

    def test_leading_dimensions_and_bias(self) -> None:
        dense = weight(70, 50, 0.3)
        x, bias = torch.randint(-2, 3, (2, 3, 50)).bfloat16(), torch.randint(-4, 5, (70,))
        got = op.spmm_csr(CSR.from_dense(dense), x, bias=bias.bfloat16())
        assert got.is_contiguous()
        assert torch.equal(got.double(), x.double() @ dense.double().T + bias.double())

    def test_one_graph_under_torch_compile_whatever_the_tokens(self) -> None:
        torch.compiler.reset()
        dense = weight(7, 5, 0.5, torch.float32)
        w = CSR.from_dense(dense)
        compiled = torch.compile(
            lambda x: op.spmm_csr(w, x), fullgraph=True, dynamic=True, backend="aot_eager"
        )
        for tokens in (2, 5, 9):
            x = torch.randint(-2, 3, (tokens, 5)).float().requires_grad_()
            y = compiled(x)
            assert torch.equal(y, x @ dense.T)
            y.sum().backward()
            assert torch.equal(x.grad, dense.sum(0).expand(tokens, 5))
