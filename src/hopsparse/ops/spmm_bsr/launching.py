"""What both kernels of spmm_bsr do with a call's tensors before they are launched."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...errors import ArgumentError, UnsupportedError
from ...launch import Element, Kernel, KnownLaunches, kernel_for
from .._rows import rows_for_tma
from .fragments_kernel import FragmentConfig
from .kernel import Config
from .plan import Problem, spec_of

# The kernels count in 32 bits, up to the end of the last tile or round.
_LONGEST = 2**31 - 2**13
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
ELEMENTS = {"bfloat16": Element.BF16, "float16": Element.F16}
#: Launches by all that they depend on.
BOUND = KnownLaunches()


@dataclass(frozen=True)
class Epilogue:
    """What happens to a sum before it is stored; what a kernel is compiled for.

    Attributes:
        out_dtype: Dtype of y.
        activation: One of `kernel.ACTIVATIONS`.
        has_residual: Whether something is added at the end.
    """

    out_dtype: torch.dtype
    activation: str = "none"
    has_residual: bool = False


def check_sizes(problem: Problem, items: int) -> None:
    """Refuse what 32 bits cannot count.

    Args:
        problem: Sizes.
        items: Tiles of y.

    Raises:
        UnsupportedError: A side or a number of items of over 2^31 - 2^13.
    """
    longest = max(problem.tokens, problem.out, problem.k, items)
    if longest > _LONGEST:
        raise UnsupportedError(
            f"spmm_bsr: {longest} tokens, out-features, columns or tiles",
            need=f"at most {_LONGEST} of each",
            hint="x, or w, in pieces",
        )


def loaded(
    config: Config | FragmentConfig,
    problem: Problem,
    dtype: torch.dtype,
    epilogue: Epilogue,
    device: int,
) -> Kernel:
    """The kernel of a tile, compiled and loaded where that was not done before.

    Args:
        config: The tile, of either kernel.
        problem: Sizes.
        dtype: Of x and w.
        epilogue: What happens to the sums.
        device: Ordinal of the GPU.

    Raises:
        UnsupportedError: No driver, another GPU, or a graph is captured and it is not loaded yet.
        CompileError: It does not compile.
    """
    spec = spec_of(
        config,
        problem.out,
        NAMES[dtype],
        out_dtype=NAMES[epilogue.out_dtype],
        activation=epilogue.activation,
        residual=epilogue.has_residual,
    )
    return kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)


def as_float32(alpha: float) -> float:
    """What a sum is multiplied by; beyond float32 it is infinite, as on the CPU.

    Raises:
        ArgumentError: It is no number.
    """
    # A tensor would pass as a number, and be found again by its identity, not by its value.
    if not isinstance(alpha, Real):
        raise ArgumentError(
            f"spmm_bsr: alpha={alpha!r}", need="a number", hint="alpha.item(), once"
        )
    return ctypes.c_float(alpha).value


def address(tensor: Tensor | None) -> int:
    """Of its first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def readable(x: Tensor, k: int) -> tuple[Tensor, int]:
    """Tokens as TMA reads them, and elements from one to the next."""
    if x.is_contiguous() and k % 8 == 0 and x.data_ptr() % 16 == 0:
        return x, k
    rows = rows_for_tma(x)
    return rows, rows.stride(0)


def on_16_bytes(residual: Tensor) -> Tensor:
    """It, contiguous, or a copy that starts on 16 bytes."""
    residual = residual.contiguous()
    return residual.clone() if residual.data_ptr() % 16 else residual
