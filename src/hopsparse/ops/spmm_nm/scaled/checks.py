"""What is verified of spmm_nm_scaled: ways of numbers, every tile, scales, results in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ....formats.nm import NM
from ....formats.pattern import NMPattern
from ....formats.quantized import pack_nibbles
from ....measure.error import finish_bound
from ....verify import (
    Check,
    Expected,
    Trial,
    dense_weight,
    made_once,
    small_integers,
    wide_integers,
)
from ..kernel import Config, Numbers
from ..plan import eight_bit
from ..reference import apply_activation
from ..verified import CODES_OUT, EPILOGUE_8, RAGGED, WHOLE, tiles_of_eight_bit
from .op import Scaling, spmm_nm_scaled

_OP = "spmm_nm_scaled"
_Trials = Callable[[torch.device], Iterator[Trial]]
_E4M3 = torch.float8_e4m3fn
_FP8, _INT8 = "float8_e4m3fn", "int8"
_TWO_FOUR = NMPattern(2, 4)
_KINDS = {
    "int8": (torch.int8, Scaling(), Numbers(_INT8, _INT8, "bfloat16")),
    "e4m3-fast": (_E4M3, Scaling(sums="fast"), Numbers(_FP8, _FP8, "bfloat16")),
    "e4m3-promoted": (_E4M3, Scaling(), Numbers(_FP8, _FP8, "bfloat16", promoted=True)),
    "e4m3-grouped": (_E4M3, Scaling(), Numbers(_FP8, _FP8, "bfloat16", grouped=True)),
    "e4m3-int4-fast": (_E4M3, Scaling(sums="fast"), Numbers(_FP8, "int4", "bfloat16")),
    "e4m3-int4-promoted": (_E4M3, Scaling(), Numbers(_FP8, "int4", "bfloat16", promoted=True)),
}
# tokens, out, k: a tile; ragged on all sides; one token; rows that TMA cannot read as they are.
_SHAPES = (WHOLE, RAGGED, (1, 64, 128), (70, 70, 2068))


def checks() -> Iterator[Check]:
    """Every kind of numbers, by the tile that is chosen and by every tile."""
    for kind, (_, _, numbers) in _KINDS.items():
        for tokens, out, k in _SHAPES:
            trials = partial(_exact, kind, ((tokens, out, k),), None)
            # Ragged on all sides; x of 4 bits that is widened in the kernel, and before it.
            first = (tokens, out, k) in _SHAPES[numbers.x != "int4" : 2]
            yield _check(f"{tokens}x{out}x{k}", kind, trials, quick=True, first=first)
        for config in eight_bit(numbers):
            trials = partial(_exact, kind, (_SHAPES[1], _SHAPES[3]), config)
            first = config in tiles_of_eight_bit(numbers)
            yield _check(f"tile-{config.name}", kind, trials, first=first)
    for kind in ("int8", "e4m3-promoted", "e4m3-fast"):
        for act in ("none", "relu", "gelu", "silu"):
            trials, quick = partial(_epilogues, kind, act), act == "gelu"
            first = quick and kind == "int8"
            yield _check(f"act-{act}", kind, trials, quick=quick, first=first)
    for kind in ("int8", "e4m3-promoted"):
        yield _check("codes-out", kind, partial(_codes, kind), quick=True, first=True)
    yield _check("ends-of-int8", "int8", _ends, quick=True, first=True)


def _check(
    case: str, kind: str, trials: _Trials, quick: bool = False, first: bool = False
) -> Check:
    only = "tile-" in case
    return Check(_OP, case, kind, "nm-2:4", trials, quick=quick, only_gpu=only, first=first)


def _inputs(kind: str, tokens: int, k: int) -> tuple[Tensor, Tensor]:
    """X as the operator reads it, and what it stands for."""
    numbers = _KINDS[kind][2]
    if numbers.x != "int4":
        x = small_integers((tokens, k), getattr(torch, numbers.x))
        return x, x.double()
    codes = torch.randint(-8, 8, (tokens, k), dtype=torch.int8)
    return pack_nibbles(codes).view(torch.int8).view(tokens, -1), codes.double()


def _exact(
    kind: str,
    shapes: tuple[tuple[int, int, int], ...],
    config: Config | None,
    device: torch.device,
) -> Iterator[Trial]:
    """Scales that are powers of two, so that float32 rounds nothing."""
    for shape in shapes:
        w, x, how, product = _of_integers(kind, shape, device)
        run = partial(spmm_nm_scaled, w, x, how, config=config)
        for dtype in (torch.float32, torch.bfloat16):
            value = product.to(dtype).double()
            yield Trial(partial(run, out_dtype=dtype), [Expected(value, dtype)])


@made_once
def _of_integers(
    kind: str, shape: tuple[int, int, int], device: torch.device
) -> tuple[NM, Tensor, Scaling, Tensor]:
    """w, x, their scales, and y in float64."""
    (tokens, out, k), (dtype, scaling, numbers) = shape, _KINDS[kind]
    dense = dense_weight((out, k), _TWO_FOUR, dtype, 2).to(device)
    x, right = (each.to(device) for each in _inputs(kind, tokens, k))
    wide = dense.double()
    if numbers.grouped:
        scale = (2.0 ** torch.randint(-1, 2, (out, -(-k // 128)))).to(device)
        wide = wide * scale.repeat_interleave(128, 1)[:, :k]
    else:
        scale = (2.0 ** torch.randint(-1, 2, (out, 1))).to(device)
        wide = wide * scale
    of_x = (2.0 ** torch.randint(-1, 2, (tokens, 1))).to(device)
    product = wide_integers(right, wide) * of_x.double()
    return NM.from_dense(dense), x, replace(scaling, w=scale, x=of_x), product


def _epilogues(kind: str, act: str, device: torch.device) -> Iterator[Trial]:
    tokens, out, k = EPILOGUE_8
    dtype, scaling, _ = _KINDS[kind]
    dense, (x, right) = dense_weight((out, k), _TWO_FOUR, dtype, 2), _inputs(kind, tokens, k)
    of_w, of_x = torch.rand(out) + 0.5, torch.rand(tokens, 1) / 16
    scaled = wide_integers(right, dense) * of_x.double() * of_w.double()
    how = replace(scaling, w=of_w.to(device), x=of_x.to(device))
    for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        bias, residual = torch.randn(out).to(out_dtype), torch.randn(tokens, out).to(out_dtype)
        value = apply_activation(scaled + bias.double(), act) + residual.double()
        size = scaled.abs() + bias.double().abs()
        slack = finish_bound(size, value, residual, out_dtype)
        run = partial(
            spmm_nm_scaled,
            NM.from_dense(dense.to(device)),
            x.to(device),
            how,
            bias=bias.to(device),
            act=None if act == "none" else act,
            residual=residual.to(device),
            out_dtype=out_dtype,
        )
        yield Trial(run, [Expected(value, out_dtype, slack)])


def _codes(kind: str, device: torch.device) -> Iterator[Trial]:
    """Results in 8 bits: the nearest code, halves to even."""
    (tokens, out, k), (dtype, scaling, _) = CODES_OUT, _KINDS[kind]
    dense, (x, right) = dense_weight((out, k), _TWO_FOUR, dtype, 2), _inputs(kind, tokens, k)
    for step in (0.25, 1.0, 64.0):
        value = wide_integers(right, dense) / step
        if dtype == torch.int8:
            value = value.round().clamp(-127, 127)
        else:
            value = value.clamp(-448, 448).to(torch.float32).to(_E4M3).double()
        run = partial(
            spmm_nm_scaled, NM.from_dense(dense.to(device)), x.to(device), out_dtype=dtype
        )
        yield Trial(partial(run, replace(scaling, out=step)), [Expected(value, dtype)])


def _ends(device: torch.device) -> Iterator[Trial]:
    """The largest sum that rows of 65536 codes can have: 2^29, which float32 would round."""
    dense = torch.zeros(64, 65536, dtype=torch.int8)
    dense.view(64, -1, 4)[..., 1:3] = -128
    x = torch.full((3, 65536), -128, dtype=torch.int8)
    x[1] = 127
    value = x.double() @ dense.double().T
    run = partial(spmm_nm_scaled, NM.from_dense(dense.to(device)), x.to(device))
    yield Trial(partial(run, out_dtype=torch.int32), [Expected(value, torch.int32)])
