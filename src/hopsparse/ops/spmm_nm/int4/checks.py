"""What is verified of spmm_nm_int4: groups and dtypes of x, every tile, epilogues."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ....formats.nm import NM
from ....formats.pattern import NMPattern
from ....formats.quantized import Quantized
from ....formats.scheme import parse_scheme
from ....measure.error import finish_bound
from ....verify import Check, Expected, Trial, dense_weight, made_once, small_integers
from ..kernel import ACTIVATIONS, Config
from ..plan import four_bit
from ..reference import apply_activation
from ..verified import CODES, EPILOGUE_4, HALVES, RAGGED, WHOLE, tiles_of_four_bit
from .op import spmm_nm_int4

_OP = "spmm_nm_int4"
_BF16, _F16, _E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# Scheme, dtype that w stands for, dtype of x.
_KINDS = {
    "int4:32/bfloat16": ("int4:32", _BF16, _BF16),
    "int4:64/bfloat16": ("int4:64", _BF16, _BF16),
    "int4:128/float16": ("int4:128", _F16, _F16),
    "int4:128/int8": ("int4:128/int8", _BF16, torch.int8),
    "int4:128/e4m3": ("int4:128/int8", _BF16, _E4M3),
}
_SHAPES = (WHOLE, RAGGED, (1, 64, 128), (70, 70, 2068))


def checks() -> Iterator[Check]:
    """Every kind of numbers, by the tile that is chosen and by every tile."""
    for kind in _KINDS:
        for shape in _SHAPES:
            name = "x".join(map(str, shape))
            trials = partial(_exact, kind, (shape,), None)
            yield _check(name, kind, trials, quick=True, first=shape == RAGGED)
        for act in ACTIVATIONS:
            trials, quick = partial(_epilogues, kind, act), act == "relu"
            first = quick and kind in ("int4:64/bfloat16", "int4:128/int8")
            yield _check(f"act-{act}", kind, trials, quick=quick, first=first)
    for kind, numbers in (("int4:64/bfloat16", HALVES), ("int4:128/int8", CODES)):
        for config in four_bit(numbers):
            trials = partial(_exact, kind, (_SHAPES[1], _SHAPES[3]), config)
            first = config in tiles_of_four_bit(numbers)
            yield _check(f"tile-{config.name}", kind, trials, first=first)


def _check(
    case: str,
    kind: str,
    trials: partial[Iterator[Trial]],
    quick: bool = False,
    first: bool = False,
) -> Check:
    only = "tile-" in case
    return Check(_OP, case, kind, "nm-2:4", trials, quick=quick, only_gpu=only, first=first)


def _weight(out: int, k: int, kind: str) -> Quantized:
    """All codes from -8 to 7; scales are powers of two, so that all is exact."""
    scheme, dtype, _ = _KINDS[kind]
    form = parse_scheme(scheme)
    codes = dense_weight((out, k), NMPattern(2, 4), torch.int8, 8).clamp(max=7)
    scales = 2.0 ** torch.randint(-1, 2, (out, -(-k // form.group)))
    return Quantized.of(NM.from_dense(codes), scales.to(_BF16), form, dtype)


def _dense(w: Quantized, k: int) -> torch.Tensor:
    """What w stands for in float64, of its codes and scales."""
    group = w.scheme.group
    scales = w.scales.double().repeat_interleave(group, 1)[:, :k]
    return w.codes().to_dense().double() * scales


def _exact(
    kind: str,
    shapes: tuple[tuple[int, int, int], ...],
    config: Config | None,
    device: torch.device,
) -> Iterator[Trial]:
    for shape in shapes:
        w, x, scale, right = _of_integers(kind, shape, device)
        run = partial(spmm_nm_int4, w, x, scale, config=config)
        for dtype in (torch.float32, _KINDS[kind][1]):
            value = right.to(dtype).double()
            yield Trial(partial(run, out_dtype=dtype), [Expected(value, dtype)])


@made_once
def _of_integers(
    kind: str, shape: tuple[int, int, int], device: torch.device
) -> tuple[Quantized, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """w, x, scales of x, and y in float64."""
    tokens, out, k = shape
    w, x = _weight(out, k, kind), small_integers((tokens, k), _KINDS[kind][2]).to(device)
    right, scale = x.double() @ _dense(w, k).to(device).T, None
    if x.dtype.itemsize == 1:
        scale = (2.0 ** torch.randint(-1, 2, (tokens, 1))).to(device)
        right = right * scale.double()
    return w.to(device), x, scale, right


def _epilogues(kind: str, act: str, device: torch.device) -> Iterator[Trial]:
    tokens, out, k = EPILOGUE_4
    w, x = _weight(out, k, kind), small_integers((tokens, k), _KINDS[kind][2])
    scale = torch.rand(tokens, 1) / 16 if x.dtype.itemsize == 1 else None
    product = x.double() @ _dense(w, k).T * (1 if scale is None else scale.double())
    for dtype in (_KINDS[kind][1], torch.float32):
        bias, residual = torch.randn(out).to(dtype), torch.randn(tokens, out).to(dtype)
        value = apply_activation(product + bias.double(), act) + residual.double()
        slack = finish_bound(product.abs() + bias.double().abs(), value, residual, dtype)
        run = partial(
            spmm_nm_int4,
            w.to(device),
            x.to(device),
            None if scale is None else scale.to(device),
            bias=bias.to(device),
            act=None if act == "none" else act,
            residual=residual.to(device),
            out_dtype=dtype,
        )
        yield Trial(run, [Expected(value, dtype, slack)])
