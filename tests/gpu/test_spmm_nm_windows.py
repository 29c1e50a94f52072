"""Products of 2:4 weights with windows that the kernel gathers, on one H100 or H200."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hopsparse.errors import UnsupportedError
from hopsparse.formats import NM, NMPattern
from hopsparse.launch import kernel as launch_kernel
from hopsparse.nn import Convolution, SparseLinear
from hopsparse.ops import Windows, im2col
from hopsparse.ops.spmm_nm.op import run_kernel
from hopsparse.ops.spmm_nm.plan import CANDIDATES
from hopsparse.ops.spmm_nm.windows.device import run_windows
from hopsparse.ops.spmm_nm.windows.op import spmm_nm_windows, why_no_windows
from hopsparse.prune import magnitude

LAST = torch.channels_last
THREE = Windows((3, 3), padding=(1, 1))
SQUARE = [
    THREE,
    Windows((3, 3), (2, 2), (1, 1)),
    Windows((3, 3)),
    Windows((5, 5), (1, 3), (2, 2)),
    Windows((3, 3), (2, 1), (2, 2), (2, 2)),
    Windows((1, 1), (2, 2)),
    Windows((2, 2), (2, 2)),
    Windows((7, 7), (2, 2), (3, 3)),
]


def weight_of(out: int, k: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> NM:
    """2:4, small whole numbers."""
    torch.manual_seed(out + k)
    dense = torch.randint(-2, 3, (out, k)).to(dtype)
    return NM.from_dense(magnitude(dense, NMPattern(2, 4))).to(device)


def images(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Small whole numbers without a zero, so that padding shows."""
    torch.manual_seed(sum(shape))
    x = torch.randint(1, 4, shape) * (2 * torch.randint(0, 2, shape) - 1)
    return x.to(dtype).to(device).to(memory_format=LAST)


def expected(w: NM, x: Tensor, windows: Windows, bias: Tensor | None = None) -> Tensor:
    """In float64 on the CPU, where all of this is exact; rounded once."""
    columns = im2col(
        x.cpu().double(),
        windows.kernel,
        stride=windows.stride,
        padding=windows.padding,
        dilation=windows.dilation,
    )
    y = columns @ w.to_dense().cpu().double().T
    return (y if bias is None else y + bias.cpu().double()).to(x.dtype)


@pytest.mark.parametrize("windows", SQUARE, ids=str)
@pytest.mark.parametrize("channels", [64, 192])
def test_windows_of_every_kind_are_exact(
    channels: int, windows: Windows, device: torch.device
) -> None:
    x = images((3, channels, 19, 14), device)
    w = weight_of(72, windows.taps * channels, device)
    bias = torch.randint(-3, 4, (72,)).bfloat16().to(device)
    assert why_no_windows(w, x, windows) is None
    y = spmm_nm_windows(w, x, windows, bias)
    assert torch.equal(y.cpu(), expected(w, x, windows, bias))


@pytest.mark.parametrize("config", CANDIDATES, ids=lambda config: config.name)
@pytest.mark.parametrize("shape", [(5, 64, 13, 11), (1, 128, 3, 2)])
def test_every_tile_is_exact(shape: tuple[int, ...], config: object, device: torch.device) -> None:
    x, out = images(shape, device), 200
    w = weight_of(out, 9 * shape[1], device)
    y = run_windows(w, x, THREE, None, "relu", config)  # type: ignore[arg-type]
    assert torch.equal(y.cpu(), expected(w, x, THREE).relu())


@pytest.mark.parametrize(
    ("channels", "side", "stride"),
    [
        (64, 56, 1),
        (128, 28, 1),
        (256, 14, 1),
        (512, 7, 1),
        (128, 56, 2),
        (256, 28, 2),
        (512, 14, 2),
    ],
)
def test_the_convolutions_of_resnet_have_the_bits_of_the_matrix_of_windows(
    channels: int, side: int, stride: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, channels, side, side, device=device).bfloat16().to(memory_format=LAST)
    dense = magnitude(torch.randn(channels, 9 * channels).bfloat16(), NMPattern(2, 4))
    w, windows = NM.from_dense(dense).to(device), Windows((3, 3), (stride, stride), (1, 1))
    columns = im2col(x, 3, stride=stride, padding=1)
    want = run_kernel(w, columns, None, None, "relu")
    assert torch.equal(spmm_nm_windows(w, x, windows, None, "relu"), want)


def test_float16_and_slices_of_images(device: torch.device) -> None:
    x = images((4, 192, 12, 15), device, torch.float16)
    w = weight_of(64, 9 * 64, device, torch.float16)
    for cut in (x[:, :64], x[::2, 64:128, 1:9, 2:11], x[1:2, 128:, ::3, :]):
        assert why_no_windows(w, cut, THREE) is None
        assert torch.equal(spmm_nm_windows(w, cut, THREE).cpu(), expected(w, cut, THREE))
    told = why_no_windows(w, x[:, :64].contiguous(), THREE)
    assert told == "x is not channels-last, or its pixels do not start on 16 bytes"


def test_a_graph_replays_and_a_kernel_that_is_not_loaded_is_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = images((2, 64, 9, 9), device), weight_of(64, 9 * 64, device)
    spmm_nm_windows(w, x, THREE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = spmm_nm_windows(w, x, THREE)
    x.copy_(x.flip(0))
    y.zero_()
    graph.replay()
    assert torch.equal(y.cpu(), expected(w, x, THREE))
    monkeypatch.setattr(launch_kernel, "_LOADED", {})
    other = images((3, 64, 9, 9), device)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
            spmm_nm_windows(w, other, THREE)
        other.add_(1)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_layer_gathers_windows_inside_its_product(stride: int, device: torch.device) -> None:
    conv = nn.Conv2d(64, 128, 3, stride, 1).requires_grad_(False)
    layer = Convolution.from_conv(conv)
    w = weight_of(128, 9 * 64, device)
    layer.linear = SparseLinear(w, torch.randint(-3, 4, (128,)).bfloat16().to(device))
    layer.linear.act = "relu"
    layer = layer.to(device).requires_grad_(False)
    x = images((4, 64, 14, 11), device)
    want = layer(x)
    layer.implicit = True
    y = layer(x)
    assert torch.equal(y, want)
    assert y.is_contiguous(memory_format=LAST)
    calls: list[Tensor] = []
    handle = layer.linear.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0]))
    layer(x)
    handle.remove()
    # Who listens sees the matrix; otherwise there is none.
    assert [call.shape for call in calls] == [(y.numel() // 128, 9 * 64)]
    trained = x.clone(memory_format=torch.preserve_format).requires_grad_()
    layer(trained).sum().backward()
    assert trained.grad is not None
