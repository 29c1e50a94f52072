"""The kernel of small blocks on a GPU; as device.py, which comes here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...formats.bsr import BSR
from ...launch import Bound, Kernel, current_stream, encode, max_active_blocks
from .fragments import STRIPS, Fragments
from .fragments_cost import rows_of_x
from .fragments_kernel import SCALARS, FragmentConfig
from .grains import grain_of
from .launching import (
    BOUND,
    ELEMENTS,
    NAMES,
    Epilogue,
    address,
    as_float32,
    check_sizes,
    loaded,
    on_16_bytes,
    readable,
)
from .plan import Problem
from .ready import keep_for_graph, layout_of
from .schedule import raster_group, token_tiles


@dataclass(frozen=True)
class FragmentLaunch:
    """All of a call but its pointers.

    Attributes:
        kernel: It is loaded.
        config: The tile.
        problem: Sizes.
        pairs: Of strips of the weight.
        dtype: Of x.
    """

    kernel: Kernel
    config: FragmentConfig
    problem: Problem
    pairs: int
    dtype: str

    def __call__(
        self,
        w: tuple[Fragments, Tensor],
        x: Tensor,
        y: Tensor,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        alpha: float = 1.0,
    ) -> None:
        """Put the kernel on torch's current stream; nothing waits for it.

        Args:
            w: The weight: `ready_fragments`.
            x: [tokens, k], rows that start on 16 bytes, neighbouring columns.
            y: [tokens, out], contiguous; all of it is written.
            bias: [out] or None.
            residual: [tokens, out], contiguous, or None.
            alpha: What the sum is multiplied by.
        """
        pointers = (*_pointers(*w), y.data_ptr(), address(bias), address(residual))
        stream = current_stream(self.kernel.device)
        self.bind(stream, x.data_ptr(), x.stride(0), pointers, alpha)()

    def bind(self, stream: int, x: int, row: int, pointers: tuple[int, ...], alpha: float) -> Bound:
        """The launch with its arguments.

        Args:
            stream: Handle of the stream.
            x: Address of the tokens.
            row: Elements from one of them to the next.
            pointers: Addresses of the weights, their words, slots, slabs and pairs, of y, bias and
                residual, 0 where there is none.
            alpha: What the sum is multiplied by.

        Raises:
            ArgumentError: alpha is no number.
        """
        p, c = self.problem, self.config
        scalars = SCALARS.pack(
            *pointers,
            as_float32(alpha),
            *(p.tokens, p.out, self.pairs, token_tiles(c, p.tokens)),
            *(raster_group(c, p.tokens), rows_of_x(c, p.tokens)),
        )
        x_map = encode(
            x,
            ELEMENTS[self.dtype],
            (p.k, p.tokens),
            (row * 2,),
            (64, rows_of_x(c, p.tokens)),
            swizzle=128,
        )
        count = self.pairs * STRIPS * token_tiles(c, p.tokens)
        return self.kernel.bind(min(count, max_active_blocks(self.kernel)), x_map + scalars, stream)


def _pointers(layout: Fragments, values: Tensor) -> tuple[int, ...]:
    tables = (layout.words, layout.slots, layout.slabs, layout.pairs)
    return (values.data_ptr(), *(each.data_ptr() for each in tables))


@lru_cache(maxsize=4096)
def fragment_launch_for(
    problem: Problem,
    pairs: int,
    dtype: torch.dtype,
    epilogue: Epilogue,
    device: int,
    config: FragmentConfig,
) -> FragmentLaunch:
    """The launch of a problem; compiles and loads its kernel where that was not done before.

    Args:
        problem: Sizes, all positive.
        pairs: Of strips of the weight.
        dtype: Of x and w: bfloat16 or float16.
        epilogue: What happens to the sums.
        device: Ordinal of the GPU.
        config: The tile.

    Raises:
        UnsupportedError: No driver, another GPU, a side or a number of items of over 2^31 - 2^13,
            or a graph is captured and the kernel is not loaded yet.
        CompileError: The kernel does not compile.
    """
    check_sizes(problem, pairs * STRIPS * token_tiles(config, problem.tokens))
    kernel = loaded(config, problem, dtype, epilogue, device)
    return FragmentLaunch(kernel, config, problem, pairs, NAMES[dtype])


def run_fragments(
    w: BSR,
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    epilogue: Epilogue,
    alpha: float,
    config: FragmentConfig,
) -> Tensor:
    """`device.run` by a tile of this kernel, into y.

    Args:
        w: [out, k], bfloat16 or float16.
        x: [..., k], any strides, one token or more.
        y: [..., out], contiguous.
        bias: [out] or None.
        residual: As y, or None.
        epilogue: What happens to the sums.
        alpha: What they are multiplied by.
        config: The tile, of a grain that the weight has.

    Returns:
        y.
    """
    (out, k), device, grain = w.shape, x.get_device(), grain_of(config)
    layout, values = layout_of(w).take(w, grain)
    assert isinstance(layout, Fragments)
    keep_for_graph(w, grain)
    tokens = x.numel() // k
    x, row = readable(x, k)
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else on_16_bytes(residual)
    stream = current_stream(device)
    pointers = (
        *_pointers(layout, values),
        *(y.data_ptr(), address(bias), address(residual)),
    )
    # All that a launch depends on, and nothing else: equal keys are the same launch.
    key = (
        *(pointers, x.data_ptr(), tokens, out, k, row, x.dtype, epilogue, alpha),
        *(config, device, stream),
    )
    bound = BOUND.get(key)
    if bound is None:
        problem, pairs = Problem(tokens, out, k), len(layout.pairs)
        launch = fragment_launch_for(problem, pairs, x.dtype, epilogue, device, config)
        bound = BOUND.keep(key, launch.bind(stream, x.data_ptr(), row, pointers, alpha))
    bound()
    return y
