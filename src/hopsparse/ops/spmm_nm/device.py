"""spmm_nm on a GPU: a call of which every fact was seen before is one look-up and one launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from numbers import Real

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...errors import ArgumentError, UnsupportedError
from ...formats.nm import NM
from ...launch import (
    Bound,
    Element,
    Kernel,
    KnownLaunches,
    Turn,
    current_stream,
    device_facts,
    encode,
    kernel_for,
    max_active_clusters,
    starts_early,
)
from ...ranges import in_phase
from ...tune import machine_of
from .._rows import rows_for_tma
from .cost import rows_of_x, stages_of_k
from .dense import forget_counts
from .facts import Epilogue as Epilogue
from .facts import Experts
from .facts import Scales as Scales
from .kernel import (
    MAP_BYTES,
    PANEL,
    SCALARS,
    WORD,
    Config,
    Numbers,
    fold_of,
    spec_of_numbers,
    stores_directly,
)
from .plan import Problem, choose

RASTER_TOKENS = 2048  # tokens of the tiles in flight at one time: near a square of y
FEW_TOKENS = 64  # whose stages are nearly all weights
_LONGEST_SIDE = 2**31 - 2**13  # the kernel counts in 32 bits, up to the end of the last tiles
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

ELEMENTS = {
    "bfloat16": Element.BF16,
    "float16": Element.F16,
    "float8_e4m3fn": Element.U8,
    "float8_e5m2": Element.U8,
    "int8": Element.U8,
}

_BOUND = KnownLaunches()


_NO_SCALES, _NO_EXPERTS = Scales(), Experts()


@dataclass(frozen=True)
class Launch:
    """All of a call but its pointers."""

    kernel: Kernel
    config: Config
    problem: Problem
    element: Element | None  # of x; None where no map of it is loaded by
    grid: int
    sizes: tuple[int, int, int, int, int, int, int]

    def __call__(
        self,
        values: Tensor,
        meta: Tensor,
        x: Tensor,
        y: Tensor,
        *,
        bias: Tensor | None,
        residual: Tensor | None,
        alpha: float,
    ) -> None:
        """Put the kernel on torch's current stream; nothing waits for it.

        Args:
            values: As `NM.values`.
            meta: As `NM.meta`.
            x: [tokens, k], rows that start on 16 bytes, neighbouring columns.
            y: [tokens, out], contiguous; all of it is written.
            bias: [out] or None.
            residual: [tokens, out], contiguous, or None.
            alpha: What the sum is multiplied by.
        """
        addresses = (x.data_ptr(), values.data_ptr(), meta.data_ptr(), y.data_ptr())
        added = (address_of(bias), address_of(residual))
        turn = Turn(current_stream(self.kernel.device))
        self.bind(turn, addresses, x.stride(0), added, alpha)()

    def bind(
        self,
        turn: Turn,
        addresses: tuple[int, int, int, int],
        row: int,
        added: tuple[int, int],
        alpha: float,
        scales: Scales = _NO_SCALES,
        experts: Experts = _NO_EXPERTS,
    ) -> Bound:
        """The launch with its arguments.

        Args:
            turn: The stream, and whether the launch starts early there.
            addresses: Of x, values, meta and y.
            row: Elements from one token of x to the next; bytes where it has 4 bits.
            added: Addresses of bias and residual, 0 where there is none.
            alpha: What the sum is multiplied by.
            scales: Of an 8-bit product.
            experts: Of a product with several weights.

        Raises:
            ArgumentError: alpha is no number, or a part of the weight does not start on 16 bytes.
        """
        # A tensor would pass as a number, and be found again by its identity, not by its value.
        if not isinstance(alpha, Real):
            raise ArgumentError(
                f"spmm_nm: alpha={alpha!r}", need="a number", hint="alpha.item(), once"
            )
        x, values, meta, y = addresses
        if values % 16 or meta % 16:
            raise ArgumentError(
                f"spmm_nm: a weight with values at {values:#x} and meta at {meta:#x}",
                need="parts that start on 16 bytes",
                hint="their clones: NM(w.shape, w.values.clone(), w.meta.clone(), w.pattern)",
            )
        # Beyond float32 it is infinite, as on the CPU.
        factors = [ctypes.c_float(each).value for each in (alpha, scales.out_multiplier)]
        codes = (x, row, -(-self.problem.k // 32) * 16) if self.element is None else (0, 0, 0)
        pointers = (y, *added, scales.w, scales.x, codes[0], experts.ends)
        layout = (scales.groups, scales.x_step, *codes[1:], scales.w_shift, experts.count)
        ahead = self._stages_ahead if turn.early else 0
        scalars = SCALARS.pack(*pointers, *factors, *self.sizes, *layout, ahead)
        maps = self._x_map(x, row), self._values_map(values), self._meta_map(meta)
        args = b"".join((*maps, scalars, self._more()))
        return self.kernel.bind(self.grid, args, turn.stream, pdl=turn.early)

    def _more(self) -> bytes:
        """What kernels that have more arguments get behind those of all."""
        return b""

    def _x_map(self, address: int, row: int) -> bytes:
        if self.element is None:
            return bytes(MAP_BYTES)
        p, box = self.problem, (self.config.columns // self.config.units, self.sizes[6])
        pitch = row * self.element.bytes
        return encode(address, self.element, (p.k, p.tokens), (pitch,), box, swizzle=128)

    def _values_map(self, address: int) -> bytes:
        c, panels = self.config, ceil(self.problem.out / PANEL)
        # A step of a panel is 2048 bytes, moved as 256 numbers of 8: a box has 256 at most.
        size, steps, of_unit = 256, 2 * self._words // c.words, 2
        if c.four_bit_w:
            size, steps, of_unit = 128, self._words, c.words
        return encode(
            address,
            Element.U64,
            (size, panels, steps),
            (steps * size * 8, size * 8),
            (size, c.all_panels, of_unit * c.units // c.cluster_tokens),
        )

    def _meta_map(self, address: int) -> bytes:
        c, panels, words = self.config, ceil(self.problem.out / PANEL), self._words
        return encode(
            address,
            Element.I32,
            (128, words, panels),
            (512, words * 512),
            (128, c.units * c.words, c.all_panels),
        )

    @property
    def _stages_ahead(self) -> int:
        """Stages of weights to load while the kernel ahead still runs; tokens come behind them."""
        stages = self.config.stages
        return stages if self.problem.tokens <= FEW_TOKENS else min(2, stages)

    @property
    def _words(self) -> int:
        """Index words of a row of the packed weight, for one thread."""
        return ceil(self.problem.k / WORD)


@lru_cache(maxsize=4096)
def launch_for(
    problem: Problem,
    dtype: torch.dtype,
    epilogue: Epilogue,
    device: int,
    config: Config | None = None,
) -> Launch:
    """The launch of a problem; compiles and loads its kernel where that was not done before.

    Args:
        problem: Sizes, all positive.
        dtype: Of x and w: bfloat16 or float16.
        epilogue: What happens to the sums.
        device: Ordinal of the GPU.
        config: The tile; None chooses one.

    Raises:
        UnsupportedError: No driver, another GPU, a side of over 2^31 - 2^13, or a graph is captured
            and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    check_sides(problem)
    config = config or choose(
        problem,
        device_facts(device).sm_count,
        dtype=_NAMES[dtype],
        machine=machine_of(device),
        activation=epilogue.activation,
    )
    numbers = Numbers(_NAMES[dtype], _NAMES[dtype], _NAMES[epilogue.out_dtype])
    return planned(problem, numbers, epilogue.activation, epilogue.has_residual, device, config)


