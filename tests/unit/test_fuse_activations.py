"""Activations that must stay where they are, and the way back after a model has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hopsparse.errors import ArgumentError
from hopsparse.formats import NM, NMPattern
from hopsparse.graphs import fuse_activations
from hopsparse.nn import SparseLinear
from hopsparse.prune import magnitude


def layer(kind: type[SparseLinear] = SparseLinear) -> SparseLinear:
    return kind(NM.from_dense(magnitude(torch.randn(16, 16), NMPattern(2, 4)))).requires_grad_(
        False
    )


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self[0](x)
        outer: Tensor = self[1](inner)
        return outer + inner


class Adapted(SparseLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x


def replaced(which: int) -> nn.Sequential:
    model = nn.Sequential(layer(), nn.ReLU())
    old = model[which].forward
    setattr(model[which], "forward", lambda x: old(x) - x)  # noqa: B010
    return model


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Residual(layer(), nn.ReLU()), id="sequential"),
        pytest.param(lambda: nn.Sequential(layer(Adapted), nn.ReLU()), id="subclass"),
        pytest.param(lambda: replaced(0), id="forward of the layer"),
        pytest.param(lambda: replaced(1), id="forward of the activation"),
    ],
)
def test_a_forward_of_its_own_is_not_fused(make: Callable[[], nn.Module]) -> None:
    model, x = make().eval(), torch.randn(4, 16)
    right = model(x)
    assert fuse_activations(model).count == 0
    assert torch.equal(model(x), right)


def test_an_activation_that_moved_comes_back() -> None:
    model, x = nn.Sequential(layer(), nn.ReLU(), layer()).eval(), torch.randn(4, 16)
    right = model(x)
    fused = fuse_activations(model)
    model.insert(0, nn.Identity())
    fused.undo()
    assert torch.equal(model(x), right)
    assert [type(each).__name__ for each in model][::2] == ["Identity", "ReLU"]


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a NoneType to fuse"):
        fuse_activations(None)  # type: ignore[arg-type]
