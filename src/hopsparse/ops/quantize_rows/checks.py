"""What is verified of quantize_rows: codes of known steps, bits of the CPU, norms and gates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...formats.quantized import unpack_nibbles
from ...measure.error import gamma, gated_bound, rms_norm_bound
from ...verify import Check, Expected, Trial
from .cases import EDGE, Case
from .op import quantize_rows

_OP = "quantize_rows"
_E4M3 = torch.float8_e4m3fn
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CODES: dict[str, tuple[torch.dtype | str, float]] = {
    "int8": (torch.int8, 127.0),
    "e4m3": (_E4M3, 448.0),
    "int4": ("int4", 7.0),
}
# The quick set of a GPU: rows of a block, a warp and the largest block, and those read again.
_FIRST = ("short-block", "warp", "large-block", "long-odd")
_BEHIND = ("norm", "norm-residual", "halves", "interleaved")


def checks() -> Iterator[Check]:
    """Every case, dtype of x and of codes; and what comes before the rounding."""
    for case in EDGE:
        for dtype in _DTYPES:
            for kind in _CODES:
                name = f"{str(dtype).removeprefix('torch.')}-{kind}"
                quick = dtype == torch.bfloat16
                trials = partial(_steps, case, dtype, kind)
                first = case.name in (_FIRST if name == "bfloat16-e4m3" else _FIRST[:1])
                yield Check(_OP, case.name, name, "", trials, quick=quick, first=first)
                for what in _BEHIND:
                    trials = partial(_behind, case, what, dtype, kind)
                    few = quick and kind == "e4m3"
                    first = few and case.name == _FIRST[0]
                    called = f"{case.name}-{what}"
                    yield Check(_OP, called, name, "", trials, quick=few, first=first)


def _sizes(case: Case, kind: str) -> tuple[int, int]:
    return case.rows, case.k + case.k % 2 if kind == "int4" else case.k


def _steps(case: Case, dtype: torch.dtype, kind: str, device: torch.device) -> Iterator[Trial]:
    """Rows of a known scale, a power of two: ties go to even, and codes are what was put in."""
    codes, largest = _CODES[kind]
    rows, k = _sizes(case, kind)
    if kind == "e4m3":
        every = torch.arange(256, dtype=torch.uint8).view(_E4M3).double()
        every = every[every.isfinite()]
        steps = every[torch.randint(0, len(every), (rows, k))]
        wanted = steps.clone()
    else:
        steps = torch.randint(-int(2 * largest), int(2 * largest) + 1, (rows, k)).double() / 2
        wanted = steps.round()
    steps[:, 0] = wanted[:, 0] = largest
    scale = 2.0 ** torch.randint(-6, 3, (rows, 1)).double()
    x = (steps * scale).to(dtype)
    # Halves of 64 and more have 8 bits behind the first, one more than bfloat16.
    exact = x.double() == steps * scale
    wanted = torch.where(exact, wanted, (x.double() / scale).round())
    scales = Expected(scale, torch.float32, name="scales")
    yield Trial(partial(_unpacked, x.to(device), codes), [_codes(wanted, kind), scales])
    static = torch.tensor([0.25])
    steps = (x.double() / 0.25).clamp(-1e30, 1e30)
    if kind != "e4m3":
        clipped = steps.round().clamp(-8 if kind == "int4" else -127, largest)
        scales = Expected(torch.full((rows, 1), 0.25).double(), torch.float32, name="scales")
        run = partial(_unpacked, x.to(device), codes, scale=static.to(device))
        yield Trial(run, [_codes(clipped, kind), scales])


def _codes(wanted: Tensor, kind: str) -> Expected:
    return Expected(wanted, _E4M3 if kind == "e4m3" else torch.int8, name="codes")


def _unpacked(x: Tensor, codes: Any, **options: Any) -> list[Tensor]:
    found, *rest = quantize_rows(x, codes, **options)
    if codes == "int4":
        found = unpack_nibbles(found.view(torch.uint8), (*found.shape[:-1], 2 * found.shape[-1]))
    return [found, *rest]


def _behind(
    case: Case, what: str, dtype: torch.dtype, kind: str, device: torch.device
) -> Iterator[Trial]:
    """A norm or a gate in float32, which may be off by so much, and codes by what that allows."""
    codes, largest = _CODES[kind]
    rows, k = _sizes(case, kind)
    options: dict[str, Any] = {}
    if what in ("halves", "interleaved"):
        x, options["gate"] = torch.randn(rows, 2 * k).to(dtype), what
        values, error = _gated(x, what)
    else:
        x, options["norm"] = torch.randn(rows, k).to(dtype), torch.randn(k).to(dtype)
        values, error = x.double(), torch.tensor(rms_norm_bound(k), dtype=torch.float64)
        if what == "norm-residual":
            options["residual"] = torch.randn(rows, k).to(dtype)
            values = (x.float() + options["residual"].float()).double()
        mean = values.square().mean(-1, keepdim=True)
        values = values * torch.rsqrt(mean + 1e-6) * options["norm"].double()
    ideal = values.abs().amax(-1, keepdim=True) / largest
    of_scale = error.max() + gamma(2, torch.float32)
    expected = [
        _between(values / ideal, error + of_scale + gamma(4, torch.float32), kind, largest),
        Expected(ideal, torch.float32, of_scale * ideal, name="scales"),
    ]
    if "residual" in options:
        sums = (x.float() + options["residual"].float()).to(dtype)
        expected.append(Expected.bits(sums, "sums"))
    on = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in options.items()}
    yield Trial(partial(_unpacked, x.to(device), codes, **on), expected)


def _gated(x: Tensor, how: str) -> tuple[Tensor, Tensor]:
    wide = x.double()
    gate, up = wide.chunk(2, -1) if how == "halves" else (wide[..., ::2], wide[..., 1::2])
    return torch.nn.functional.silu(gate) * up, gated_bound(gate)


def _between(ratio: Tensor, error: Tensor, kind: str, largest: float) -> Expected:
    """Codes that a number within the error of each ratio may be rounded to."""
    slack = ratio.abs() * error
    ends = []
    for each in (ratio - slack, ratio + slack):
        each = each.clamp(-largest, largest)
        ends.append(each.float().to(_E4M3).double() if kind == "e4m3" else each.round())
    dtype = _E4M3 if kind == "e4m3" else torch.int8
    return Expected.within(ends[0], ends[1], dtype, "codes")
