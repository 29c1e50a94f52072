"""What is verified of layers: `SparseLinear` of every format and dtype, and of 8-bit codes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ..formats import BSR, FORMATS, BlockPattern, NMPattern, Pattern, SparseMatrix, Unstructured
from ..quant import quantize_matrix
from ..verify import Check, Trial, dense_weight, small_integers
from ..verify.products import bounded_trial, exact_trial
from .sparse_linear import SparseLinear

_OP = "SparseLinear"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SHAPES = ((64, 64), (70, 52), (129, 260))
_TWO_FOUR = NMPattern(2, 4)
_PATTERNS: dict[str, Pattern] = {
    "nm": _TWO_FOUR,
    "bsr24": _TWO_FOUR,
    "bsr": BlockPattern(16, 16, 0.5),
}


def checks() -> Iterator[Check]:
    """Every format, dtype and shape; then codes of int8."""
    for fmt in FORMATS:
        for dtype in _DTYPES:
            name = str(dtype).removeprefix("torch.")
            for shape in _SHAPES:
                # Of the others a layer may multiply by a decoded weight where that is faster.
                kernel = fmt == "nm" and dtype.itemsize == 2
                trials = partial(_layer, fmt, dtype, shape)
                case = f"{shape[0]}x{shape[1]}"
                quick, first = dtype != torch.float16, shape == _SHAPES[0]
                yield Check(_OP, case, name, fmt, trials, kernel, quick=quick, first=first)
    yield Check(_OP, "int8", "bfloat16", "nm-2:4", _codes, quick=True, first=True)


def _layer(
    fmt: str, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> Iterator[Trial]:
    pattern = _PATTERNS.get(fmt, Unstructured(0.7))
    dense = dense_weight(shape, pattern, dtype)
    x = small_integers((9, shape[1]), dtype).to(device)
    yield exact_trial(_run(_stored(fmt, dense).to(device)), x, dense.to(device))
    dense = (dense * torch.rand(dense.shape)).to(dtype)
    x = torch.randn(x.shape).to(device, dtype)
    yield bounded_trial(_run(_stored(fmt, dense).to(device)), x, dense.to(device))


def _stored(fmt: str, dense: Tensor) -> SparseMatrix:
    if fmt == "nm":
        return FORMATS["nm"].from_dense(dense, _TWO_FOUR)  # type: ignore[call-arg]
    return BSR.from_dense(dense, (16, 16)) if fmt == "bsr" else FORMATS[fmt].from_dense(dense)


def _run(w: SparseMatrix) -> partial[Tensor]:
    return partial(_forward, SparseLinear(w))


def _forward(layer: SparseLinear, x: Tensor, bias: Tensor | None = None) -> Tensor:
    assert bias is None
    with torch.no_grad():
        y: Tensor = layer(x)
    return y


def _codes(device: torch.device) -> Iterator[Trial]:
    """Rows whose largest magnitude is 127: scales are 1, and all that follows is exact."""
    dense = dense_weight((72, 96), _TWO_FOUR, torch.bfloat16, 100)
    dense[:, :4] = torch.tensor([127.0, 0, -3, 0])
    x = small_integers((17, 96), torch.bfloat16, 90)
    x[:, 5] = -127
    w = quantize_matrix(dense, "2:4+int8").to(device)
    yield exact_trial(_run(w), x.to(device), dense.to(device))
