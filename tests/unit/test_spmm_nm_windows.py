"""Products of 2:4 weights with windows: what the producer asks for is the matrix of windows."""

from __future__ import annotations

from math import ceil

import pytest
import torch

from hopsparse.errors import ArgumentError
from hopsparse.launch import check_im2col
from hopsparse.ops import Windows, im2col
from hopsparse.ops.spmm_nm.cost import Problem
from hopsparse.ops.spmm_nm.kernel import ARGS_BYTES
from hopsparse.ops.spmm_nm.plan import CANDIDATES
from hopsparse.ops.spmm_nm.windows import plan
from tests.helpers.windows_on_cpu import Fill, compiled, fetched

SQUARE = [
    Windows((3, 3), (1, 1), (1, 1)),
    Windows((3, 3), (2, 2), (1, 1)),
    Windows((3, 3)),
    Windows((5, 5), (1, 3), (2, 2)),
    Windows((3, 3), (2, 1), (2, 2), (2, 2)),
    Windows((1, 1), (2, 2)),
    Windows((2, 2), (2, 2)),
]


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Fill:
    return compiled(tmp_path_factory.mktemp("windows"))


@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize("windows", SQUARE, ids=str)
@pytest.mark.parametrize("channels", [64, 192])
def test_copies_of_all_stages_are_the_matrix_of_windows(
    fill: Fill, channels: int, windows: Windows, units: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, channels, 9, 7)
    images, rows = tuple(x.shape), 24
    problem = plan.problem_of(windows, images, 64)  # type: ignore[arg-type]
    columns = im2col(
        x,
        windows.kernel,
        stride=windows.stride,
        padding=windows.padding,
        dilation=windows.dilation,
    )
    assert columns.shape == (problem.tokens, problem.k)
    stages = ceil(problem.k / (64 * units))
    stages += stages % 2
    wide = columns.new_zeros(problem.tokens + rows, stages * units * 64)
    wide[: problem.tokens, : problem.k] = columns
    # The first, any in between, and one that ends behind the last window.
    for token in {0, 5, max(0, problem.tokens - 1), problem.tokens // 2}:
        for k in range(stages):
            at = {"stages": stages, "k": k, "token": token, "out": 0}
            copies = fill(windows, images, rows, **at, units=units, cluster_out=1)
            assert len(copies) == units
            for u, copy in enumerate(copies):
                assert (copy.to, copy.mask) == (u * 64 * 128, 0)
                first = (k * units + u) * 64
                want = wide[token : token + rows, first : first + 64]
                assert torch.equal(fetched(x, windows, copy, rows), want)


def test_a_cluster_shares_windows(fill: Fill) -> None:
    windows, x = Windows((3, 3), (1, 1), (1, 1)), torch.randn(2, 64, 6, 5)
    columns = im2col(x, 3, padding=1)
    at = {"stages": 10, "k": 4, "token": 13, "units": 1, "cluster_out": 2}
    for out in (0, 1):
        (copy,) = fill(windows, tuple(x.shape), 8, **at, out=out)
        assert (copy.to, copy.mask) == (out * 8 * 128, 0b11)
        token = 13 + 8 * out
        want = columns[token : token + 8, 4 * 64 : 5 * 64]
        assert torch.equal(fetched(x, windows, copy, 8), want)


@pytest.mark.parametrize(
    ("windows", "channels", "told"),
    [
        (Windows((3, 3)), 100, "100 channels are no multiple of 64"),
        (Windows((3, 1)), 64, "kernel differs along rows and columns"),
        (Windows((3, 3), padding=(1, 0)), 64, "padding differs"),
        (Windows((3, 3), (9, 1)), 64, "a stride of 9"),
        (Windows((3, 3), dilation=(90, 90)), 64, "windows of 181 with padding of 0 are too wide"),
        (Windows((3, 3), padding=(130, 130)), 64, "padding of 130 are too wide"),
        (Windows((1, 1), padding=(128, 128)), 64, "padding of 128 is too wide"),
        (Windows((3, 3), (2, 8), (1, 1)), 512, None),
    ],
)
def test_what_the_copy_engine_cannot_gather(
    windows: Windows, channels: int, told: str | None
) -> None:
    why = plan.why_not(windows, channels)
    assert why is None if told is None else why is not None and told in why


def test_the_kernel_is_that_of_spmm_nm_with_another_source_of_tokens() -> None:
    spec = plan.windows_spec(CANDIDATES[0], "bfloat16", "relu", False)
    assert spec.entry in spec.text
    assert "run<Config>(all.args, dynamic_smem)" in spec.text
    assert "spmm_nm_kernel" not in spec.text
    assert spec.text.count("fill_tokens<Config>") == 1
    assert spec.args_bytes == plan.WINDOW_ARGS_BYTES == ARGS_BYTES + 128
    names = [each.name for each in plan.window_specs()]
    assert len(set(names)) == len(names)


def test_the_product_that_it_is() -> None:
    images = (64, 256, 14, 14)
    assert plan.problem_of(Windows((3, 3), (2, 2), (1, 1)), images, 256) == Problem(3136, 256, 2304)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"corners": ((-129, 0), (0, 0))}, "first corner"),
        ({"corners": ((0, 0), (0, 128))}, "last corner"),
        ({"box": (64, 1025)}, "1024 windows"),
        ({"strides": (1, 9)}, "1 to 8"),
        ({"corners": ((0, 0), (-7, 0))}, "no window along x"),
    ],
)
def test_maps_that_the_driver_would_refuse(change: dict[str, object], told: str) -> None:
    known: dict[str, object] = {
        "sizes": (64, 7, 7, 2),
        "corners": ((-1, -1), (-1, -1)),
        "box": (64, 128),
        "strides": (1, 1),
    }
    check_im2col(**known)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=told):
        check_im2col(**(known | change))  # type: ignore[arg-type]
