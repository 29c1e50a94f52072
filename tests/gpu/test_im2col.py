"""Windows of images and convolutions on one H100 or H200: the same bits as operations of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hopsparse.errors import UnsupportedError
from hopsparse.formats import BSR, NM, NMPattern
from hopsparse.launch import kernel as launch_kernel
from hopsparse.nn import Convolution, SparseLinear
from hopsparse.ops._windows import Windows
from hopsparse.ops.im2col import cases, reference
from hopsparse.ops.im2col.device import run
from hopsparse.ops.im2col.op import gather, plan
from hopsparse.prune import magnitude

LAST = torch.channels_last
DTYPES = (torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn)


def pixels(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers without a zero, so that padding shows."""
    x = torch.randint(1, 100, shape, dtype=torch.uint8, device=device)
    x = x.to(dtype) if dtype.itemsize > 1 else x.view(dtype)
    return x.to(memory_format=LAST)


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def expected(x: Tensor, windows: Windows) -> Tensor:
    """By operations of torch on the CPU; 8-bit floats as the integers that have their bits."""
    x = x.cpu()
    if x.dtype == torch.float8_e4m3fn:
        return reference.im2col(x.view(torch.uint8), windows).view(x.dtype)
    return reference.im2col(x, windows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases.EDGE, ids=lambda case: case.name)
def test_every_bit_is_written(case: cases.Case, dtype: torch.dtype, device: torch.device) -> None:
    x = pixels(case.shape, dtype, device)
    assert plan(x, case.windows).name == "kernel"
    want = expected(x, case.windows)
    # What is handed out next was full of this.
    torch.full((want.numel() * want.element_size(),), -1, dtype=torch.int8, device=device)
    assert same(gather(x, case.windows).cpu(), want)


@pytest.mark.parametrize("case", cases.MODEL, ids=lambda case: case.name)
def test_the_convolutions_of_resnet(case: cases.Case, device: torch.device) -> None:
    x = pixels((4, *case.shape[1:]), torch.bfloat16, device)
    assert same(gather(x, case.windows).cpu(), expected(x, case.windows))


def test_slices_are_read_where_they_are(device: torch.device) -> None:
    x, windows = pixels((4, 48, 9, 10), torch.bfloat16, device), Windows((3, 3), (2, 1), (1, 1))
    for cut in (x[1:3, 8:24], x[::2, :, 1:7, 2:9], x[:, 4:7], x[:, :, ::2, ::3]):
        assert plan(cut, windows).name == "kernel"
        assert same(gather(cut, windows).cpu(), expected(cut, windows))
    assert plan(x.contiguous(), windows).name == "reference"
    assert same(gather(x.contiguous(), windows).cpu(), expected(x, windows))


def test_a_graph_replays_and_a_kernel_that_is_not_loaded_is_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, windows = pixels((2, 32, 7, 6), torch.bfloat16, device), Windows((3, 3), padding=(1, 1))
    gather(x, windows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        columns = gather(x, windows)
    x.copy_(x.flip(0) + 1)
    graph.replay()
    assert same(columns.cpu(), expected(x, windows))
    monkeypatch.setattr(launch_kernel, "_LOADED", {})
    other = pixels((3, 32, 7, 6), torch.bfloat16, device)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
            run(other, windows)
        other.add_(1)


def test_gradients_and_compiled_calls_run_operations_of_torch(device: torch.device) -> None:
    windows = Windows((3, 3), padding=(1, 1))
    x = torch.randn(2, 16, 5, 6, device=device).to(memory_format=LAST).requires_grad_()
    gather(x, windows).square().sum().backward()
    twin = x.detach().cpu().requires_grad_()
    gather(twin, windows).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), twin.grad)


@pytest.mark.parametrize("kind", ["dense", "2:4", "16x16", "32x32", "64x64"])
@pytest.mark.parametrize("stride", [1, 2])
def test_sparse_convolutions_are_exact(
    kind: str, stride: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    # Where dense runs, cuBLAS may add up parts that it has rounded to bfloat16.
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(matmul, "allow_bf16_reduced_precision_reduction", False)
    conv = nn.Conv2d(64, 128, 3, stride, 1).requires_grad_(False)
    conv.weight.copy_(torch.randint(-2, 3, conv.weight.shape))
    assert conv.bias is not None
    conv.bias.copy_(torch.randint(-3, 4, conv.bias.shape))
    bias = conv.bias.clone()
    layer = Convolution.from_conv(conv)
    assert isinstance(layer.linear, nn.Linear)
    weight = layer.linear.weight.bfloat16().clone()  # The layer goes to the GPU, its module too.
    if kind == "2:4":
        weight = magnitude(weight, NMPattern(2, 4))
        stored = NM.from_dense(weight)
    elif kind != "dense":
        side = int(kind.split("x")[0])
        kept = torch.rand(128 // side, 576 // side) < 0.25
        weight = weight * kept.repeat_interleave(side, 0).repeat_interleave(side, 1)
        stored = BSR.from_dense(weight, (side, side))
    if kind != "dense":
        layer.linear = SparseLinear(stored, conv.bias.bfloat16())
        layer.linear.act = "relu"
    layer = layer.to(device, torch.bfloat16).requires_grad_(False)
    x = torch.randint(-2, 3, (5, 64, 14, 11)).to(memory_format=LAST)
    taps = weight.view(128, 3, 3, 64).permute(0, 3, 1, 2).double()
    want = nn.functional.conv2d(x.double(), taps, bias.double(), stride, 1)
    want = (want if kind == "dense" else want.relu()).bfloat16()
    on_device = x.to(device, torch.bfloat16)
    y = layer(on_device)
    assert y.is_contiguous(memory_format=LAST)
    assert torch.equal(y.cpu(), want)
    layer.most_bytes = 1
    assert torch.equal(layer(on_device).cpu(), want)
    layer.most_bytes = None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(on_device)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured.cpu(), want)