def check_sides(problem: Problem) -> None:
    """Refuse what the kernel could not count.

    Raises:
        UnsupportedError: A side of over 2^31 - 2^13.
    """
    if (longest := max(problem.tokens, problem.out, problem.k)) > _LONGEST_SIDE:
        raise UnsupportedError(
            f"spmm_nm: a side of {longest}",
            need=f"at most {_LONGEST_SIDE} tokens, out-features and columns",
            hint="x, or w, in pieces",
        )


def planned(
    problem: Problem,
    numbers: Numbers,
    activation: str,
    has_residual: bool,
    device: int,
    config: Config,
) -> Launch:
    """The launch of a problem by a tile; its kernel is compiled and loaded if it was not before.

    Args:
        problem: Sizes, as `check_sides` passes them.
        numbers: Dtypes.
        activation: One of `kernel.ACTIVATIONS`.
        has_residual: Whether something is added at the end.
        device: Ordinal of the GPU.
        config: The tile.
    """
    direct = stores_directly(problem.out // fold_of(activation), numbers.out)
    spec = spec_of_numbers(config, numbers, activation, has_residual, direct)
    kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
    grid, sizes = grid_of(kernel, config, problem)
    return Launch(kernel, config, problem, ELEMENTS.get(numbers.x), grid, sizes)


def grid_of(
    kernel: Kernel, config: Config, problem: Problem
) -> tuple[int, tuple[int, int, int, int, int, int, int]]:
    """Blocks of a launch, and what its kernel is told of the problem.

    Args:
        kernel: Loaded.
        config: Its tile.
        problem: Sizes.
    """
    out_tiles = ceil(ceil(problem.out / config.out) / config.cluster_out)
    token_tiles = ceil(ceil(problem.tokens / config.tokens) / config.cluster_tokens)
    group = max(1, RASTER_TOKENS // (config.tokens * config.cluster_tokens))
    group = min(group, token_tiles)  # times out_tiles it must stay in 32 bits
    # A cluster that shares a tile has this one only; all others walk over tiles.
    clusters = out_tiles * token_tiles
    if config.cluster_k == 1:
        clusters = min(clusters, max_active_clusters(kernel))
    sizes = (problem.tokens, problem.out, stages_of_k(config, problem), out_tiles, token_tiles)
    return clusters * config.cluster, (*sizes, group, rows_of_x(config, problem.tokens))


def forget_launches() -> None:
    """Plan every launch anew, and whether layers launch at all; kernels stay loaded."""
    forget_counts()
    launch_for.cache_clear()
    _BOUND.clear()


def address_of(tensor: Tensor | None) -> int:
    """Where a tensor lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


@in_phase("sparse", "spmm_nm")
def run(
    w: NM,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """The product y = act(alpha * x @ w^T + bias) + residual, of arguments that were checked.

    Args:
        w: [out, k], 2:4, bfloat16 or float16, its parts contiguous.
        x: [..., k], any strides.
        bias: [out] or None.
        residual: As y, or None.
        activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`.
        alpha: What the sums are multiplied by.
        out_dtype: Of y.
        config: The tile; None chooses one.

    Returns:
        [..., out], of swiglu [..., out / 2]; contiguous.
    """
    y = x.new_empty((*x.shape[:-1], w.shape[0] // fold_of(activation)), dtype=out_dtype)
    if y.numel():
        enqueue(y, w, x, bias, residual, activation, alpha, config)
    return y


def enqueue(
    y: Tensor,
    w: NM,
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    alpha: float = 1,
    config: Config | None = None,
) -> None:
    """`run` into memory that is there already; nothing is checked.

    Args:
        y: [..., out], contiguous, on 16 bytes, not empty; all is written.
        w: As for `run`, like all the rest.
        x: [..., k].
        bias: [out] or None.
        residual: As y, or None.
        activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`.
        alpha: What the sums are multiplied by.
        config: The tile; None chooses one.
    """
    out, k = w.shape
    out_dtype = y.dtype
    tokens = x.numel() // k
    row = k
    if not x.is_contiguous() or k % 8 != 0 or x.data_ptr() % 16 != 0:
        x = rows_for_tma(x)
        row = x.stride(0)
    if bias is not None:
        bias = bias.contiguous()
    if residual is not None:
        residual = residual.contiguous()
        if residual.data_ptr() % 16:
            residual = residual.clone()  # read 16 bytes at a time
    device = x.get_device()
    turn = Turn(current_stream(device), starts_early(w.values, w.meta))
    # All that a launch depends on, and nothing else: equal keys are the same launch.
    key = (
        (x.data_ptr(), w.values.data_ptr(), w.meta.data_ptr(), y.data_ptr()),
        (0 if bias is None else bias.data_ptr(), 0 if residual is None else residual.data_ptr()),
        *(tokens, out, k, row, x.dtype, out_dtype, activation, alpha, config, device, turn),
    )
    bound = _BOUND.get(key)
    if bound is None:
        epilogue = Epilogue(out_dtype, activation, residual is not None)
        launch = launch_for(Problem(tokens, out, k), x.dtype, epilogue, device, config)
        bound = _BOUND.keep(key, launch.bind(turn, key[0], row, key[1], alpha))
    bound()
