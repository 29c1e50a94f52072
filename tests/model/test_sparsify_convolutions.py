"""`hopsparse.sparsify` on convolutional networks whose 1x1 convolutions are linear layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hopsparse.models.sparsify import sparsify
from hopsparse.nn import SparseLinear, pointwise_as_linear
from hopsparse.prune import METHODS, Recipe


def pointwise(channels: int, out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 1, stride, bias=False)


class Inverted(nn.Module):
    """Expand, filter each channel, project: a block of MobileNet and EfficientNet."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.expand, self.project = pointwise(channels, wide), pointwise(wide, out)
        self.filter = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (wide, wide, out))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norms[0](self.expand(x)).relu()
        y = self.norms[1](self.filter(y)).relu()
        y = self.norms[2](self.project(y))
        return x.add(y) if y.shape == x.shape else y


class Inverteds(nn.Module):
    """Stem, blocks that change the shape in a ModuleList, head and classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.blocks = nn.ModuleList([Inverted(8, 8, 1), Inverted(8, 16, 2), Inverted(16, 16, 1)])
        self.head, self.classifier = pointwise(16, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.classifier(self.head(x).relu().mean((2, 3)))
        return scores


class Bottleneck(nn.Module):
    """Narrow, filter, widen, add: a block of ResNet, which works in place."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = pointwise(channels, 8), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, stride, 1, bias=False), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = pointwise(8, out), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if channels != out:
            norm = nn.BatchNorm2d(out)
            self.downsample = nn.Sequential(pointwise(channels, out, stride), norm)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return out.relu_()


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    stages = [Bottleneck(16, 32, 2), Bottleneck(32, 32, 1), Bottleneck(32, 32, 1)]
    return nn.Sequential(
        stem, nn.Sequential(*stages), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)
    )


def trained(model: nn.Module) -> nn.Module:
    """With statistics in its norms, and 1x1 convolutions as linear layers."""
    with torch.no_grad():
        for _ in range(20):
            model(images(1))
    pointwise_as_linear(model)
    return model.eval()


def images(seed: int) -> Tensor:
    return torch.randn(16, 3, 20, 20, generator=torch.Generator().manual_seed(seed))


INVERTEDS = [f"blocks.{i}.{name}.linear" for i in range(3) for name in ("expand", "project")]


@pytest.mark.parametrize(
    ("method", "calibration"),
    [("magnitude", ())] + [(method, seeds) for method in METHODS for seeds in ((1,), (1, 2))],
)
def test_a_list_of_blocks_that_change_the_shape_is_pruned_with_head_and_classifier(
    method: str, calibration: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = trained(Inverteds())
    reports = sparsify(model, Recipe("2:4", method=method), [images(seed) for seed in calibration])
    assert [report.name for report in reports] == [*INVERTEDS, "head.linear", "classifier"]
    assert {report.method for report in reports} == {method}
    assert model(images(3)).isfinite().all()


@pytest.mark.parametrize("fit_to", ["auto", "layer"])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_residual_network_that_works_in_place(fit_to: str, batches: int) -> None:
    torch.manual_seed(0)
    dense = trained(resnet())
    model, blind = copy.deepcopy(dense), copy.deepcopy(dense)
    calibration = [images(seed) for seed in range(batches)]
    reports = sparsify(model, Recipe("2:4", fit_to=fit_to), calibration)
    convolutions = [name for name, module in model.named_modules() if name.endswith(".linear")]
    assert sorted(report.name for report in reports) == sorted([*convolutions, "4"])
    assert sum(isinstance(module, SparseLinear) for module in model.modules()) == 8
    sparsify(blind, Recipe("2:4", method="magnitude"))
    with torch.no_grad():
        wanted = torch.cat([dense(batch) for batch in calibration])
        ours, theirs = (
            float((torch.cat([m(batch) for batch in calibration]) - wanted).norm())
            for m in (model, blind)
        )
    assert ours < theirs


class Added(nn.Module):
    """A residual convolution, added in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.conv, self.in_place = pointwise(16, 16), in_place

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x.add_(y) if self.in_place else x + y


@pytest.mark.parametrize("batches", [1, 2])
def test_writing_over_the_input_of_a_layer_changes_nothing(batches: int) -> None:
    results = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3), *(Added(in_place) for _ in range(3))).eval()
        pointwise_as_linear(model)
        sparsify(model, "2:4", [images(seed) for seed in range(batches)])
        with torch.no_grad():
            results.append(model(images(9)))
    assert torch.equal(*results)
