"""`hopsparse.sparsify_vision` on networks as torchvision and timm have them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hopsparse
from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.models.vision import replace_layers
from hopsparse.nn import Convolution, Pointwise, SparseLinear
from hopsparse.prune import METHODS, Recipe


class Bottleneck(nn.Module):
    """Narrow, 3x3, widen, add: a block of ResNet, which works in place."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.conv3, self.bn3 = nn.Conv2d(16, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if channels != out:
            conv = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    stages = [Bottleneck(16, 32, 2), Bottleneck(32, 32, 1)]
    model = nn.Sequential(
        stem, nn.Sequential(*stages), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)
    )
    with torch.no_grad():
        for seed in range(20):
            model(images(seed))
    return model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def images(seed: int) -> Tensor:
    x = torch.randn(8, 3, 20, 20, generator=torch.Generator().manual_seed(seed))
    return x.to(memory_format=torch.channels_last)


CONVOLUTIONS = ["1.0.conv1", "1.0.conv2", "1.0.conv3", "1.0.downsample.0"]
CONVOLUTIONS += [f"1.1.conv{i}" for i in (1, 2, 3)]


@pytest.mark.parametrize("method", METHODS)
def test_all_convolutions_and_the_head_are_pruned(method: str) -> None:
    model = network()
    calibration = [] if method == "magnitude" else [images(30)]
    reports = hopsparse.sparsify_vision(model, Recipe("2:4", method=method), calibration)
    assert sorted(report.name for report in reports) == sorted(
        [*(f"{name}.linear" for name in CONVOLUTIONS), "4"]
    )
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    # The stem has three channels, and is a convolution with its norm in it.
    assert [type(module) for module in model[0]] == [nn.Conv2d, nn.Identity, nn.ReLU]
    for name in CONVOLUTIONS:
        layer = model.get_submodule(name)
        assert type(layer) is (Convolution if name.endswith("conv2") else Pointwise)
        weight = layer.linear.to_dense()
        assert (weight.view(len(weight), -1, 4) != 0).sum(-1).max() == 2
    assert model(images(31)).isfinite().all()


def test_a_fit_is_closer_than_magnitude() -> None:
    dense = network().requires_grad_(False)
    want = dense(images(30))
    distance = {}
    for method in ("magnitude", "sparsegpt"):
        model = copy.deepcopy(dense)
        hopsparse.sparsify_vision(model, Recipe("2:4", method=method), [images(30)])
        distance[method] = float((model(images(30)) - want).norm())
    assert distance["sparsegpt"] < distance["magnitude"]


def test_blocks_of_weights() -> None:
    model = network()
    recipe = Recipe("block:16x16:0.5", method="magnitude", keep=("4", "*conv1*"))
    reports = hopsparse.sparsify_vision(model, recipe)
    assert "1.0.conv2.linear" in [report.name for report in reports]
    layer = model.get_submodule("1.0.conv2")
    assert isinstance(layer, Convolution)
    assert isinstance(layer.linear, SparseLinear)
    # Five of the nine taps at most: each is one block of 16 x 16.
    assert layer.linear.matrix.values.shape[0] < 9
    assert type(model.get_submodule("1.0.conv1")) is nn.Conv2d


def test_norms_stay_on_request() -> None:
    model = network()
    hopsparse.sparsify_vision(model, Recipe("2:4", method="magnitude"), fold=False)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 8


def test_a_transformer_whose_stem_is_its_only_convolution() -> None:
    stem = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten(2))
    model = nn.Sequential(stem, nn.Linear(25, 32), nn.GELU(), nn.Linear(32, 8))
    reports = hopsparse.sparsify_vision(model, "2:4", [images(1)])
    assert [report.name for report in reports] == ["3"]
    assert type(model[0][0]) is nn.Conv2d


def test_where_nothing_can_be_pruned_convolutions_come_back() -> None:
    model = nn.Sequential(nn.Conv2d(16, 8, 3), nn.ReLU())
    with pytest.raises(UnsupportedError):
        hopsparse.sparsify_vision(model, Recipe("2:4", method="magnitude", keep=("*",)))
    assert type(model[0]) is nn.Conv2d


def test_a_norm_in_training_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"batch norm 0\.1 in training mode"):
        hopsparse.sparsify_vision(network().train())


def test_layers_of_your_own_in_every_place() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(4, 2))
    names = replace_layers(
        model,
        lambda name, linear: SparseLinear.from_linear(linear, "csr") if name != "3" else None,
    )
    assert names == ("0", "2")
    assert model[0] is model[2]
    assert type(model[3]) is nn.Linear
