from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hopsparse.errors import ArgumentError, FormatError, UnsupportedError
from hopsparse.formats import BSR, NM
from hopsparse.nn import (
    Convolution,
    Pointwise,
    SparseLinear,
    convolutions_as_linear,
    pointwise_as_linear,
    restore_convolutions,
)
from hopsparse.ops._windows import Windows
from hopsparse.prune import magnitude

CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last


def integers(*shape: int) -> Tensor:
    """Small whole numbers: every sum of products is exact in float32."""
    return torch.randint(-4, 5, shape).float()


def whole(conv: nn.Conv2d) -> nn.Conv2d:
    for parameter in conv.parameters():
        parameter.data = integers(*parameter.shape)
    return conv.requires_grad_(False)


class Padded(nn.Conv2d):
    """It pads in its forward, as some models of TensorFlow's do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (0, 1, 0, 1)))


@pytest.mark.parametrize("memory_format", [CONTIGUOUS, LAST], ids=str)
@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"padding": 1}, (2, 16, 7, 5)),
        ({"padding": 1}, (3, 16, 1, 1)),
        ({"padding": 1, "stride": 2}, (2, 16, 8, 7)),
        ({"padding": "same", "dilation": 2}, (1, 16, 6, 6)),
        ({"padding": "valid", "stride": (1, 3)}, (2, 16, 5, 9)),
        ({"padding": (0, 2), "dilation": (2, 1)}, (2, 16, 7, 4)),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_same_values_and_layout_as_the_convolution(
    memory_format: torch.memory_format,
    options: dict[str, object],
    shape: tuple[int, ...],
    bias: bool,
) -> None:
    conv = whole(nn.Conv2d(16, 12, 3, bias=bias, **options))  # type: ignore[arg-type]
    x = integers(*shape).to(memory_format=memory_format)
    layer = Convolution.from_conv(conv)
    y, want = layer(x), conv(x)
    assert torch.equal(y, want)
    assert y.is_contiguous(memory_format=memory_format)
    assert torch.equal(layer(x[0]), want[0])
    assert torch.equal(layer.to_conv()(x), want)


@pytest.mark.parametrize("most_bytes", [1, 3 * 9 * 9 * 16 * 4 * 9, 10**9])
def test_a_few_images_at_a_time_are_the_same(most_bytes: int) -> None:
    layer = Convolution.from_conv(whole(nn.Conv2d(16, 8, 3, padding=1)))
    x = integers(7, 16, 9, 9).to(memory_format=LAST)
    want = layer(x)
    layer.most_bytes = most_bytes
    y = layer(x)
    assert torch.equal(y, want)
    assert y.is_contiguous(memory_format=LAST)


def test_no_images() -> None:
    layer = Convolution.from_conv(nn.Conv2d(16, 8, 3, padding=1))
    assert layer(torch.zeros(0, 16, 5, 5)).shape == (0, 8, 5, 5)


@pytest.mark.parametrize("kind", ["nm", "16x16", "32x32"])
@pytest.mark.parametrize("stride", [1, 2])
def test_sparse_layers_against_conv2d_in_float64(kind: str, stride: int) -> None:
    torch.manual_seed(0)
    layer = Convolution.from_conv(nn.Conv2d(32, 64, 3, stride, 1).requires_grad_(False))
    linear = layer.linear
    assert isinstance(linear, nn.Linear)
    weight = linear.weight.detach()
    if kind == "nm":
        weight = magnitude(weight, NM.from_dense(torch.zeros(1, 4)).pattern)
        layer.linear = SparseLinear(NM.from_dense(weight), linear.bias)
    else:
        side = int(kind.split("x")[0])
        kept = torch.rand(64 // side, 9 * 32 // side) < 0.4
        weight = weight * kept.repeat_interleave(side, 0).repeat_interleave(side, 1)
        layer.linear = SparseLinear(BSR.from_dense(weight, (side, side)), linear.bias)
    x = torch.randn(3, 32, 9, 8).to(memory_format=LAST)
    taps = weight.view(64, 3, 3, 32).permute(0, 3, 1, 2).double()
    want = nn.functional.conv2d(x.double(), taps, linear.bias.double(), stride, 1)
    torch.testing.assert_close(layer(x), want.float())
    assert layer(x).is_contiguous(memory_format=LAST)


def test_an_activation_of_the_layer_follows() -> None:
    conv = whole(nn.Conv2d(16, 8, 3, padding=1))
    layer = Convolution.from_conv(conv)
    assert isinstance(layer.linear, nn.Linear)
    layer.linear = SparseLinear.from_linear(layer.linear, "csr")
    layer.linear.act = "relu"
    x = integers(2, 16, 5, 5)
    assert torch.equal(layer(x), conv(x).relu())


def test_gradients_reach_weight_and_images() -> None:
    conv = nn.Conv2d(16, 4, 3, padding=1, stride=2).double()
    layer = Convolution.from_conv(conv)
    x = torch.randn(2, 16, 5, 4, dtype=torch.float64)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    layer(ours).square().sum().backward()
    conv(theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert isinstance(layer.linear, nn.Linear)
    assert conv.weight.grad is not None
    grad = conv.weight.grad.permute(0, 2, 3, 1).flatten(1)
    torch.testing.assert_close(layer.linear.weight.grad, grad)


def test_only_what_qualifies_is_replaced() -> None:
    model = nn.ModuleDict(
        {
            "stem": nn.Conv2d(3, 16, 3),
            "point": nn.Conv2d(16, 16, 1),
            "padded_point": nn.Conv2d(16, 16, 1, padding=1),
            "wide": nn.Conv2d(16, 16, 3, padding=1),
            "groups": nn.Conv2d(16, 16, 3, groups=2),
            "reflect": nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"),
            "even": nn.Conv2d(16, 16, 2, padding="same"),
            "subclass": Padded(16, 16, 3),
            "hooked": nn.Conv2d(16, 16, 3),
            "linear": nn.Linear(8, 8),
        }
    )
    model["hooked"].register_forward_hook(lambda *_: None)
    assert convolutions_as_linear(model) == ("point", "padded_point", "wide")
    kinds = [type(model[name]) for name in ("point", "padded_point", "wide")]
    assert kinds == [Pointwise, Convolution, Convolution]
    assert convolutions_as_linear(model) == ()


def test_fewer_channels_on_request() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.Conv2d(16, 8, 3))
    x = torch.randn(2, 3, 12, 12)
    want = model(x)
    assert convolutions_as_linear(model, least_channels=3) == ("0", "1")
    torch.testing.assert_close(model(x), want)


def test_where_nothing_qualifies_the_reasons_are_told() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), Padded(16, 8, 3))
    with pytest.raises(UnsupportedError, match="0: 3 input channels; 1: it is a Padded"):
        convolutions_as_linear(model)
    assert convolutions_as_linear(nn.Sequential(nn.Linear(4, 4))) == ()


@pytest.mark.parametrize("memory_format", [CONTIGUOUS, LAST], ids=str)
def test_what_is_dense_becomes_a_convolution_again(memory_format: torch.memory_format) -> None:
    conv = whole(nn.Conv2d(16, 16, 3, 2, 1, dilation=2))
    model = nn.Sequential(conv, nn.ReLU(), conv, nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()
    model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert convolutions_as_linear(model) == ("0", "2", "4")
    assert model[0] is model[2]
    assert restore_convolutions(model) == ("0", "2", "4")
    assert model[0] is model[2]
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model[0].weight.is_contiguous(memory_format=memory_format)
    assert (model[0].stride, model[0].padding, model[0].dilation) == ((2, 2), (1, 1), (2, 2))
    assert not model[0].weight.requires_grad
    assert not model[0].training


def test_copies_and_state_travel() -> None:
    model, other = (nn.Sequential(nn.Conv2d(16, 8, 3)) for _ in range(2))
    for each in (model, other):
        convolutions_as_linear(each)
    other.load_state_dict(copy.deepcopy(model).state_dict())
    x = torch.randn(1, 16, 5, 5)
    assert torch.equal(other(x), model(x))
    assert repr(other[0]).startswith("Convolution(\n  kernel=(3, 3)")


def test_one_graph_when_compiled() -> None:
    conv = whole(nn.Conv2d(16, 8, 3, padding=1))
    layer = Convolution.from_conv(conv)
    x = integers(2, 16, 5, 6).to(memory_format=LAST)
    run = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(run(x), conv(x))


def test_pointwise_as_linear_leaves_larger_ones_alone() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 1))
    assert pointwise_as_linear(model) == ("1",)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: Convolution.from_conv(nn.Conv2d(8, 8, 3, groups=8)), "8 groups"),
        (lambda: Convolution.from_conv(nn.Conv2d(8, 8, 4, padding="same")), "even kernel"),
        (lambda: Convolution(nn.Linear(9, 1), 3), "windows of type int"),  # type: ignore[arg-type]
        (lambda: convolutions_as_linear(nn.Conv2d(4, 4, 3)), "a module that holds Conv2d"),
        (
            lambda: restore_convolutions(Convolution.from_conv(nn.Conv2d(4, 4, 3))),
            "Pointwise or Convolution layers",
        ),
        (
            lambda: Convolution.from_conv(nn.Conv2d(16, 4, 3))(torch.zeros(16, 5)),
            r"an image of shape \[16, 5\]",
        ),
        (
            lambda: Convolution.from_conv(nn.Conv2d(16, 4, 3))(torch.zeros(1, 16, 2, 5)),
            "windows of 3 in an image of 2 x 5",
        ),
        (
            lambda: Convolution(
                SparseLinear(NM.from_dense(torch.zeros(4, 36))), Windows((3, 3))
            ).to_conv(),
            "a SparseLinear to make a convolution of",
        ),
    ],
)
def test_what_does_not_fit_is_named(call: object, told: str) -> None:
    with pytest.raises((ArgumentError, FormatError), match=told):
        call()  # type: ignore[operator]
