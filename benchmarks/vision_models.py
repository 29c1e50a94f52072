"""ViT and ResNet as their papers have them, random weights, and what is made sparse of them.

Names and shapes of ViT-L/16 (Dosovitskiy et al., arXiv:2010.11929) and of ResNet-50 with the stride
in the 3x3 convolution (as torchvision's). What is element by element and lies between two products
is one function, `join`, which every variant may compile: then no variant gains by a fusion that
another could have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hopsparse.formats import Form, NMPattern, parse_form
from hopsparse.models.vision import replace_layers
from hopsparse.nn import (
    Convolution,
    Pointwise,
    SparseLinear,
    convolutions_as_linear,
    fold_batch_norms,
    plus_residual,
    restore_convolutions,
)
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix, store_matrix

Function = Callable[..., Any]
Compile = Callable[[Function], Function]


@dataclass(frozen=True)
class VitSizes:
    """Sizes of a vision transformer; the defaults are ViT-L/16."""

    width: int = 1024
    depth: int = 24
    heads: int = 16
    hidden: int = 4096
    image: int = 224
    patch: int = 16
    classes: int = 1000


@dataclass(frozen=True)
class ResNetSizes:
    """Sizes of a ResNet of bottlenecks; the defaults are ResNet-50."""

    width: int = 64
    depths: tuple[int, ...] = (3, 4, 6, 3)
    image: int = 224
    classes: int = 1000


def add_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The sum, and its layer norm."""
    x = x + y
    return x, F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-6)


