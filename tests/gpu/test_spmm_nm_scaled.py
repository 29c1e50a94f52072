"""The 8-bit product on an H100 or H200: exact where it can be, against the definition elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.formats import NM
from hopsparse.formats.quantized import pack_nibbles, unpack_nibbles
from hopsparse.measure.error import finish_bound, gamma, gated_bound, unit_roundoff
from hopsparse.ops import Scaling, interleave_gate_up, pack_nm, spmm_nm_scaled
from hopsparse.ops._rows import rows_for_tma
from hopsparse.ops.spmm_nm.chosen import one_of
from hopsparse.ops.spmm_nm.kernel import SWIGLU, Config, Numbers
from hopsparse.ops.spmm_nm.plan import eight_bit
from hopsparse.ops.spmm_nm.reference import apply_activation
from hopsparse.ops.spmm_nm.scaled.ahead import prepare_scaled
from hopsparse.ops.spmm_nm.scaled.op import plan_scaled
from hopsparse.ops.spmm_nm.scaled.widened import widened

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8, INT8 = "float8_e4m3fn", "int8"
# tokens, out, k: a whole tile; ragged on all sides; one token; several waves; an odd number of
# units and words; rows that TMA cannot read as they are.
SHAPES = [
    (256, 256, 512),
    (513, 1032, 1168),
    (1, 64, 128),
    (384, 520, 704),
    (1000, 2048, 512),
    (33, 200, 4160),
    (70, 70, 2068),
]
# tokens, rows of gate, k: y by whole lines, by ragged ones, and a number at a time.
SWIGLU_SHAPES = [(256, 256, 512), (101, 144, 640), (100, 136, 640), (1, 8, 64), (33, 1032, 256)]
KINDS = {
    "int8": (torch.int8, Scaling(), Numbers(INT8, INT8, "bfloat16")),
    "fast": (E4M3, Scaling(sums="fast"), Numbers(FP8, FP8, "bfloat16")),
    "promoted": (E4M3, Scaling(), Numbers(FP8, FP8, "bfloat16", promoted=True)),
    "grouped": (E4M3, Scaling(), Numbers(FP8, FP8, "bfloat16", grouped=True)),
    "int4 fast": (E4M3, Scaling(sums="fast"), Numbers(FP8, "int4", "bfloat16")),
    "int4 promoted": (E4M3, Scaling(), Numbers(FP8, "int4", "bfloat16", promoted=True)),
}
TILES = [
    pytest.param(kind, config, id=f"{kind}-{config.name}")
    for kind, (*_, numbers) in KINDS.items()
    for config in eight_bit(numbers)
]


def integers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randint(-2, 3, shape, device=device).to(dtype)


def inputs(numbers: Numbers, tokens: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x as the kernel reads it, and as what it stands for."""
    if numbers.x != "int4":
        x = integers((tokens, k), getattr(torch, numbers.x), device)
        return x, x
    codes = torch.randint(-8, 8, (tokens, k), dtype=torch.int8, device=device)
    return pack_nibbles(codes).view(torch.int8).view(tokens, -1), codes


