"""im2col: the reference against conv2d in float64; the text of its kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hopsparse.errors import ArgumentError
from hopsparse.ops import im2col
from hopsparse.ops._windows import Windows
from hopsparse.ops.im2col import cases, plan
from hopsparse.ops.im2col.device import vector_of
from hopsparse.ops.im2col.op import gather
from hopsparse.ops.im2col.op import plan as plan_of
from hopsparse.plan.division import divisor
from tests.helpers.im2col_on_cpu import Run, compiled

LAST = torch.channels_last


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compiled(tmp_path_factory.mktemp("im2col"))


def numbered(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every entry is another, as far as the dtype goes, and none is zero."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(count) % (100 if dtype == torch.int8 else 250) + 1
    return numbers.view(shape).to(dtype)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("case", cases.EDGE, ids=lambda case: case.name)
def test_a_product_with_the_windows_is_the_convolution(
    case: cases.Case, memory_format: torch.memory_format
) -> None:
    w = case.windows
    x = torch.randn(case.shape, dtype=torch.float64).to(memory_format=memory_format)
    weight = torch.randn(5, case.shape[1], *w.kernel, dtype=torch.float64)
    want = F.conv2d(x, weight, None, w.stride, w.padding, w.dilation)
    columns = im2col(x, w.kernel, stride=w.stride, padding=w.padding, dilation=w.dilation)
    assert columns.is_contiguous()
    y = columns @ weight.permute(0, 2, 3, 1).flatten(1).T
    n, _, *places = want.shape
    assert list(w.places(*case.shape[2:])) == places
    torch.testing.assert_close(y.view(n, *places, 5).permute(0, 3, 1, 2), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("case", cases.EDGE, ids=lambda case: case.name)
def test_the_kernel_gives_the_same_bits(kernel: Run, case: cases.Case, dtype: torch.dtype) -> None:
    x = numbered(case.shape, dtype).to(memory_format=LAST)
    best, want = vector_of(x), gather(x, case.windows)
    size = x.element_size()
    assert best == max(v for v in plan.VECTORS if case.shape[1] * size % v == 0)
    for vector in (v for v in plan.VECTORS if best % v == 0):
        assert torch.equal(kernel(x, case.windows, vector), want)


@pytest.mark.parametrize(
    ("cut", "vector"),
    [
        ((slice(1, 3), slice(None), slice(1, 6), slice(2, 9)), 16),
        ((slice(None, None, 2), slice(8, 16), slice(None, None, 2), slice(None)), 16),
        ((slice(None), slice(4, 8), slice(None), slice(None)), 8),
        ((slice(None), slice(1, 4), slice(None), slice(None)), 2),
        ((slice(0, 1), slice(None), slice(3, 4), slice(None)), 16),
    ],
    ids=["inside", "every other", "half pieces", "odd channels", "one line"],
)
def test_slices_are_read_where_they_are(kernel: Run, cut: tuple[slice, ...], vector: int) -> None:
    x = numbered((4, 16, 8, 10), torch.bfloat16).to(memory_format=LAST)[cut]
    windows = Windows((3, 3), (1, 2), (1, 1))
    assert vector_of(x) == vector
    assert torch.equal(kernel(x, windows), gather(x, windows))


def test_channels_that_are_no_neighbours_have_no_vector() -> None:
    x = torch.zeros(2, 8, 4, 4)
    assert vector_of(x) == 0
    assert vector_of(x[:, :1]) == 4
    assert vector_of(x.to(memory_format=LAST)[:, ::2]) == 0


def test_division_by_multiplication() -> None:
    sizes = [*range(1, 70), 3136, 50176, 65535, 65536, 2**20 + 1, 2**30, 2**31 - 2, 2**31 - 1]
    for size in sizes:
        by = divisor(size)
        assert by.factor < 2**32
        near = {k * size + d for k in (0, 1, 2, 77, 2**31 // size) for d in (-1, 0, 1)}
        for n in (n for n in near | {2**31 - 1} if 0 <= n < 2**31):
            assert n * by.factor >> by.shift == n // size


def test_every_vector_of_every_row_has_one_thread() -> None:
    for vectors in (1, 7, 72, 144, 147, 288, 289, 576, 5000):
        share = plan.share_of(vectors)
        assert share.lanes * share.rows_at_once <= plan.THREADS
        assert share.lanes * (share.parts - 1) < vectors <= share.lanes * share.parts
        blocks, parts, _ = share.grid(1000)
        of_block = share.rows_at_once * plan.UNROLL
        assert parts == share.parts
        assert of_block * (blocks - 1) < 1000 <= of_block * blocks


def test_gradients_reach_the_images() -> None:
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    w = Windows((3, 2), (2, 1), (1, 1), (1, 2))
    assert torch.autograd.gradcheck(lambda x: gather(x, w), (x,))


def test_one_graph_when_compiled() -> None:
    x = torch.randn(2, 8, 5, 6).to(memory_format=LAST)
    run = torch.compile(lambda x: im2col(x, 3, padding=1), fullgraph=True, backend="eager")
    assert torch.equal(run(x), im2col(x, 3, padding=1))


def test_the_plan_says_why() -> None:
    x = torch.zeros(1, 8, 4, 4)
    told = plan_of(x, Windows((3, 3))).describe()
    assert told == "im2col runs reference: x is on the CPU"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: im2col(torch.zeros(3, 4, 4), 3), r"images \[3, 4, 4\]"),
        (lambda: im2col([1.0], 3), "images of type list"),
        (lambda: im2col(torch.zeros(1, 0, 4, 4), 3), "at least one channel"),
        (lambda: im2col(torch.zeros(1, 1, 4, 4), 0), r"kernel=\(0, 0\)"),
        (lambda: im2col(torch.zeros(1, 1, 4, 4), (3, 3, 3)), "two whole numbers"),
        (lambda: im2col(torch.zeros(1, 1, 4, 4), 3, padding=-1), r"padding=\(-1, -1\)"),
        (lambda: im2col(torch.zeros(1, 1, 2, 4), 3), "windows of 3 in an image of 2 x 4"),
        (lambda: im2col(torch.zeros(1, 1, 4, 4), 2, dilation=4), "windows of 5"),
        (lambda: plan.spec_for(3), "an im2col kernel for 3 bytes"),
    ],
)
def test_what_does_not_fit_is_named(call: object, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        call()  # type: ignore[operator]


def test_no_images_have_no_windows() -> None:
    assert im2col(torch.zeros(0, 4, 5, 5), 3).shape == (0, 36)