def norm_alone(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The layer norm of what was added before."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-6)


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    """The end of a bottleneck."""
    return (x + y).relu()


class VitBlock(nn.Module):
    """A block that leaves its last sum to the next one, where a norm follows."""

    join: Function

    def __init__(self, sizes: VitSizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.join = sizes.heads, add_norm
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, sizes.hidden), nn.Linear(sizes.hidden, width)
        self.act: nn.Module = nn.GELU()

    def forward(self, x: Tensor, pending: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [n, tokens, width], and what is still to be added to them."""
        x, y = self.join(x, pending, self.norm1.weight, self.norm1.bias)
        x, y = self.join(x, self.proj(self.attend(y)), self.norm2.weight, self.norm2.bias)
        return x, self.fc2(self.act(self.fc1(y)))

    def attend(self, y: Tensor) -> Tensor:
        """All tokens of an image to all of them."""
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class AddingVitBlock(VitBlock):
    """The same where products add to the stream themselves, so that `join` is a norm alone."""

    def forward(self, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Tokens, and nothing that is still to be added."""
        if pending is not None:
            x = x + pending
        y = self.join(x, self.norm1.weight, self.norm1.bias)
        x = plus_residual(self.proj, self.attend(y), x)  # type: ignore[arg-type]
        y = self.join(x, self.norm2.weight, self.norm2.bias)
        return plus_residual(self.fc2, self.fc1(y), x), None  # type: ignore[arg-type]


class Vit(nn.Module):
    """Images [n, 3, side, side] to scores [n, classes]."""

    def __init__(self, sizes: VitSizes = VitSizes()) -> None:
        super().__init__()
        tokens = (sizes.image // sizes.patch) ** 2 + 1
        self.stem = nn.Conv2d(3, sizes.width, sizes.patch, sizes.patch)
        self.first = nn.Parameter(torch.randn(1, 1, sizes.width))
        self.positions = nn.Parameter(torch.randn(1, tokens, sizes.width))
        self.blocks = nn.ModuleList(VitBlock(sizes) for _ in range(sizes.depth))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of images."""
        x = self.stem(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1)
        pending = self.positions.expand(len(x), -1, -1)
        for block in self.blocks:
            x, pending = block(x, pending)
        x = x[:, 0] if pending is None else x[:, 0] + pending[:, 0]
        scores: Tensor = self.head(self.norm(x))
        return scores


class Bottleneck(nn.Module):
    """Narrow, 3x3, widen, add."""

    join: Function

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu1: nn.Module = nn.ReLU()
        self.relu2: nn.Module = nn.ReLU()
        self.join = add_relu
        self.short: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            conv = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] to [n, 4 width, h / stride, w / stride]."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)))
        result: Tensor = self.join(self.bn3(self.conv3(y)), self.short(x))
        return result


class Stem(nn.Module):
    """A quarter of the side; no nn.Sequential, because torch compiles none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, h, w] to [n, width, h / 4, w / 4]."""
        return F.max_pool2d(self.bn(self.conv(x)).relu(), 3, 2, 1)


class ResNet(nn.Module):
    """Images [n, 3, side, side] to scores [n, classes]."""

    def __init__(self, sizes: ResNetSizes = ResNetSizes()) -> None:
        super().__init__()
        channels = sizes.width
        self.stem = Stem(channels)
        blocks = []
        for stage, depth in enumerate(sizes.depths):
            width = sizes.width << stage
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Bottleneck(channels, width, stride))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, sizes.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of images."""
        scores: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return scores


def resnet(sizes: ResNetSizes) -> ResNet:
    """In evaluation, statistics that are not those a norm starts with, folded, channels-last."""
    model = ResNet(sizes)
    for norm in (each for each in model.modules() if isinstance(each, nn.BatchNorm2d)):
        # The last norm of a bottleneck is small: sums of many blocks stay in range.
        last = norm.num_features > 64 and norm.num_features >= 4 * sizes.width
        nn.init.uniform_(norm.weight, 0.1, 0.3) if last else nn.init.uniform_(norm.weight, 0.8, 1.2)
        nn.init.uniform_(norm.bias, -0.1, 0.1)
        norm.running_mean.uniform_(-0.1, 0.1)
        norm.running_var.uniform_(0.5, 1.5)
    model = model.eval().requires_grad_(False)
    fold_batch_norms(model)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def sparse_layer(linear: nn.Linear, form: Form) -> SparseLinear:
    """The layer pruned by magnitude and stored as its form says."""
    assert form.pattern is not None
    weight = magnitude(linear.weight.detach(), form.pattern)
    coded = form.scheme is not None
    matrix = quantize_matrix(weight, form) if coded else store_matrix(weight, form.pattern)
    return SparseLinear(matrix, linear.bias).eval()


def sparse_vit(dense: Vit, text: str, compile_: Compile) -> Vit:
    """All linear layers of all blocks in a form; GELU belongs to the layer ahead of it.

    Kernels of 2:4 add to the stream themselves.

    Args:
        dense: The model.
        text: The form.
        compile_: For what lies between two products.
    """
    model, form = copy.deepcopy(dense), parse_form(text)
    replace_layers(model.blocks, lambda _, linear: sparse_layer(linear, form))
    adds = isinstance(form.pattern, NMPattern)
    join = compile_(norm_alone if adds else add_norm)
    for block in model.blocks:
        assert isinstance(block, VitBlock)
        assert isinstance(block.fc1, SparseLinear)
        block.fc1.act, block.act, block.join = "gelu", nn.Identity(), join
        if adds:
            block.__class__ = AddingVitBlock
    return model


def sparse_resnet(dense: ResNet, text: str, join: Function, three: str) -> ResNet:
    """All convolutions of all bottlenecks in a form; ReLU belongs to the layer ahead of it.

    Args:
        dense: Folded.
        text: The form.
        join: The end of a bottleneck.
        three: `sparse`, or `dense`: 3x3 convolutions stay what they are.
    """
    model, form = copy.deepcopy(dense), parse_form(text)
    convolutions_as_linear(model.blocks)

    def made(name: str, linear: nn.Linear) -> SparseLinear | None:
        stays = three == "dense" and name.endswith("conv2.linear")
        return None if stays else sparse_layer(linear, form)

    replace_layers(model.blocks, made)
    restore_convolutions(model.blocks)
    for block in model.blocks:
        assert isinstance(block, Bottleneck)
        block.join = join
        for conv, relu in (("conv1", "relu1"), ("conv2", "relu2")):
            layer = getattr(block, conv)
            if isinstance(layer, Pointwise | Convolution):
                layer.linear.act = "relu"  # type: ignore[assignment]
                setattr(block, relu, nn.Identity())
    return model


def exact(model: nn.Module) -> nn.Module:
    """The same numbers in float32 and dense layers: what a variant should compute."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, SparseLinear):
                weight, act = child.to_dense().float(), child.act
                linear = nn.Linear(child.in_features, child.out_features, child.bias is not None)
                linear.weight = nn.Parameter(weight, requires_grad=False)
                if child.bias is not None:
                    linear.bias = nn.Parameter(child.bias.detach().float(), requires_grad=False)
                after = {"gelu": nn.GELU(), "relu": nn.ReLU()}.get(act or "", nn.Identity())
                setattr(module, name, nn.Sequential(linear, after))
    for module in model.modules():
        module._compiled_call_impl = None  # Its copy would compile in float32.
        if isinstance(module, VitBlock):
            module.join, module.__class__ = add_norm, VitBlock
        if isinstance(module, Bottleneck):
            module.join = add_relu
    return model.float()
