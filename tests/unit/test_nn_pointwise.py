from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import hopsparse
from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.nn import Pointwise, SparseLinear, pointwise_as_linear, restore_convolutions
from hopsparse.prune import Recipe


def integers(*shape: int) -> Tensor:
    """Small whole numbers: every sum of products is exact in float32."""
    return torch.randint(-4, 5, shape).float()


def whole(conv: nn.Conv2d) -> nn.Conv2d:
    """The convolution with whole numbers as weights."""
    for parameter in conv.parameters():
        parameter.data = integers(*parameter.shape)
    return conv.requires_grad_(False)


class Padded(nn.Conv2d):
    """A subclass as real models have them: it pads for its kernel, so not at all for 1x1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, [self.kernel_size[0] // 2] * 4))


@pytest.mark.parametrize("stride", [1, 2, (3, 1)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 8, 7, 5), (1, 8, 1, 1)])
def test_same_values_and_layout_as_the_convolution(
    stride: int | tuple[int, int],
    bias: bool,
    memory_format: torch.memory_format,
    shape: tuple[int, ...],
) -> None:
    conv = whole(nn.Conv2d(8, 12, 1, stride=stride, bias=bias))
    x = integers(*shape).to(memory_format=memory_format)
    y = Pointwise.from_conv(conv)(x)
    assert torch.equal(y, conv(x))
    assert y.is_contiguous(memory_format=memory_format)


def test_image_without_a_batch() -> None:
    conv, x = whole(nn.Conv2d(8, 12, 1, stride=2)), integers(8, 5, 6)
    assert torch.equal(Pointwise.from_conv(conv)(x), conv(x))


def test_input_that_is_a_slice_of_another() -> None:
    conv, x = whole(nn.Conv2d(8, 12, 1)), integers(3, 16, 9, 9)[:, ::2, 1:, :4]
    y = Pointwise.from_conv(conv)(x)
    assert torch.equal(y, conv(x))
    y.view(3, -1)


def test_gradients_reach_the_weight() -> None:
    conv = nn.Conv2d(4, 2, 1)
    point = Pointwise.from_conv(conv)
    x = integers(1, 4, 3, 3)
    point(x).sum().backward()
    conv(x).sum().backward()
    assert isinstance(point.linear, nn.Linear)
    assert conv.weight.grad is not None
    assert torch.equal(point.linear.weight.grad, conv.weight.grad.flatten(1))


def test_only_what_qualifies_is_replaced() -> None:
    model = nn.ModuleDict(
        {
            "point": nn.Conv2d(8, 8, 1),
            "same": nn.Conv2d(8, 8, 1, padding="same"),
            "wide": nn.Conv2d(8, 8, 3),
            "groups": nn.Conv2d(8, 8, 1, groups=2),
            "padded": nn.Conv2d(8, 8, 1, padding=1),
            "subclass": Padded(8, 8, 1),
            "normed": parametrizations.weight_norm(nn.Conv2d(8, 8, 1)),
            "hooked": nn.Conv2d(8, 8, 1),
            "tied": nn.Conv2d(8, 8, 1),
            "tied_too": nn.Conv2d(8, 8, 1),
            "linear": nn.Linear(8, 8),
        }
    )
    model["hooked"].register_forward_hook(lambda *_: None)
    model["tied_too"].weight = model["tied"].weight
    before = dict(model.items())
    assert pointwise_as_linear(model) == ("point", "same")
    kept = set(before) - {"point", "same"}
    assert all(model[name] is before[name] for name in kept)
    # A second call finds nothing new, and says so without an error.
    assert pointwise_as_linear(model) == ()


def test_subclass_that_is_vouched_for() -> None:
    model = nn.Sequential(Padded(4, 8, 3, bias=False), Padded(8, 4, 1))
    x = integers(1, 4, 6, 6)
    for conv in model:
        whole(conv)
    expected = model(x)
    with pytest.raises(UnsupportedError, match=r"1: it is a Padded.*also=\(Class,\)"):
        pointwise_as_linear(model)
    assert pointwise_as_linear(model, also=(Padded,)) == ("1",)
    assert torch.equal(model(x), expected)


def test_convolution_in_two_places_stays_one_module() -> None:
    conv = whole(nn.Conv2d(8, 8, 1))
    model = nn.Sequential(conv, nn.ReLU(), conv)
    x = integers(1, 8, 2, 2)
    expected = model(x)
    assert pointwise_as_linear(model) == ("0", "2")
    assert model[0] is model[2]
    assert torch.equal(model(x), expected)
    assert restore_convolutions(model) == ("0", "2")
    assert model[0] is model[2]


def test_what_is_dense_becomes_a_convolution_again() -> None:
    model = nn.Sequential(
        whole(nn.Conv2d(8, 12, 1, stride=2, bias=False)), nn.ReLU(), whole(nn.Conv2d(12, 4, 1))
    ).eval()
    model[2].requires_grad_(True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = integers(1, 8, 6, 6)
    expected = model(x)
    pointwise_as_linear(model)
    assert restore_convolutions(model) == ("0", "2")
    assert {type(model[0]), type(model[2])} == {nn.Conv2d}
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(x), expected)
    assert (model[0].weight.requires_grad, model[2].weight.requires_grad) == (False, True)
    assert not model[0].training


def network() -> nn.Sequential:
    """A small network as EfficientNet and MobileNet have them: expand, depthwise, project."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, groups=32),
        nn.Conv2d(32, 16, 1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    ).eval()


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_pointwise_convolutions_are_pruned_like_linear_layers(method: str) -> None:
    model, images = network(), torch.randn(4, 3, 16, 16)
    names = pointwise_as_linear(model)
    reports = hopsparse.sparsify(model, Recipe("2:4", method=method, keep=("6.*",)), [images])
    assert [report.name for report in reports] == ["2.linear", "9"]
    assert {type(model[2].linear), type(model[9])} == {SparseLinear}
    assert reports[0].tokens == 4 * 7 * 7
    # What was kept dense goes back, and the result computes what its dense weights say.
    assert restore_convolutions(model) == names[1:] == ("6",)
    dense = network()
    dense.load_state_dict(_dense_state(model, dense), strict=True)
    torch.testing.assert_close(model(images), dense(images))


