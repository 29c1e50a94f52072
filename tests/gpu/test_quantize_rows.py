"""The row quantiser gives the bits of the CPU; behind a norm or a gate, what its error allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.errors import UnsupportedError
from hopsparse.formats.quantized import unpack_nibbles
from hopsparse.launch import capture
from hopsparse.ops import quantize_rows
from hopsparse.ops.quantize_rows import cases
from hopsparse.ops.quantize_rows.device import enqueue
from tests.helpers.matrices import bits
from tests.helpers.rounded_rows import (
    DTYPE_OF,
    INPUTS,
    KINDS,
    assert_near,
    assert_same,
    even,
    exact_values,
    hard_rows,
)

CASES = pytest.mark.parametrize("case", cases.EDGE, ids=lambda case: case.name)
BEHIND = ("norm", "norm and residual", "halves", "interleaved")


def same_on(device: torch.device, x: Tensor, kind: str, **options: Any) -> None:
    moved = {name: value.to(device) for name, value in options.items()}
    got = quantize_rows(x.to(device), DTYPE_OF[kind], **moved)
    assert_same(got, quantize_rows(x, DTYPE_OF[kind], **options))


def unpacked(codes: Tensor, kind: str) -> Tensor:
    if kind != "int4":
        return codes
    return unpack_nibbles(codes, (*codes.shape[:-1], 2 * codes.shape[-1]))


def inputs_behind(
    what: str, rows: int, k: int, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Any]]:
    """An input, and the options under which it is rounded."""
    if what in ("halves", "interleaved"):
        return torch.randn(rows, 2 * k).to(dtype), {"gate": what}
    options = {"norm": torch.randn(k).to(dtype)}
    if what == "norm and residual":
        options["residual"] = torch.randn(rows, k).to(dtype)
    return torch.randn(rows, k).to(dtype), options


def on(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }


@CASES
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_hard_rows_give_the_bits_of_the_cpu(
    kind: str, dtype: torch.dtype, case: cases.Case, device: torch.device
) -> None:
    x = hard_rows(max(case.rows, 19), even(case.k, kind), dtype, kind)
    same_on(device, x, kind)
    same_on(device, x[:1], kind)


@CASES
@pytest.mark.parametrize("scale", [1e-30, 0.003, 1.0, 7e5, 3e38, 1e-42, 0.0, float("nan")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_static_scale_gives_the_bits_of_the_cpu(
    kind: str, scale: float, case: cases.Case, device: torch.device
) -> None:
    for dtype in INPUTS:
        x = hard_rows(max(case.rows, 19), even(case.k, kind), dtype, kind)
        same_on(device, x, kind, scale=torch.tensor([scale]))


@pytest.mark.parametrize(
    "exponent", [-149, -140, -126, -90, -61, -60, -59, 0, 59, 60, 61, 100, 120]
)
@pytest.mark.parametrize("kind", KINDS)
def test_quotients_are_rounded_correctly_at_every_size(
    kind: str, exponent: int, device: torch.device
) -> None:
    """Scales around where a row is lifted, and entries beside every tie."""
    largest = {"int8": 127, "fp8": 448, "int4": 7}[kind]
    scale = (1 + torch.rand(64, 1, dtype=torch.float64)) * 2.0**exponent
    steps = torch.randint(-2 * largest, 2 * largest + 1, (64, 1024)) / 2
    x = (steps * scale).float()
    near = (bits(x) + torch.randint(-3, 4, x.shape, dtype=torch.int32)).view(torch.float32)
    x = torch.where(near.isfinite(), near, x)
    same_on(device, x, kind)
    for each in scale.float()[:8]:
        same_on(device, x, kind, scale=each)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_just_reach_beyond_the_largest_code(kind: str, device: torch.device) -> None:
    """Each is alone with its excess: a larger entry would have the whole row clipped with care."""
    largest = {"int8": 127, "fp8": 448, "int4": 7}[kind]
    peaks = largest + torch.arange(-64, 65) / 32
    x = torch.cat((peaks, -peaks, peaks * 2.0**21)).unsqueeze(1) * torch.tensor([1.0, 0.1] * 8)
    for scale in (1.0, 0.3, 2.0**-70):
        same_on(device, x * scale, kind, scale=torch.tensor([scale]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_16_bit_number_under_many_scales(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    finite = every[every.isfinite()]
    for scale in (torch.rand(40) * torch.logspace(-8, 4, 40)).tolist():
        same_on(device, finite.view(8, -1), kind, scale=torch.tensor([scale]))


def test_many_rows(device: torch.device) -> None:
    for k in (7, 576):
        same_on(device, torch.randn(100_003, k).bfloat16(), "int8")


def test_int8_never_reaches_minus_128(device: torch.device) -> None:
    x = torch.tensor([[-128.0, -127.5, -1e30, 128.0]], device=device)
    codes, _ = quantize_rows(x, torch.int8, scale=torch.ones(1, device=device))
    assert codes.tolist() == [[-127, -127, -127, 127]]


@CASES
@pytest.mark.parametrize("what", BEHIND)
@pytest.mark.parametrize("kind", KINDS)
def test_behind_a_norm_or_a_gate_the_error_is_that_of_float32(
    kind: str, what: str, case: cases.Case, device: torch.device
) -> None:
    k = even(case.k, kind)
    for dtype in INPUTS:
        x, options = inputs_behind(what, case.rows, k, dtype)
        codes, scales, *sums = quantize_rows(x.to(device), DTYPE_OF[kind], **on(device, options))
        asked = {"norm": None, "eps": 1e-6, "gate": None, "residual": None, **options}
        values, error = exact_values(x, **asked)
        assert_near(unpacked(codes, kind).cpu(), scales.cpu(), values, error, kind)
        for each in sums:
            assert torch.equal(each.cpu(), (x.float() + options["residual"].float()).to(dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("k", [7, 576, 4096, 14336, 28680])
@pytest.mark.parametrize("what", BEHIND)
def test_behind_a_norm_or_a_gate_nothing_is_hidden(
    what: str, k: int, value: float, device: torch.device
) -> None:
    x, options = inputs_behind(what, 3, k, torch.bfloat16)
    x[1, k // 2] = value
    codes, scales, *_ = quantize_rows(x.to(device), torch.int8, **on(device, options))
    assert scales.isnan().flatten().tolist() == [False, True, False]
    assert (codes[1] == 0).all()


@CASES
@pytest.mark.parametrize("what", ["plain", *BEHIND])
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_written_and_none_beside(
    kind: str, what: str, case: cases.Case, device: torch.device
) -> None:
    k, guard = even(case.k, kind), 256
    x, options = inputs_behind("norm" if what == "plain" else what, case.rows, k, torch.bfloat16)
    options = {} if what == "plain" else on(device, options)
    x = x.to(device)
    want = quantize_rows(x, DTYPE_OF[kind], **options)
    frames, results = [], []
    for each in want:
        frame = torch.full((each.nbytes + 2 * guard,), 0xA5, dtype=torch.uint8, device=device)
        inside = frame[guard : guard + each.nbytes]
        # What is not written keeps a byte that the result has not.
        inside.copy_(each.view(torch.uint8).flatten() ^ 0xFF)
        frames.append(frame)
        results.append(inside.view(each.dtype).view(each.shape))
    enqueue(results, x, kind, **options)
    assert_same(tuple(results), want)
    for frame in frames:
        assert (frame[:guard] == 0xA5).all()
        assert (frame[-guard:] == 0xA5).all()


@pytest.mark.parametrize(
    "layout", ["transposed", "every other", "inside", "expanded", "off by one"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_strides_and_starts_do_not_matter(kind: str, layout: str, device: torch.device) -> None:
    x = torch.randn(24, 64).bfloat16().to(device)
    frame = torch.full((64, 200), float("nan"), dtype=torch.bfloat16, device=device)
    laid = {
        "transposed": lambda: frame[:, :24].copy_(x.T).T,
        "every other": lambda: frame[:24, 1:129:2].copy_(x),
        "inside": lambda: frame[3:27, 8:72].copy_(x),
        "expanded": lambda: x[:1].expand(24, 64),
        "off by one": lambda: frame.flatten()[1 : 1 + x.numel()].view(24, 64).copy_(x),
    }[layout]()
    same = laid.cpu().contiguous()
    assert_same(quantize_rows(laid, DTYPE_OF[kind]), quantize_rows(same, DTYPE_OF[kind]))


@pytest.mark.parametrize("what", BEHIND)
def test_runs_do_not_differ(what: str, device: torch.device) -> None:
    x, options = inputs_behind(what, 500, 4096, torch.bfloat16)
    x, options = x.to(device), on(device, options)
    first = quantize_rows(x, torch.int8, **options)
    for _ in range(5):
        assert_same(quantize_rows(x, torch.int8, **options), first)


@pytest.mark.parametrize("what", BEHIND)
def test_teams_of_every_shape_agree(what: str, device: torch.device) -> None:
    """A row that starts off 16 bytes is read again, entry by entry: the same values."""
    for k in (576, 4096, 14336):
        x, options = inputs_behind(what, 5, k, torch.bfloat16)
        moved = on(device, options)
        width = x.shape[-1]
        shifted = torch.empty(5 * width + 1, dtype=x.dtype, device=device)[1:].view(5, width)
        kept = quantize_rows(x.to(device), torch.int8, **moved)
        again = quantize_rows(shifted.copy_(x), torch.int8, **moved)
        if what in ("halves", "interleaved"):
            assert_same(again, kept)
        else:  # the sum of squares is in another order
            assert (again[0].int() - kept[0].int()).abs().max() <= 1
        for mine, other in zip(again[2:], kept[2:], strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_call_reads_what_is_there_when_it_is_replayed(
    kind: str, device: torch.device
) -> None:
    x, norm = torch.randn(40, 576).bfloat16().to(device), torch.ones(576).bfloat16().to(device)
    graph = capture(lambda: quantize_rows(x, DTYPE_OF[kind], norm=norm))
    x.copy_(torch.randn(40, 576))
    graph.replay()
    assert_same(graph.outputs, quantize_rows(x, DTYPE_OF[kind], norm=norm))


def test_runs_on_the_stream_of_torch(device: torch.device) -> None:
    x = torch.randn(256, 4096, device=device)
    want = quantize_rows(x, torch.int8)
    target, slow = torch.zeros_like(x), torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(20):
            slow = slow @ slow
        target.copy_(x)  # late: any other stream still sees zeros
        got = quantize_rows(target, torch.int8)
    torch.cuda.synchronize()
    assert_same(got, want)


@pytest.mark.parametrize("what", ["plain", *BEHIND])
def test_torch_compile_sees_one_operator(what: str, device: torch.device) -> None:
    torch.compiler.reset()
    x, options = inputs_behind("norm" if what == "plain" else what, 6, 64, torch.bfloat16)
    options = {} if what == "plain" else on(device, options)
    x = x.to(device)
    compiled = torch.compile(quantize_rows, fullgraph=True)
    assert_same(compiled(x, torch.int8, **options), quantize_rows(x, torch.int8, **options))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)])
def test_nothing_gives_nothing(shape: tuple[int, ...], device: torch.device) -> None:
    codes, scales = quantize_rows(torch.zeros(shape, device=device), torch.int8)
    assert (codes.shape, scales.shape) == (shape, (*shape[:-1], 1))


def test_a_gradient_is_refused(device: torch.device) -> None:
    with pytest.raises(UnsupportedError, match="fake_inputs"):
        quantize_rows(torch.ones(2, 8, device=device, requires_grad=True), torch.int8)


@CASES
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_codes_of_int4_are_spelled_as_numbers_of_e4m3(
    case: cases.Case, dtype: torch.dtype, device: torch.device
) -> None:
    x = hard_rows(case.rows, case.k, dtype, "int4")
    static = torch.tensor([0.25])
    for options in ({}, {"scale": static}, {"norm": torch.ones(case.k, dtype=dtype)}):
        if "norm" in options:
            x = torch.randn(case.rows, even(case.k, "int4")).to(dtype)
            options["norm"] = torch.ones(x.shape[-1], dtype=dtype)
            codes, scales = quantize_rows(x.to(device), "int4", **on(device, options))
            right = unpacked(codes, "int4").to(torch.float8_e4m3fn), scales
        else:
            right = quantize_rows(x, "int4_in_e4m3", **options)
        assert_same(quantize_rows(x.to(device), "int4_in_e4m3", **on(device, options)), right)
