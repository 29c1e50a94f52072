from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.nn import convolutions_as_linear, fold_batch_norms


def trained(model: nn.Module, *shape: int) -> nn.Module:
    """With statistics, scales and shifts that are not those it starts with, in float64."""
    model = model.double()
    for norm in (
        each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)
    ):
        if norm.affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, *shape, dtype=torch.float64))
    return model.eval()


def same_after_folding(model: nn.Module, *shape: int, **options: object) -> tuple[str, ...]:
    x = torch.randn(2, *shape, dtype=torch.float64)
    want = model(x)
    names = fold_batch_norms(model, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(model(x), want, rtol=1e-11, atol=1e-11)
    return names


class Residual(nn.Module):
    """What a norm gets of `conv2`, the sum gets too; `conv3` is called twice, `last` by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv3, self.norm3 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.shared = nn.BatchNorm2d(8)
        self.conv4, self.norm4 = nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        y = self.conv2(x)
        y = y + self.norm2(y)
        y = self.norm3(self.conv3(y)) + self.conv3(x)
        y = self.shared(self.shared(y))
        return self.norm4(self.conv4(y))


def test_what_one_layer_gives_one_norm_is_folded() -> None:
    model = trained(Residual(), 4, 9, 9)
    assert same_after_folding(model, 4, 9, 9) == ("norm1", "norm4")
    kinds = [type(getattr(model, name)).__name__ for name in ("norm1", "norm2", "norm4")]
    assert kinds == ["Identity", "BatchNorm2d", "Identity"]
    # A second call finds nothing more.
    assert fold_batch_norms(model) == ()


def test_linear_layers_too() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    assert same_after_folding(trained(model, 6), 6) == ("1",)


class Padded(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))


def test_a_subclass_only_where_it_is_vouched_for() -> None:
    model = trained(nn.Sequential(Padded(4, 8, 3), nn.BatchNorm2d(8)), 4, 6, 6)
    assert same_after_folding(model, 4, 6, 6) == ()
    assert same_after_folding(model, 4, 6, 6, also=(Padded,)) == ("1",)


@pytest.mark.parametrize("kind", ["hooked", "normed", "tied", "no statistics", "two places"])
def test_what_somebody_else_watches_or_uses_is_left_alone(kind: str) -> None:
    conv, norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
    model = nn.Sequential(conv, norm)
    if kind == "normed":
        parametrizations.weight_norm(conv)
    if kind == "no statistics":
        model[1] = nn.BatchNorm2d(4, track_running_stats=False)
    if kind == "tied":
        model.append(nn.Conv2d(4, 4, 3))
        model[2].weight = conv.weight
    if kind == "two places":
        model.append(nn.Sequential(conv))
    model = trained(model, 4, 6, 6)
    if kind == "hooked":
        conv.register_forward_hook(lambda *_: None)
    assert fold_batch_norms(model) == ()


def test_a_weight_of_16_bits_is_rounded_once() -> None:
    model = trained(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)), 4, 6, 6)
    model = model.bfloat16().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    conv, norm = model[0], model[1]
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    want = (conv.weight.double() * scale[:, None, None, None]).bfloat16()
    fold_batch_norms(model)
    torch.testing.assert_close(model[0].weight.detach(), want, rtol=0.004, atol=0)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].bias.dtype == torch.bfloat16


def test_folded_layers_become_linear_layers() -> None:
    model = trained(nn.Sequential(nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), 16, 6, 6)
    x = torch.randn(2, 16, 6, 6, dtype=torch.float64)
    want = model(x)
    fold_batch_norms(model)
    convolutions_as_linear(model)
    torch.testing.assert_close(model(x), want)


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if x.sum() > 0 else x


def test_what_cannot_be_folded_is_named() -> None:
    with pytest.raises(ArgumentError, match="batch norm 1 in training mode"):
        fold_batch_norms(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    with pytest.raises(ArgumentError, match="a BatchNorm2d as the model"):
        fold_batch_norms(nn.BatchNorm2d(4))
    with pytest.raises(UnsupportedError, match="a Deciding that cannot be traced"):
        fold_batch_norms(Deciding().eval())
    assert fold_batch_norms(nn.Sequential(nn.Linear(2, 2))) == ()
