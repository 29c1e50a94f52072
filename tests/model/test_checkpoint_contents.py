"""Contents that the loaders look at, and modules that a model holds twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hopsparse.errors import CheckpointError
from hopsparse.formats import FORMATS, NM, NMPattern
from hopsparse.models._layers import check_contents
from hopsparse.models.load import load
from hopsparse.models.save import save
from hopsparse.nn import SparseLinear


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(64, 64)
        self.second = self.first


def test_a_layer_with_two_names(tmp_path: Path) -> None:
    model: Any = Twice()
    weight = model.first.get_parameter("weight").detach()
    weight.view(64, -1, 4)[..., 2:] = 0
    layer = SparseLinear(FORMATS["nm"].from_dense(weight), model.first.get_parameter("bias"))
    model.first = model.second = layer
    save(model, tmp_path / "out")
    again: Any = load(tmp_path / "out", into=Twice())
    assert again.first is again.second
    assert torch.equal(again.second.to_dense(), weight)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:6", "6:8", "3:10"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (65, 130), (7, 3), (200, 1000)])
def test_whole_matrices_pass_the_check_of_contents(
    pattern: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    n, m = map(int, pattern.split(":"))
    torch.manual_seed(0)
    weight = torch.randn(shape) * (torch.arange(shape[1]) % m < n)
    check_contents("w", NM.from_dense(weight.to(dtype), NMPattern(n, m)))


def test_another_pattern_is_noticed() -> None:
    weight = torch.randn(64, 64) * (torch.arange(64) % 4 < 2)
    packed = NM.from_dense(weight)
    other = NM(packed.shape, packed.values, packed.meta, NMPattern(1, 4))
    with pytest.raises(CheckpointError, match="^w: "):
        check_contents("w", other)
