"""The packing kernels give what `NM.from_dense` gives on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, FormatError, UnsupportedError
from hopsparse.formats import NM, NMPattern
from hopsparse.ops import pack_nm
from hopsparse.ops.pack_nm import cases
from hopsparse.ops.pack_nm.op import empty_packed, enqueue, reads_vectors
from hopsparse.ops.pack_nm.plan import PackConfig, Select
from hopsparse.prune import magnitude
from tests.helpers.matrices import bits
from tests.helpers.two_four import assert_same_bits, two_four

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
TWO_FOUR = NMPattern(2, 4)


def poisoned(dense: Tensor) -> NM:
    packed = empty_packed(dense)
    packed.values.view(torch.uint8).fill_(0xA5)
    packed.meta.fill_(-1)
    return packed


def untouched(device: torch.device) -> Tensor:
    return torch.full((), -1, dtype=torch.int64, device=device)


def packed_with(config: PackConfig, dense: Tensor) -> NM:
    packed, refused = poisoned(dense), untouched(dense.device)
    enqueue(config, dense, packed, refused)
    assert int(refused) == -1
    return packed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases.SMOKE + cases.EDGE, ids=lambda case: case.name)
def test_every_kernel_writes_every_bit(
    case: cases.Case, dtype: torch.dtype, device: torch.device
) -> None:
    dense = two_four(case.rows, case.cols, dtype)
    want, on_device = NM.from_dense(dense), dense.to(device)
    assert_same_bits(pack_nm(on_device), want)
    assert_same_bits(packed_with(PackConfig(vector=False, units=1), on_device), want)
    if reads_vectors(on_device):
        for units in (1, 2, 4):
            assert_same_bits(packed_with(PackConfig(units=units), on_device), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "layout", ["transposed", "every other", "wide rows", "inside", "odd rows", "expanded"]
)
def test_strides_do_not_matter(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    source = bits(two_four(140, 400, dtype)).to(device)
    # What lies around the matrix is not zero, so a read too far shows.
    frame = torch.ones(400, 1200, dtype=source.dtype, device=device)
    dense = {
        "transposed": lambda: frame[:, :140].copy_(source.T).T,
        "every other": lambda: frame[:140, 1:801:2].copy_(source),
        "wide rows": lambda: frame[:140, :393].copy_(source[:, :393]),
        "inside": lambda: frame[3:143, 16:416].copy_(source),
        "odd rows": lambda: frame.flatten()[: 140 * 399].view(140, 399).copy_(source[:, :399]),
        "expanded": lambda: source[:1].expand(100, 400),
    }[layout]()
    dense = dense.view(dtype)
    assert reads_vectors(dense) == (layout in ("wide rows", "inside", "expanded"))
    assert_same_bits(pack_nm(dense), NM.from_dense(dense.cpu()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", cases.SMOKE + cases.EDGE, ids=lambda case: case.name)
def test_selects_as_magnitude_does(
    case: cases.Case, dtype: torch.dtype, device: torch.device
) -> None:
    ties = torch.randint(-2, 3, (case.rows, case.cols)).to(dtype)
    ties = torch.where((ties == 0) & (torch.rand(ties.shape) < 0.5), -0.0, ties)
    smallest = torch.finfo(dtype).smallest_normal
    tiny = (torch.randn(case.rows, case.cols) * smallest / 2).to(dtype)  # denormals and others
    for dense in (ties, tiny, torch.randn(case.rows, case.cols).to(dtype)):
        want = NM.from_dense(magnitude(dense, TWO_FOUR))
        on_device = dense.to(device)
        assert_same_bits(pack_nm(on_device, select="magnitude"), want)
        assert_same_bits(packed_with(PackConfig("magnitude", False, 1), on_device), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("places", [[(0, 0)], [(77, 131), (77, 7), (130, 0)], [(139, 399)]])
def test_the_first_full_group_is_named(
    places: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> None:
    dense = two_four(140, 400, dtype)
    for row, column in places:
        start = column // 4 * 4
        dense[row, start : start + 4] = torch.tensor([1.0, -2.0, 4.0, 0.0]).to(dtype)
    for matrix in (dense, dense.T.contiguous().T):
        with pytest.raises(FormatError) as want:
            NM.from_dense(matrix)
        with pytest.raises(FormatError) as got:
            pack_nm(matrix.to(device))
        assert str(got.value) == str(want.value)


def test_a_dense_matrix_is_refused_at_its_first_group(device: torch.device) -> None:
    with pytest.raises(FormatError, match=r"row 0, group 0 \(columns 0 to 3\) holds 4"):
        pack_nm(torch.ones(2048, 2048, dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_magnitudes_that_cannot_be_compared_are_named(
    value: float, dtype: torch.dtype, device: torch.device
) -> None:
    dense = torch.randn(140, 400).to(dtype)
    dense[77, 131], dense[77, 134], dense[130, 2] = value, float("inf"), value
    with pytest.raises(ArgumentError) as want:
        magnitude(dense, TWO_FOUR)
    with pytest.raises(ArgumentError) as got:
        pack_nm(dense.to(device), select="magnitude")
    assert str(got.value) == str(want.value)


@pytest.mark.parametrize("select", ["check", "magnitude"])
def test_runs_do_not_differ(select: Select, device: torch.device) -> None:
    dense = magnitude(torch.randn(1000, 1000).bfloat16(), TWO_FOUR).to(device)
    first = pack_nm(dense, select=select)
    for _ in range(5):
        assert_same_bits(pack_nm(dense, select=select), first)


def test_more_panels_than_a_grid_is_high(device: torch.device) -> None:
    rows = 64 * 65_535 + 70
    dense = torch.zeros(rows, 4, dtype=torch.bfloat16, device=device)
    dense[:, 1] = torch.arange(rows, device=device).remainder(97)
    assert_same_bits(pack_nm(dense), NM.from_dense(dense))


def test_runs_on_the_stream_of_torch(device: torch.device) -> None:
    dense = magnitude(torch.randn(2048, 2048).bfloat16(), TWO_FOUR).to(device)
    want = pack_nm(dense)
    target, slow = torch.zeros_like(dense), torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(20):
            slow = slow @ slow
        target.copy_(dense)  # late: any other stream still sees zeros
        got = pack_nm(target)
    assert_same_bits(got, want)


def test_a_capture_is_refused_and_goes_on(device: torch.device) -> None:
    dense = torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
    pack_nm(dense)
    doubled = dense + 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
            pack_nm(dense)
        after = dense + 1
    after.zero_()
    graph.replay()
    assert torch.equal(after, doubled)


def test_the_kernel_alone_can_be_captured(device: torch.device) -> None:
    dense = two_four(130, 200, torch.bfloat16).to(device)
    packed, refused, config = poisoned(dense), untouched(device), PackConfig()
    enqueue(config, dense, packed, refused)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue(config, dense, packed, refused)
    other = two_four(130, 200, torch.bfloat16, seed=1)
    dense.copy_(other)
    graph.replay()
    assert_same_bits(packed, NM.from_dense(other))
    assert int(refused) == -1


@pytest.mark.parametrize(
    ("pattern", "dtype"), [("4:6", torch.bfloat16), ("1:4", torch.float16), ("2:4", torch.float32)]
)
def test_what_has_no_kernel_runs_the_reference(
    pattern: str, dtype: torch.dtype, device: torch.device
) -> None:
    chosen = NMPattern(*map(int, pattern.split(":")))
    dense = magnitude(torch.randn(70, 96), chosen).to(dtype)
    packed = pack_nm(dense.to(device), pattern)
    assert packed.device == device
    assert_same_bits(packed, NM.from_dense(dense, pattern))
