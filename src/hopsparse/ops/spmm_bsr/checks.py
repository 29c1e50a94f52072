"""What is verified of spmm_bsr: cases, every tile of both kernels, epilogues and strides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ...formats.bsr import BSR
from ...formats.pattern import BlockPattern, parse_pattern
from ...verify import Check, Expected, Trial, dense_weight, made_once, small_integers, wide_integers
from ...verify.products import bounded_trial, epilogue_trial, exact_trial, strided
from .._product import Case
from .cases import EDGE, SMOKE
from .fragments_kernel import FragmentConfig
from .kernel import ACTIVATIONS, Config
from .op import spmm_bsr
from .plan import CANDIDATES, FRAGMENT_CANDIDATES, SHOWN, WITH_EPILOGUES, candidates
from .reference import apply_activation
from .sddmm import sddmm_bsr
from .strips import panels_of, width_of

_OP = "spmm_bsr"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# tokens, out, k: ragged on all sides; long rows; rows of y that are no whole lines.
_SHAPES = ((130, 520, 656), (33, 200, 4160), (70, 70, 2064))
# More items than blocks that run at once, and more steps of each than a ring has stages.
_TURNS = ((1030, 2064, 2080),)
# The quick set of a GPU: blocks of every width.
_FIRST = ("three-tokens", "seven-tokens", "seventeen-tokens", "rectangular")
_Tile = Config | FragmentConfig


def checks() -> Iterator[Check]:
    """Every case and dtype by the tile that suits it, every tile, epilogues."""
    for case in SMOKE + EDGE:
        pattern = parse_pattern(case.pattern)
        assert isinstance(pattern, BlockPattern)
        for dtype in _DTYPES:
            kernel = dtype.itemsize == 2 and case.tokens > 0
            trials = partial(_of_case, case, pattern, dtype)
            block = f"{pattern.rows}x{pattern.cols}"
            quick, is_first = dtype != torch.float16, dtype == torch.bfloat16
            first = case.name == "smoke" or (is_first and case.name in _FIRST)
            yield _check(case.name, dtype, trials, block, kernel, quick=quick, first=first)
    tiles: tuple[_Tile, ...] = (*CANDIDATES, *FRAGMENT_CANDIDATES)
    for config in tiles:
        for dtype in _DTYPES[:2]:
            first = dtype == torch.bfloat16 and config in SHOWN
            trials = partial(_of_tile, config, dtype, _SHAPES)
            yield _check(f"tile-{config.name}", dtype, trials, _side(config), first=first)
        trials = partial(_of_tile, config, torch.bfloat16, _TURNS)
        yield _check(f"tile-{config.name}-turns", torch.bfloat16, trials, _side(config))
    for dtype in _DTYPES:
        for sides in ((16, 16), (32, 64), (128, 128)):
            # A kernel of Triton, which no launch of ours shows.
            name = str(dtype).removeprefix("torch.")
            trials = partial(_sampled, sides, dtype)
            form = f"bsr-{sides[0]}x{sides[1]}"
            quick = dtype == torch.bfloat16
            # Compiling for Triton takes most of a second: of one dtype, and others by cuBLAS.
            first = sides == ((32, 64) if quick else (16, 16))
            yield Check(
                "sddmm_bsr", "200x300", name, form, trials, kernel=False, quick=quick, first=first
            )
    for config in WITH_EPILOGUES:
        for act in ACTIVATIONS:
            trials = partial(_epilogues, config, act)
            name = f"act-{act}-{config.name}"
            quick = act == "silu"
            yield _check(name, torch.bfloat16, trials, _side(config), quick=quick, first=quick)
        trials = partial(_strides, config)
        yield _check(f"strides-{config.name}", torch.bfloat16, trials, _side(config))


def _check(
    case: str,
    dtype: torch.dtype,
    trials: partial[Iterator[Trial]],
    block: str,
    kernel: bool = True,
    quick: bool = False,
    first: bool = False,
) -> Check:
    name, form, only = str(dtype).removeprefix("torch."), f"bsr-{block}", "tile-" in case
    return Check(_OP, case, name, form, trials, kernel, quick, only_gpu=only, first=first)


def _side(config: _Tile) -> str:
    return "x".join(map(str, _block_of(config)))


def _block_of(config: _Tile) -> tuple[int, int]:
    if isinstance(config, FragmentConfig):
        return 16 * config.height, 16 * config.height
    return (128, 128) if config.panels == 2 else (config.width, config.width)


def _tile_for(block: tuple[int, int]) -> Config:
    width = width_of(block)
    assert width is not None
    return candidates(panels_of(block), width)[-1]


def _of_case(
    case: Case, pattern: BlockPattern, dtype: torch.dtype, device: torch.device
) -> Iterator[Trial]:
    """Exact with a bias, then random numbers in bound."""
    block = (pattern.rows, pattern.cols)
    dense = dense_weight((case.out, case.k), pattern, dtype).to(device)
    x = small_integers((case.tokens, case.k), dtype).to(device)
    bias = small_integers((case.out,), dtype, 9).to(device)
    # A plan may find dense faster; a tile that is named runs the kernel.
    config = _tile_for(block) if dtype.itemsize == 2 and device.type == "cuda" else None
    yield exact_trial(
        partial(spmm_bsr, BSR.from_dense(dense, block), config=config), x, dense, bias
    )
    dense = (dense * torch.rand(dense.shape).to(device)).to(dtype)
    x = torch.randn(x.shape).to(device, dtype)
    yield bounded_trial(partial(spmm_bsr, BSR.from_dense(dense, block), config=config), x, dense)


def _of_tile(
    config: _Tile,
    dtype: torch.dtype,
    shapes: tuple[tuple[int, int, int], ...],
    device: torch.device,
) -> Iterator[Trial]:
    for shape in shapes:
        w, x, right = _of_integers(_block_of(config), shape, dtype, device)
        yield Trial(partial(spmm_bsr, w, x, config=config), [right])


@made_once
def _of_integers(
    block: tuple[int, int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[BSR, torch.Tensor, Expected]:
    tokens, out, k = shape
    dense = dense_weight((out, k), BlockPattern(*block, 0.6), dtype).to(device)
    x = small_integers((tokens, k), dtype).to(device)
    right = wide_integers(x, dense).to(dtype).double()
    return BSR.from_dense(dense, block), x, Expected(right, dtype)


def _epilogues(config: _Tile, act: str, device: torch.device) -> Iterator[Trial]:
    block = _block_of(config)
    chosen = config if device.type == "cuda" else None
    for out in (192, 70):
        dense = dense_weight((out, 160), BlockPattern(*block, 0.5), torch.bfloat16).to(device)
        x = small_integers((75, 160), torch.bfloat16).to(device)
        run = partial(spmm_bsr, BSR.from_dense(dense, block), config=chosen)
        for kind in (torch.bfloat16, torch.float32):
            yield epilogue_trial(run, x, dense, act, kind, apply_activation)


def _sampled(block: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    """A product at the blocks of a pattern: the values alone are looked at."""
    mask = dense_weight((200, 300), BlockPattern(*block, 0.5), dtype)
    pattern = BSR.from_dense(mask, block)
    a, b = small_integers((200, 70), dtype), small_integers((300, 70), dtype)
    whole = wide_integers(a, b)
    down, across = (-(-side // step) for side, step in zip((200, 300), block, strict=True))
    padded = torch.zeros(down * block[0], across * block[1], dtype=torch.float64)
    padded[:200, :300] = whole
    rows = torch.repeat_interleave(torch.arange(down), pattern.indptr.diff().long())
    tiles = padded.view(down, block[0], across, block[1]).transpose(1, 2)
    value = tiles[rows, pattern.indices.long()].to(dtype).double()
    on = pattern.to(device)
    run = partial(_values_of, on, a.to(device), b.to(device))
    yield Trial(run, [Expected(value, dtype)])


def _values_of(pattern: BSR, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return sddmm_bsr(pattern, a, b).values


def _strides(config: _Tile, device: torch.device) -> Iterator[Trial]:
    block = _block_of(config)
    chosen = config if device.type == "cuda" else None
    dense = dense_weight((256, 256), BlockPattern(*block, 0.5), torch.bfloat16, 1).to(device)
    for x in strided(256, torch.bfloat16, device):
        yield exact_trial(partial(spmm_bsr, BSR.from_dense(dense, block), config=chosen), x, dense)
