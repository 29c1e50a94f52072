"""What spmm_nm refuses or leaves to the dense product on a GPU, also after calls that passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, FormatError, UnsupportedError
from hopsparse.formats import NM, NMPattern
from hopsparse.measure.contest import Layer, Way, random_24
from hopsparse.measure.peers import CuBLAS
from hopsparse.nn import SparseLinear
from hopsparse.ops import spmm_nm
from hopsparse.ops.spmm_nm import op
from hopsparse.ops.spmm_nm.kernel import Config

CPU = torch.device("cpu")


@pytest.fixture
def called(device: torch.device) -> tuple[NM, Tensor]:
    """A weight that has passed every check once, and an x that fits."""
    w = NM.from_dense(torch.zeros(64, 64, device=device).half())
    x = torch.ones(5, 64, device=device).half()
    assert not spmm_nm(w, x).any()
    return w, x


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"act": "swish"}, "act='swish'"),
        ({"out_dtype": torch.int8}, "out_dtype=torch.int8"),
        ({"residual": torch.zeros(5, 64).half()}, "on cpu. Required: .* on cuda"),
        ({"bias": torch.zeros(64).half()}, "bias is torch.float16 on cpu"),
        ({"x": torch.ones(5, 64).half()}, "x is torch.float16 on cpu"),
        ({"config": "128x64"}, "config of type str"),
        ({"alpha": torch.ones(())}, "alpha of type Tensor"),
    ],
)
def test_what_means_nothing_is_refused(
    called: tuple[NM, Tensor], arguments: dict[str, Any], told: str
) -> None:
    w, x = called
    with pytest.raises(ArgumentError, match=told):
        spmm_nm(w, **{"x": x, **arguments})


@pytest.mark.parametrize(
    ("shape", "dtype", "told"),
    [
        ((5, 60), torch.float16, r"x of shape \[5, 60\]"),
        ((), torch.float16, r"x of shape \[\]"),
        ((5, 64), torch.bfloat16, "x is torch.bfloat16"),
    ],
)
def test_another_x_is_refused(
    called: tuple[NM, Tensor], shape: tuple[int, ...], dtype: torch.dtype, told: str
) -> None:
    w, x = called
    with pytest.raises(ArgumentError, match=told):
        spmm_nm(w, torch.ones(shape, dtype=dtype, device=x.device))


def test_broken_parts_are_refused_before_a_launch(called: tuple[NM, Tensor]) -> None:
    w, x = called
    for values, meta in ((w.values, w.meta[:, :0]), (w.values[:, :0], w.meta), (w.meta, w.meta)):
        with pytest.raises((FormatError, UnsupportedError)):
            spmm_nm(NM(w.shape, values, meta, NMPattern(2, 4)), x)
    torch.cuda.synchronize()


def test_a_matrix_that_is_not_2_4_is_refused(device: torch.device) -> None:
    for side in (16, 64):
        with pytest.raises(FormatError, match="row 0, group 0"):
            NM.from_dense(torch.ones(side, side, device=device).half())


def test_alpha_beyond_float32_is_infinite(called: tuple[NM, Tensor]) -> None:
    w, x = called
    assert spmm_nm(w, x, alpha=1e39).isnan().all()  # infinity times zero, as on the CPU


def test_a_tile_that_is_no_candidate_runs(device: torch.device) -> None:
    dense = random_24((70, 96), torch.float16, torch.Generator(device).manual_seed(0)).round()
    x = torch.ones(50, 96, device=device).half()
    y = spmm_nm(NM.from_dense(dense), x, config=Config(1, 1, 48, 1, 3))
    assert torch.equal(y, x @ dense.T)


def test_transforms_run_dense(device: torch.device) -> None:
    dense = random_24((64, 64), torch.float16, torch.Generator(device).manual_seed(0)).round()
    w, x = NM.from_dense(dense), torch.ones(3, 5, 64, device=device).half()
    expected = spmm_nm(w.to(CPU), x.cpu())
    for result in (
        torch.vmap(lambda x: spmm_nm(w, x))(x),
        torch.func.jvp(lambda x: spmm_nm(w, x), (x,), (x,))[1],
        torch.vmap(SparseLinear(w))(x),
    ):
        assert torch.equal(result.cpu(), expected)
    assert op.plan(w, x).name == "kernel"


def test_a_layer_that_was_slower_than_dense_elsewhere_is_not(device: torch.device) -> None:
    """W 3072 x 10240 in float16: at most the time of dense, or dense is what runs and is named."""
    ours = Way(
        "hopsparse",
        lambda weight, bias: SparseLinear(NM.from_dense(weight), bias),
        lambda product, x: product.plan(x).name,
    )
    layer = Layer.random((3072, 10240), torch.float16, [ours, Way.of(CuBLAS)])
    sparse, dense = layer.contest(3072, rounds=9).results
    assert sparse.plan == "dense" or sparse.timing.us <= dense.timing.us
