"""A CSR weight on 2:4 units: nothing is lost, whatever fits, and the result is in the old order."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, FormatError
from hopsparse.formats import BSR, CSR, NMPattern
from hopsparse.formats import _base as formats_base
from hopsparse.nn import SplitLinear
from hopsparse.prune import magnitude


def integers(rows: int, cols: int, density: float = 0.4) -> Tensor:
    """Small, so that every sum is exact; none is zero where one is kept."""
    values = torch.randint(1, 4, (rows, cols)) * (2 * torch.randint(0, 2, (rows, cols)) - 1)
    return (values * (torch.rand(rows, cols) < density)).float()


def fitting(rows: int, cols: int) -> Tensor:
    dense = integers(rows, cols, 1.0)
    return magnitude(dense + torch.rand(rows, cols) / 8, NMPattern(2, 4)).round()


@pytest.mark.parametrize("shape", [(64, 64), (130, 36), (1, 7), (65, 6), (200, 130)], ids=str)
@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.6, 1.0])
def test_every_entry_is_in_one_of_both(
    shape: tuple[int, int], reorder: bool, density: float
) -> None:
    dense = integers(*shape, density)
    bias = torch.randint(-3, 4, (shape[0],)).float()
    layer = SplitLinear.from_csr(CSR.from_dense(dense), bias, reorder=reorder)
    assert torch.equal(layer.to_dense(), dense)
    x = torch.randint(-3, 4, (2, 5, shape[1])).float()
    assert torch.equal(layer(x), x @ dense.T + bias)
    if layer.rest is not None:
        layer.rest.matrix.validate()
        main = layer.main.to_dense().view(-1)
        assert int((main != 0).sum() + layer.rest.matrix.parts()["values"].numel()) == int(
            (dense != 0).sum()
        )


def test_a_matrix_that_fits_has_no_rest() -> None:
    dense = fitting(128, 64)
    layer = SplitLinear.from_csr(CSR.from_dense(dense))
    assert layer.rest is None
    assert layer.order is None
    assert layer.describe().endswith("non-zeros are 2:4, nothing is left")


def test_shuffled_columns_are_found_again() -> None:
    dense = fitting(256, 64)[:, torch.randperm(64)]
    natural = SplitLinear.from_csr(CSR.from_dense(dense), reorder=False)
    found = SplitLinear.from_csr(CSR.from_dense(dense))
    assert natural.rest is not None
    assert found.order is not None
    assert found.rest is None
    assert "with columns reordered, nothing is left" in found.describe()
    x = torch.randint(-3, 4, (5, 64)).float()
    assert torch.equal(found(x), natural(x))


def test_the_largest_go_to_the_tensor_cores() -> None:
    dense = torch.tensor([[1.0, -4.0, 3.0, 2.0]])
    layer = SplitLinear.from_csr(CSR.from_dense(dense))
    assert layer.main.to_dense().tolist() == [[0.0, -4.0, 3.0, 0.0]]
    assert layer.describe() == "2 of 4 non-zeros are 2:4, 2 stay in CSR"


def test_many_pieces_are_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_base, "chunk_elements", lambda _: 64 * 16)
    dense = integers(300, 16, 0.7)
    layer = SplitLinear.from_csr(CSR.from_dense(dense))
    assert torch.equal(layer.to_dense(), dense)


def test_gradients_copies_and_state_dicts() -> None:
    dense = integers(64, 32, 0.7)
    layer = SplitLinear.from_csr(CSR.from_dense(dense), torch.zeros(64))
    x = torch.randn(3, 32, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0).expand(3, 32))
    other = SplitLinear.from_csr(CSR.from_dense(integers(64, 32, 0.7)), torch.zeros(64))
    assert layer.order is not None
    twin = copy.deepcopy(layer)
    assert torch.equal(twin.to_dense(), dense)
    assert set(layer.state_dict()) == {
        *("order", "main.values", "main.meta", "main.bias"),
        *("rest.values", "rest.indices", "rest.indptr"),
    }
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half(torch.ones(1, 32).bfloat16()).dtype == torch.bfloat16
    assert torch.equal(half.to_dense().float(), dense)
    assert not torch.equal(other.to_dense(), dense)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"a BSR to split.*convert\(matrix"):
        SplitLinear.from_csr(BSR.from_dense(torch.eye(32), block=(16, 16)))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="CSR of torch.int8"):
        SplitLinear.from_csr(CSR.from_dense(torch.eye(4).to(torch.int8)))
    twice = CSR((1, 4), torch.ones(2), torch.tensor([1, 1]).int(), torch.tensor([0, 2]).int())
    with pytest.raises(FormatError, match="repeated"):
        SplitLinear.from_csr(twice)