def _dense_state(model: nn.Module, like: nn.Module) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear):
            place = name.removesuffix(".linear") + ".weight"
            state[place] = module.to_dense().reshape(like.state_dict()[place].shape)
            if module.bias is not None:
                state[name + ".bias"] = module.bias.detach()
    return {key: state[key] for key in like.state_dict()}


def test_pruned_weights_have_the_pattern_along_channels() -> None:
    model = network()
    pointwise_as_linear(model)
    hopsparse.sparsify(model, Recipe("2:4", method="magnitude"))
    weight = model[2].linear.to_dense()
    assert (weight.view(32, 4, 4) != 0).sum(-1).max() == 2


def test_copies_and_state_travel() -> None:
    model = network()
    pointwise_as_linear(model)
    other = network()
    pointwise_as_linear(other)
    other.load_state_dict(copy.deepcopy(model).state_dict())
    x = torch.randn(1, 3, 9, 9)
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("model", [nn.Conv2d(4, 4, 1), "model"])
def test_models_that_cannot_be_changed_in_place(model: object) -> None:
    with pytest.raises(ArgumentError, match="a module that holds Conv2d"):
        pointwise_as_linear(model)  # type: ignore[arg-type]


def test_a_bare_pointwise_cannot_be_restored() -> None:
    with pytest.raises(ArgumentError, match="a module that holds Pointwise"):
        restore_convolutions(Pointwise.from_conv(nn.Conv2d(4, 4, 1)))


def test_wrong_kinds_are_named() -> None:
    with pytest.raises(ArgumentError, match="kernel 3x3"):
        Pointwise.from_conv(nn.Conv2d(4, 4, 3))
    with pytest.raises(ArgumentError, match=r"shape \[5, 8\]"):
        Pointwise.from_conv(nn.Conv2d(8, 4, 1))(torch.zeros(5, 8))
