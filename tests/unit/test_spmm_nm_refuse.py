"""What spmm_nm refuses, and how: the same on every device, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hopsparse.errors import ArgumentError, FormatError, UnsupportedError
from hopsparse.formats import NM, NMPattern
from hopsparse.ops import spmm_nm
from hopsparse.ops.spmm_nm.cost import Problem
from hopsparse.ops.spmm_nm.device import Epilogue, launch_for
from hopsparse.ops.spmm_nm.kernel import Config, deepest
from hopsparse.ops.spmm_nm.plan import CANDIDATES

TILE = CANDIDATES[-1]


def weight(dtype: torch.dtype = torch.float16) -> NM:
    return NM.from_dense(torch.zeros(8, 16, dtype=dtype))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"act": "swish"}, "Required: one of relu, gelu, gelu_tanh, silu, swiglu, or None"),
        ({"act": torch.relu}, "act=<"),
        ({"act": "swiglu"}, "swiglu of 8 rows. Required: a multiple of 16 rows"),
        ({"out_dtype": torch.int8}, "out_dtype=torch.int8. Required: torch.float16, as x is"),
        ({"out_dtype": torch.bfloat16}, "out_dtype=torch.bfloat16"),
        ({"out_dtype": "float32"}, "out_dtype=float32"),
        ({"residual": torch.zeros(8).half()}, r"residual \[8\] of torch.float16"),
        ({"residual": torch.zeros(1, 8).half()}, r"Required: \[3, 8\] of torch.float16 on cpu"),
        ({"residual": torch.zeros(3, 8)}, r"residual \[3, 8\] of torch.float32 on cpu"),
        ({"residual": torch.zeros(3, 8).half(), "out_dtype": torch.float32}, "of torch.float32"),
        ({"residual": torch.zeros(3, 8, device="meta").half()}, "on meta. Required: .* on cpu"),
        ({"bias": torch.zeros(3).half()}, r"bias of shape \[3\]. Required: \[8\]"),
        ({"bias": torch.zeros(16).half()}, r"bias of shape \[16\]. Required: \[8\]"),
        ({"bias": torch.zeros(1, 8).half()}, r"bias of shape \[1, 8\]. Required: \[8\]"),
        ({"bias": [0.0] * 8}, "bias of type list. Required: a tensor"),
        ({"residual": 0}, "residual of type int. Required: a tensor"),
        ({"bias": torch.zeros(8)}, "bias is torch.float32 on cpu. Required: torch.float16"),
        ({"config": "128x64"}, "config of type str. Required: a Config"),
        ({"config": (2, 1, 64, 2, 6)}, "config of type tuple"),
        ({"alpha": torch.ones(())}, "alpha of type Tensor. Required: a number"),
        ({"alpha": None}, "alpha of type NoneType"),
    ],
)
def test_what_means_nothing_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told) as caught:
        spmm_nm(weight(), torch.ones(3, 16).half(), **arguments)
    assert caught.value.got.startswith("spmm_nm: ")
    assert caught.value.hint


@pytest.mark.parametrize("x", [None, [1.0] * 16, np.ones((3, 16), np.float16)])
def test_what_is_no_tensor_is_refused(x: Any) -> None:
    with pytest.raises(ArgumentError, match="spmm_nm: x of type .*. Required: a tensor"):
        spmm_nm(weight(), x)


def test_a_tile_and_any_number_are_taken() -> None:
    x = torch.ones(3, 16).half()
    for alpha in (2, 0.5, True, np.float32(2.0), np.int64(3), 1e39):
        assert not spmm_nm(weight(), x, alpha=alpha, bias=None, config=TILE).nan_to_num().any()


def test_index_words_without_columns_are_refused() -> None:
    """Values 32 x 16 with metadata of shape 32 x 0, x 64 x 8."""
    w = NM.from_dense(torch.zeros(32, 32).half())
    broken = NM((32, 32), w.values, torch.empty(32, 0, dtype=w.meta.dtype), NMPattern(2, 4))
    with pytest.raises(FormatError, match="part 'meta'"):
        spmm_nm(broken, torch.ones(64, 8).half())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ((0, 1, 64, 2, 2), "positive whole numbers"),
        ((2, 1, 64.0, 2, 2), "positive whole numbers"),
        (("2", 1, 64, 2, 2), "positive whole numbers"),
        ((5, 1, 64, 2, 2), "5 consumer warpgroups. Required: 1 to 4"),
        ((2, 1, 24, 2, 2), "steps of 16, up to 256. Try: tokens=16"),
        ((2, 1, 8, 2, 2), "Try: tokens=16"),
        ((2, 1, 272, 1, 2), "Try: tokens=256"),
        ((2, 1, 64, 2, 1), "a stage to fill while another is multiplied"),
        ((2, 1, 64, 2, 7), "260208 bytes .* Required: at most 232448. Try: stages=6"),
        ((4, 4, 256, 2, 2), "Try: a smaller tile"),
        ((2, 1, 64, 2, 2, 4, 4), "at most 8 blocks"),
        ((2, 1, 16, 2, 2, 4, 1), "parts of 8 tokens"),
        ((2, 1, 64, 2, 2, 1, 3), "parts .* of whole steps"),
    ],
)
def test_a_tile_that_no_block_can_work_on_is_refused(fields: Any, told: str) -> None:
    """One stage would wait for itself on the GPU for ever."""
    with pytest.raises(ArgumentError, match=told):
        Config(*fields)


@pytest.mark.parametrize("config", CANDIDATES, ids=lambda config: config.name)
def test_most_stages_are_as_many_as_fit(config: Config) -> None:
    assert config.most_stages >= config.stages == deepest(config).stages
    assert config.stages == min(8, config.most_stages)
    with pytest.raises(ArgumentError, match=f"Try: stages={config.most_stages}"):
        Config(
            config.warpgroups, config.panels, config.tokens, config.units, config.most_stages + 1
        )


@pytest.mark.parametrize("sizes", [(2**31, 64, 64), (1, 2**31, 64), (1, 64, 2**31)])
def test_sides_that_32_bits_do_not_count_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(UnsupportedError, match="side of 2147483648. Required: at most 2147475456"):
        launch_for(Problem(*sizes), torch.bfloat16, Epilogue(torch.bfloat16), 0)