def two_four(out: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Integers, two of every four columns; all pairs of columns occur."""
    dense = torch.randint(-2, 3, (out, k), device=device)
    rank = torch.rand(out, -(-k // 4), 4, device=device).argsort(-1)
    return (dense * (rank < 2).flatten(1)[:, :k]).to(dtype)


def exact(x: Tensor, dense: Tensor) -> Tensor:
    return x.double() @ dense.double().T


@pytest.mark.parametrize(("kind", "config"), TILES)
def test_every_tile_is_exact(kind: str, config: Config, device: torch.device) -> None:
    dtype, scaling, numbers = KINDS[kind]
    for tokens, out, k in SHAPES:
        torch.manual_seed(tokens)
        dense, (x, right) = two_four(out, k, dtype, device), inputs(numbers, tokens, k, device)
        wide = dense.double()
        if numbers.grouped:
            scale = 2.0 ** torch.randint(-1, 2, (out, -(-k // 128)), device=device)
            scaling = replace(scaling, w=scale)
            wide = wide * scale.repeat_interleave(128, 1)[:, :k]
        y = spmm_nm_scaled(NM.from_dense(dense), x, scaling, out_dtype=torch.float32, config=config)
        assert torch.equal(y.double(), right.double() @ wide.T), (tokens, out, k)


@pytest.mark.parametrize(("kind", "config"), TILES[::5])
def test_16_bit_results_leave_by_lines(kind: str, config: Config, device: torch.device) -> None:
    dtype, scaling, numbers = KINDS[kind]
    for tokens, out, k in SHAPES:
        torch.manual_seed(out)
        dense, (x, right) = two_four(out, k, dtype, device), inputs(numbers, tokens, k, device)
        of_w, of_x = (2.0 ** torch.randint(-1, 2, (n, 1), device=device) for n in (out, tokens))
        scaling = replace(scaling, w=of_w, x=of_x)
        y = spmm_nm_scaled(NM.from_dense(dense), x, scaling, config=config)
        expected = exact(right, dense) * of_x.double() * of_w.double().T
        assert torch.equal(y, expected.bfloat16()), (tokens, out, k)


@pytest.mark.parametrize("tokens", [1, 4096])
def test_more_rows_than_other_grids_took(tokens: int, device: torch.device) -> None:
    """W 59136 x 8192, which is 56 times the same rows."""
    rows = two_four(1056, 8192, E4M3, device)
    w, x = pack_nm(rows.repeat(56, 1)), integers((tokens, 8192), E4M3, device)
    assert w.shape == (59136, 8192)
    y = spmm_nm_scaled(w, x)
    assert (y.view(tokens, 56, 1056) == exact(x, rows).bfloat16()[:, None]).all()


def test_sums_of_int8_are_exact_at_their_ends(device: torch.device) -> None:
    dense = torch.zeros(64, 65536, dtype=torch.int8, device=device)
    dense.view(64, -1, 4)[..., 1:3] = -128
    x = torch.full((3, 65536), -128, dtype=torch.int8, device=device)
    y = spmm_nm_scaled(NM.from_dense(dense), x, out_dtype=torch.int32)
    assert (y == 32768 * 128 * 128).all()


@pytest.mark.parametrize("x_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("act", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("sums", ["promoted", "fast"])
def test_it_is_as_defined(
    x_dtype: torch.dtype, act: str | None, sums: str, device: torch.device
) -> None:
    tokens, out, k = 77, 136, 1168
    w = NM.from_dense(two_four(out, k, E4M3, device))
    x = integers((tokens, k), x_dtype, device)
    of_w, of_x = torch.rand(out, device=device) + 0.5, torch.rand(tokens, 1, device=device) / 16
    scaling = Scaling(of_w, of_x, sums=sums)
    scaled = exact(x, w.to_dense()) * of_x.double() * of_w.double()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bias = torch.randn(out, device=device).to(dtype)
        residual = torch.randn(tokens, out, device=device).to(dtype)
        y = spmm_nm_scaled(w, x, scaling, bias=bias, act=act, residual=residual, out_dtype=dtype)
        right = apply_activation(scaled + bias.double(), act or "none") + residual.double()
        size = scaled.abs() + bias.double().abs()
        bound = finish_bound(size, right, residual, dtype)
        assert ((y.double() - right).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_results_in_8_bits_are_the_nearest_codes(dtype: torch.dtype, device: torch.device) -> None:
    tokens, out, k = 65, 200, 256
    w = NM.from_dense(two_four(out, k, dtype, device))
    x = integers((tokens, k), dtype, device)
    for step in (0.25, 1.0, 64.0):
        y = spmm_nm_scaled(w, x, Scaling(out=step), out_dtype=dtype)
        right = spmm_nm_scaled(w.to("cpu"), x.cpu(), Scaling(out=step), out_dtype=dtype)
        assert torch.equal(y.cpu().float(), right.float())


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize(
    "config", eight_bit(KINDS["int8"][2], SWIGLU), ids=lambda config: config.name
)
def test_swiglu_folds_gate_and_up(
    config: Config, out_dtype: torch.dtype, device: torch.device
) -> None:
    scaling = Scaling(out=0.5 if out_dtype == torch.int8 else None)
    for tokens, half, k in SWIGLU_SHAPES:
        parts = [two_four(half, k, torch.int8, device) for _ in range(2)]
        w, x = NM.from_dense(interleave_gate_up(*parts)), integers((tokens, k), torch.int8, device)
        scale = torch.rand(tokens, 1, device=device) / 16
        y = spmm_nm_scaled(
            w, x, replace(scaling, x=scale), act=SWIGLU, out_dtype=out_dtype, config=config
        )
        gate, up = (exact(x, part) * scale.double() for part in parts)
        right = torch.nn.functional.silu(gate) * up
        # Both sides were rounded when they were scaled; silu raises that by 1 + |gate| at most.
        rounded = (3 + gate.abs()) * gamma(2, torch.float32)
        slack = (gated_bound(gate) + rounded) * right.abs()
        if out_dtype == torch.int8:
            least, most = (right + sign * slack for sign in (-1, 1))
            codes = [(2 * each).round().clamp(-127, 127) for each in (least, most)]
            assert ((codes[0] <= y) & (y <= codes[1])).all()
        else:
            end = unit_roundoff(out_dtype) * (right.abs() + slack) + torch.finfo(out_dtype).tiny
            assert ((y.double() - right).abs() <= slack + end).all()


@pytest.mark.parametrize("sums", ["promoted", "fast"])
def test_nan_and_infinity_are_not_hidden(sums: str, device: torch.device) -> None:
    w = NM.from_dense(
        torch.ones(64, 128, device=device)
        .to(E4M3)
        .float()
        .view(64, -1, 4)
        .mul(torch.tensor([1.0, 1, 0, 0], device=device))
        .view(64, 128)
        .to(E4M3)
    )
    x = torch.ones(20, 128, device=device)
    x[3, 4] = float("nan")
    scale = torch.ones(20, 1, device=device)
    scale[7] = float("nan")
    scale[9] = float("inf")
    y = spmm_nm_scaled(w, x.to(E4M3), Scaling(x=scale, sums=sums))
    assert y[[3, 7]].isnan().all()
    assert y[9].isinf().all()
    y[[3, 7, 9]] = 64
    assert (y == 64).all()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_every_element_is_written_and_nothing_else(
    out_dtype: torch.dtype, device: torch.device
) -> None:
    """Memory that was full of other bits before is handed out for the result."""
    tokens, out, k = 100, 136, 256
    w, x = (
        NM.from_dense(two_four(out, k, torch.int8, device)),
        integers((tokens, k), torch.int8, device),
    )
    scaling = Scaling(out=1.0) if out_dtype == torch.int8 else Scaling()
    first = spmm_nm_scaled(w, x, scaling, out_dtype=out_dtype)
    poison = torch.full_like(first, 77)
    del poison
    again = spmm_nm_scaled(w, x, scaling, out_dtype=out_dtype)
    assert torch.equal(first, again)


def test_transposed_strided_and_unaligned_x(device: torch.device) -> None:
    w = NM.from_dense(two_four(72, 260, torch.int8, device))
    dense = w.to_dense()
    for x in (
        integers((260, 9), torch.int8, device).T,
        integers((9, 300), torch.int8, device)[:, 7:267],
        integers((2, 3, 260), torch.int8, device),
        integers((1, 260), torch.int8, device),
        integers((260,), torch.int8, device),
    ):
        y = spmm_nm_scaled(w, x, out_dtype=torch.int32)
        assert torch.equal(y.double(), exact(x, dense))
    assert spmm_nm_scaled(w, integers((0, 260), torch.int8, device)).shape == (0, 72)


def test_every_code_of_4_bits_in_every_place(device: torch.device) -> None:
    """One column of w at a time: what comes out is that column of x."""
    k = 256
    codes = (torch.arange(16, device=device)[:, None] + torch.arange(k, device=device)) % 16 - 8
    x = pack_nibbles(codes.to(torch.int8)).view(torch.int8).view(16, -1)
    w = NM.from_dense(torch.eye(k, device=device).to(E4M3))
    for sums in ("promoted", "fast"):
        y = spmm_nm_scaled(w, x, Scaling(sums=sums), out_dtype=torch.float32)
        assert torch.equal(y, codes.float())


def test_strided_and_unaligned_x_of_4_bits(device: torch.device) -> None:
    w = NM.from_dense(two_four(72, 260, E4M3, device))
    for tokens, start, row in ((9, 0, 130), (9, 16, 160), (9, 7, 200), (1, 3, 133)):
        whole = torch.randint(-128, 128, (tokens, row), dtype=torch.int8, device=device)
        x = whole[:, start : start + 130]
        right = unpack_nibbles(x.contiguous().view(torch.uint8), (tokens, 260))
        y = spmm_nm_scaled(w, x, out_dtype=torch.float32)
        assert torch.equal(y.double(), exact(right, w.to_dense()))


def test_a_graph_captures_it(device: torch.device) -> None:
    w = NM.from_dense(two_four(256, 512, E4M3, device))
    x, scale = integers((40, 512), E4M3, device), torch.ones(40, 1, device=device)
    expected = spmm_nm_scaled(w, x, Scaling(x=scale))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = spmm_nm_scaled(w, x, Scaling(x=scale))
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
    scale.fill_(2)
    graph.replay()
    assert torch.equal(y, 2 * expected)


def test_the_scale_of_what_has_none_is_there_before_a_replay(device: torch.device) -> None:
    """A capture may be the first call, where all was prepared; an eager call then comes before."""
    w = NM.from_dense(two_four(256, 512, torch.int8, device))
    x = integers((40, 512), torch.int8, device)
    one_of.cache_clear()
    prepare_scaled(w, 40)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = spmm_nm_scaled(w, x)
    expected = exact(x, w.to_dense()).bfloat16()
    assert torch.equal(spmm_nm_scaled(w, x), expected)
    graph.replay()
    assert torch.equal(captured, expected)


def test_the_least_and_the_largest_step_of_codes_are_as_on_the_cpu(device: torch.device) -> None:
    w = NM.from_dense(two_four(72, 256, torch.int8, device))
    x = integers((9, 256), torch.int8, device)
    for step in (2.0**-126, 2.0**126):
        y = spmm_nm_scaled(w, x, Scaling(out=step), out_dtype=torch.int8)
        right = spmm_nm_scaled(w.to("cpu"), x.cpu(), Scaling(out=step), out_dtype=torch.int8)
        assert torch.equal(y.cpu(), right)


def test_the_smallest_tile_folds_into_codes(device: torch.device) -> None:
    """Its results are fewer than there are threads to move them."""
    parts = [two_four(48, 256, torch.int8, device) for _ in range(2)]
    w, x = NM.from_dense(interleave_gate_up(*parts)), integers((17, 256), torch.int8, device)
    scaling = Scaling(x=torch.full((1,), 1 / 16, device=device), out=0.5)
    small = Config(1, 1, tokens=16, units=1, stages=2, bits=8)
    y = spmm_nm_scaled(w, x, scaling, act=SWIGLU, out_dtype=torch.int8, config=small)
    right = spmm_nm_scaled(w, x, scaling, act=SWIGLU, out_dtype=torch.int8)
    assert torch.equal(y, right)


def test_patterns_without_a_kernel_run_dense(device: torch.device) -> None:
    dense = integers((64, 96), torch.int8, device)
    dense.view(64, -1, 6)[..., :2] = 0
    w, x = NM.from_dense(dense, "4:6"), integers((5, 96), torch.int8, device)
    assert "dense" in plan_scaled(w, x).describe()
    y = spmm_nm_scaled(w, x, out_dtype=torch.int32)
    assert torch.equal(y.double(), exact(x, dense))


def test_results_are_the_same_bits_every_time(device: torch.device) -> None:
    w = NM.from_dense(two_four(512, 4096, E4M3, device))
    x = torch.randn(300, 4096, device=device).to(E4M3)
    for sums in ("promoted", "fast"):
        first = spmm_nm_scaled(w, x, Scaling(sums=sums))
        assert all(torch.equal(first, spmm_nm_scaled(w, x, Scaling(sums=sums))) for _ in range(5))


# Whole pieces and cut ones; rows side by side, apart, and off 16 bytes, which are copied.
@pytest.mark.parametrize(
    ("tokens", "k", "start", "row"),
    [
        (1, 64, 0, 32),
        (16, 4096, 0, 2048),
        (300, 1168, 0, 584),
        (37, 2080, 16, 1104),
        (9, 260, 7, 200),
    ],
)
def test_x_of_4_bits_that_is_widened_once_gives_the_same_bits(
    tokens: int, k: int, start: int, row: int, device: torch.device
) -> None:
    w = NM.from_dense(two_four(1032, k, E4M3, device))
    whole = torch.randint(-128, 128, (tokens, row), dtype=torch.int8, device=device)
    x = whole[:, start : start + k // 2]
    scaling = Scaling(x=torch.rand(tokens, 1, device=device))  # promoted sums of these are exact
    codes = unpack_nibbles(x.contiguous().view(torch.uint8), (tokens, k)).to(E4M3)
    rows = rows_for_tma(x, whole=True)
    for _ in range(2):  # the second is a launch that is known
        wide = widened(rows, tokens, k)
        assert torch.equal(wide.float() * 2.0**9, codes.float())
    torch.cuda.synchronize()
    right = spmm_nm_scaled(w, codes, scaling, out_dtype=torch.float32)
    assert torch.equal(spmm_nm_scaled(w, x, scaling, out_dtype=torch.float32), right)


def test_what_x_of_4_bits_runs_is_planned_prepared_and_captured(device: torch.device) -> None:
    """A capture right behind `prepare_scaled`; weights are loaded while x is still widened."""
    w, said = NM.from_dense(two_four(2048, 1024, E4M3, device)), set()
    assert prepare_scaled(w, 600, Scaling(), x_dtype=torch.int8)
    for tokens in (1, 33, 600):
        codes = torch.randint(-8, 8, (tokens, 1024), dtype=torch.int8, device=device)
        x = pack_nibbles(codes).view(torch.int8).view(tokens, -1)
        said.add(plan_scaled(w, x).why.partition(",")[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = spmm_nm_scaled(w, x, out_dtype=torch.bfloat16)
        for _ in range(3):
            codes = codes.flip(0).neg().clamp_(max=7)
            x.copy_(pack_nibbles(codes).view(torch.int8).view(tokens, -1))
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, exact(codes, w.to_dense()).bfloat16())
            assert torch.equal(spmm_nm_scaled(w, x), y)
    assert "x widened to float8_e4m3fn once" in said


def test_the_decision_widens_in_the_tile_where_one_block_reads_x(device: torch.device) -> None:
    w = NM.from_dense(two_four(64, 1024, E4M3, device))
    codes = torch.randint(-8, 8, (1024, 1024), dtype=torch.int8, device=device)
    x = pack_nibbles(codes).view(torch.int8).view(1024, -1)
    assert ", which widens x" in plan_scaled(w, x).why
    y = spmm_nm_scaled(w, x, out_dtype=torch.float32)
    assert torch.equal(y.double(), exact(codes, w.to_dense()))
