"""Many tokens by a packed weight on a GPU: tokens are laid, and the product starts behind that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...launch import (
    Bound,
    Element,
    Kernel,
    KnownLaunches,
    current_stream,
    device_facts,
    encode,
    kernel_for,
)
from ...plan import KernelSpec
from ...ranges import in_phase
from .packed import Packed
from .tiles import UNIT
from .wide import (
    ARRANGE_ARGS,
    ARRANGE_THREADS,
    PIECE_COLUMNS,
    SCALARS,
    Config,
    arrange_spec,
    wide_spec,
)
from .wide_cost import choose

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ELEMENTS = {torch.bfloat16: Element.BF16, torch.float16: Element.F16}
_LONGEST_ROW = 2**40
_MOST = KnownLaunches.MOST


@dataclass(frozen=True)
class Both:
    """The two launches of a call."""

    arrange: Bound
    multiply: Bound


# By all that they depend on, as `KnownLaunches` has single ones.
_BOTH: dict[tuple[object, ...], Both] = {}


def config_for(w: Packed, tokens: int, device: int) -> Config:
    """The tile that runs on a GPU."""
    return choose(w.shape, tokens, w.nbytes, device_facts(device).sm_count).config


@in_phase("sparse", "spmm_csr")
def multiply_wide(
    w: Packed, x: Tensor, bias: Tensor | None, config: Config | None = None
) -> Tensor:
    """The product x @ w.T + bias by wgmma, of arguments that were checked.

    Args:
        w: [out, k].
        x: [tokens, k] on a Hopper GPU, with a token and a column at least, any strides.
        bias: [out] or None.
        config: The tile; None is the one that is predicted to be fastest.

    Returns:
        [tokens, out], contiguous.

    Raises:
        UnsupportedError: No driver; or a graph is captured and a kernel is not loaded yet.
        CompileError: A kernel does not compile.
    """
    bias = None if bias is None else bias.contiguous()
    (rows, k), tokens, device = w.shape, x.shape[0], x.get_device()
    config = config or config_for(w, tokens, device)
    if (k > 1 and x.stride(1) != 1) or not 0 <= x.stride(0) * 2 < _LONGEST_ROW:
        x = x.contiguous()
    y = x.new_empty((tokens, rows))
    laid = x.new_empty((tokens, w.units * UNIT))
    stream = current_stream(device)
    # All that the launches depend on, and nothing else: equal keys are the same launches.
    parts = tuple(each.data_ptr() for each in (w.words, w.prefixes, w.values, w.starts))
    addresses = (x.data_ptr(), laid.data_ptr(), 0 if bias is None else bias.data_ptr())
    key = (
        *(parts, addresses, y.data_ptr(), x.stride(0), tokens, w.shape, w.room),
        *(x.dtype, config, device, stream),
    )
    bound = _BOTH.get(key)
    if bound is None:
        arranged = _arrange(x, laid, stream)
        pointers = (*parts, addresses[2], y.data_ptr())
        made = Both(arranged, _multiply(w, laid, pointers, config, stream))
        if len(_BOTH) >= _MOST:
            _BOTH.clear()
        bound = _BOTH[key] = made
    bound.arrange()
    bound.multiply()
    return y


def load_wide(w: Packed, max_tokens: int) -> None:
    """Compile and load what `multiply_wide` runs for up to so many tokens.

    Args:
        w: On a Hopper GPU.
        max_tokens: 1 or more.

    Raises:
        CompileError, UnsupportedError: As for `multiply_wide`.
    """
    device, dtype = w.values.get_device(), _DTYPES[w.values.dtype]
    configs = {config_for(w, tokens, device) for tokens in range(1, max_tokens + 1)}
    specs = [arrange_spec(), *(wide_spec(each, dtype, w.room) for each in configs)]
    # Side by side what is then loaded one after the other.
    for built in KernelCache.default().compile_all(specs):
        if built.error is not None:
            raise built.error
    for spec in specs:
        _loaded(spec, device)


def _arrange(x: Tensor, laid: Tensor, stream: int) -> Bound:
    tokens, k = x.shape
    pitch, pieces = x.stride(0) * 2, laid.shape[1] // PIECE_COLUMNS
    vector = k % 8 == 0 and x.data_ptr() % 16 == 0 and pitch % 16 == 0
    args = ARRANGE_ARGS.pack(x.data_ptr(), laid.data_ptr(), pitch, tokens, k, pieces, vector)
    blocks = -(-tokens * pieces // ARRANGE_THREADS)
    return _loaded(arrange_spec(), x.get_device()).bind(blocks, args, stream)


def _multiply(
    w: Packed, laid: Tensor, pointers: tuple[int, ...], config: Config, stream: int
) -> Bound:
    tokens, (rows, _) = laid.shape[0], w.shape
    x_rows, k = config.rows_of_x(tokens), laid.shape[1]
    x_map = encode(
        laid.data_ptr(),
        _ELEMENTS[laid.dtype],
        (k, tokens),
        (k * 2,),
        (UNIT, x_rows),
        swizzle=128,
    )
    sizes = (rows, tokens, w.units, config.steps(w.units), config.token_tiles(tokens), x_rows)
    kernel = _loaded(wide_spec(config, _DTYPES[laid.dtype], w.room), laid.get_device())
    args = x_map + SCALARS.pack(*pointers, *sizes)
    # Always early: it reads nothing but its weight before it waits, which was there before the
    # launch ahead began.
    return kernel.bind(config.blocks(rows, tokens), args, stream, pdl=True)


def _loaded(spec: KernelSpec, device: int) -> Kernel:
    return kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
