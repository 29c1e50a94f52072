"""Layers of CSR weights in tiles: when, with what weight, and what is left to the dense product."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hopsparse.formats import CSR
from hopsparse.launch import holding
from hopsparse.nn import SparseLinear
from hopsparse.ops.spmm_csr import dispatch, layers
from hopsparse.ops.spmm_csr.packed import Packed, fullest_unit
from hopsparse.ops.spmm_csr.tiles import ROOMS
from tests.helpers.tile_walk import walk

ROWS, K = 130, 200


class Tiles:
    """Stands for the kernel: what it was given, and its product lane by lane."""

    def __init__(self) -> None:
        self.given: list[Packed] = []

    def multiply(self, packed: Packed, x: Tensor, bias: Tensor | None) -> Tensor:
        self.given.append(packed)
        y = walk(packed, x)
        return (y if bias is None else y + bias.float()).to(x.dtype)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Tiles:
    """Layers take the CPU for the GPU that was measured, and any shape for a large one."""
    found = Tiles()
    monkeypatch.setattr(layers, "suits", lambda shape, x: x.numel() <= 16 * shape[1])
    monkeypatch.setattr(layers, "multiply", found.multiply)
    return found


def dense_of(kept: float = 0.15) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(1, 3, (ROWS, K)).bfloat16() * (torch.rand(ROWS, K) < kept)


def layer_of(dense: Tensor, bias: Tensor | None = None) -> SparseLinear:
    return SparseLinear(CSR.from_dense(dense), bias).requires_grad_(False)


def tokens(count: int) -> Tensor:
    return torch.randint(-2, 3, (count, K)).bfloat16()


def test_few_tokens_run_in_tiles_and_nothing_is_decoded(tiles: Tiles) -> None:
    dense, bias = dense_of(), torch.randint(-3, 4, (ROWS,)).bfloat16()
    layer = layer_of(dense, bias)
    for count in (1, 5, 16):
        x = tokens(count)
        assert torch.equal(layer(x), x @ dense.T + bias)
    assert torch.equal(layer(x.view(2, 8, K)), (x @ dense.T + bias).view(2, 8, ROWS))
    layer.act = "relu"
    assert torch.equal(layer(x), (x @ dense.T + bias).relu())
    assert len(tiles.given) == 5
    assert len({id(each) for each in tiles.given}) == 1
    assert layer._kept_weight() is None


def test_more_tokens_run_dense(tiles: Tiles) -> None:
    layer, x = layer_of(dense_of()), tokens(17)
    assert torch.equal(layer(x), x @ layer.to_dense().T)
    assert not tiles.given
    assert layer._kept_weight() is not None
    assert layer(tokens(0)).shape == (0, ROWS)
    assert not tiles.given


def test_a_weight_that_changed_is_packed_again(tiles: Tiles) -> None:
    layer, x = layer_of(dense_of()), tokens(3)
    y = layer(x)
    layer.values.mul_(2)
    assert torch.equal(layer(x), 2 * y)
    layer.values = -layer.values
    assert torch.equal(layer(x), -2 * y)
    layer.load_state_dict(layer_of(dense_of()).state_dict())
    assert torch.equal(layer(x), y)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    layer.half()
    assert torch.equal(layer(x.half()), y.half())
    assert len(tiles.given) == 6
    assert tiles.given[-1].values.dtype == torch.float16


def test_what_tiles_may_be_slower_for_runs_dense_and_is_asked_for_once(
    tiles: Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    of_weight = layers.packed_for
    monkeypatch.setattr(layers, "packed_for", lambda w: asked.append(w) or of_weight(w))
    crowded = dense_of(0.0)
    crowded[:32, :64] = 1
    assert (
        fullest_unit((stored := CSR.from_dense(crowded)).indptr, stored.indices, K)
        == 2048
        > ROOMS[0]
    )
    for dense in (dense_of(0.3), crowded):
        layer, x = layer_of(dense), tokens(2)
        for _ in range(2):
            assert torch.equal(layer(x), x @ dense.T)
        assert layer.plan(x).name == "reference"
    assert len(asked) == 2
    assert not tiles.given


def test_repeated_columns_run_dense(tiles: Tiles) -> None:
    ends, columns = torch.tensor([0, 2, 3]).int(), torch.tensor([1, 1, 0]).int()
    w = CSR((2, 30), torch.ones(3).half(), columns, ends)
    layer, x = SparseLinear(w), torch.ones(1, 30).half()
    assert torch.equal(layer(x), x @ w.to_dense().T)
    assert not tiles.given
    assert layer.plan(x).name == "reference"


@pytest.mark.parametrize("of", ["x", "bias", "values"])
def test_gradients_run_dense(tiles: Tiles, of: str) -> None:
    dense, bias, x = dense_of(), torch.zeros(ROWS).bfloat16(), tokens(2)
    layer = layer_of(dense, bias)
    if of == "values":
        layer.values.requires_grad_()
    elif of == "bias":
        layer.requires_grad_()
    else:
        x.requires_grad_()
    layer(x).sum().backward()
    assert not tiles.given
    with torch.no_grad():
        assert torch.equal(layer(x), x @ dense.T)
    assert len(tiles.given) == (of != "values")


def test_without_a_decoded_weight_the_operator_decides(tiles: Tiles) -> None:
    layer, x = layer_of(dense_of()), tokens(2)
    layer.keep_decoded = False
    assert torch.equal(layer(x), x @ layer.to_dense().T)
    assert not tiles.given


def test_a_compiled_layer_is_one_graph(tiles: Tiles) -> None:
    torch.compiler.reset()
    layer, x = layer_of(dense_of()), tokens(4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), x @ layer.to_dense().T)
    assert not tiles.given


def test_what_does_not_fit_is_refused_as_ever(tiles: Tiles) -> None:
    layer = layer_of(dense_of())
    for x in (tokens(2).float(), tokens(2)[:, 1:]):
        with pytest.raises(Exception, match="linear: x") as caught:
            layer(x)
        assert type(caught.value).__name__ == "ArgumentError"
    assert not tiles.given


def test_a_capture_goes_on_dense_where_nothing_was_packed(
    tiles: Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = layer_of(dense_of()), tokens(2)
    captures = True
    monkeypatch.setattr(dispatch, "is_captured", lambda where: captures)
    want = layer(x)
    assert not tiles.given
    assert layer.plan(x).name == "reference"
    captures = False
    assert torch.equal(layer(x), want)
    captures = True
    monkeypatch.setattr(dispatch, "_CAPTURED", kept := {})
    assert torch.equal(layer(x), want)
    assert len(tiles.given) == 2
    assert list(kept.values()) == tiles.given[:1]
    layer.values.mul_(2)  # Dense again, until a call outside has packed it.
    assert torch.equal(layer(x), 2 * want)
    assert len(tiles.given) == 2


def test_a_graph_is_told_when_its_weight_is_no_longer_right(tiles: Tiles) -> None:
    layer, x = layer_of(dense_of()), tokens(2)
    layer(x)
    with holding() as found:
        layer(x)
    (held,) = found
    assert held.copy is tiles.given[0]
    assert held.is_current()
    old = layer.values
    layer.values = old.clone()
    assert not held.is_current()
    layer.values = old
    assert held.is_current()
    layer.indices.add_(0)
    assert not held.is_current()


def test_plans_say_what_runs(tiles: Tiles) -> None:
    layer, x = layer_of(dense_of()), tokens(9)
    said = layer.plan(x).describe()
    assert said == (
        "spmm_csr runs kernel: tiles bfloat16, 16 tokens, units of up to 1024 values; measured to "
        "be faster than dense up to 16 tokens; gradients run dense; w is packed at the first call"
    )
    layer(x)
    kept = f"w is packed once and kept, {tiles.given[0].nbytes} bytes"
    assert layer.plan(x).why.endswith(kept)
    assert layer.plan(tokens(17)).name == "reference"


def test_prepare_packs_and_decodes_only_where_a_call_would(tiles: Tiles) -> None:
    layer = layer_of(dense_of())
    layer.prepare(16)
    assert layer._kept_weight() is None
    assert "packed once and kept" in layer.plan(tokens(1)).why
    layer.prepare(17)
    assert layer._kept_weight() is not None


def test_shapes_for_which_the_measured_one_speaks() -> None:
    assert layers.wins(layers.ROWS, layers.COLUMNS)
    assert layers.wins(16384, 16384)
    assert layers.wins(25344, 4096)  # three blocks on every SM
    # Few panels; a fifth of the SMs with a third block; a ninth unit for one warp of eight; short.
    for rows, cols in ((11008, 4096), (14336, 4096), (18432, 4096), (16384, 4160), (32768, 2048)):
        assert not layers.wins(rows, cols)


def test_on_the_cpu_nothing_is_packed() -> None:
    linear = nn.Linear(4096, 16384, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight[:, 100:] = 0
    layer, x = SparseLinear.from_linear(linear, "csr"), torch.ones(1, 4096).bfloat16()
    assert not layers.suits(layer.matrix.shape, x)
    assert layer.plan(x).name == "reference"
    assert torch.equal(layer(x), linear(x))
    assert layer._assembled is None
