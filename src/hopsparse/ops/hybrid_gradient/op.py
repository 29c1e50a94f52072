"""What is sent of a gradient in one step, and what is kept of it: checks, plan, run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._product import is_dense, is_hopper, told
from .dispatch import register_on_gpu, run_reference, traced
from .remainder import CODERS, Remainder

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def hybrid_gradient(
    gradient: Tensor,
    residual: Tensor | None,
    k: int,
    remainder: Remainder | None = "int4",
    *,
    every: int = 1,
    phase: int = 0,
) -> tuple[Tensor, ...]:
    """Take the k largest values of gradient + residual exactly, round the others, keep the rest.

    Sums are float32. Of values of equal magnitude the first are taken. The others are rounded as
    `remainder` says (`hopsparse.ops.hybrid_gradient.remainder`), in blocks, of which one of `every`
    is rounded, from `phase` on; what was taken is zero there. On a Hopper GPU a few kernels that
    nothing waits for, and that a CUDA graph may hold; torch elsewhere; the same bits everywhere.

    Args:
        gradient: [n], float32, bfloat16 or float16.
        residual: float32 [n] on the device of the gradient: what was not sent before; or None.
        k: How many values are taken, 0 to n.
        remainder: "int8", "int4", "int3.5", "int3" or "sign"; None: the others are kept whole.
        every: Of so many blocks one is rounded.
        phase: The first of those, less than `every`.

    Returns:
        values: float32 [k], in the order of their places.
        counts, offsets: int32 [chunks] and int16 [k], their places (`indices.decode_indices`).
        codes, scales: uint8 [rows, bytes] and bfloat16 [rows].
        rest: float32 [n, filled up to whole blocks]: what is to be kept.
        finite: uint8 [1]: 0 where there was Inf or NaN in the sum. All others are then what a
            gradient of zeros gives.

    Raises:
        ArgumentError: Arguments do not fit each other.
        UnsupportedError: A graph is being captured, and the kernels are not loaded yet.

    Example:
        >>> gradient = torch.tensor([0.5, -7.0, 1.0, 3.0])
        >>> values, _, _, _, scales, rest, finite = hybrid_gradient(gradient, None, k=1)
        >>> values.tolist(), scales.tolist(), finite.tolist()
        ([-7.0], [0.427734375], [1])
        >>> rest[1:4].tolist()
        [0.0, 0.14453125, 0.005859375]
    """
    _check(gradient, residual)
    _check_choice(gradient.numel(), k, remainder, every, phase)
    return tuple(traced(gradient.detach(), residual, k, remainder, every, phase))


def _check_choice(n: int, k: int, remainder: str | None, every: int, phase: int) -> None:
    if type(k) is not int or not 0 <= k <= n:
        raise ArgumentError(
            f"hybrid_gradient: k = {k} of {n} values",
            need="0 to the number of values",
            hint=f"k = {max(0, min(int(k), n))}",
        )
    if remainder is not None and remainder not in CODERS:
        raise ArgumentError(
            f"hybrid_gradient: remainder={remainder!r}",
            need=f"{', '.join(CODERS)} or None",
            hint='"int4"',
        )
    if not 0 <= phase < every:
        raise ArgumentError(
            f"hybrid_gradient: phase {phase} of {every}",
            need="every of 1 or more, and a phase of 0 to every - 1",
            hint="every=1, phase=0",
        )


def _check(gradient: Tensor, residual: Tensor | None) -> None:
    if not is_dense(gradient) or gradient.ndim != 1 or gradient.dtype not in _DTYPES:
        raise ArgumentError(
            f"hybrid_gradient: gradient {told(gradient)}",
            need="[n] in float32, bfloat16 or float16",
            hint="gradient.flatten()",
        )
    if residual is not None and not (
        is_dense(residual)
        and (residual.shape, residual.dtype) == (gradient.shape, torch.float32)
        and residual.device == gradient.device
    ):
        raise ArgumentError(
            f"hybrid_gradient: residual {told(residual)}",
            need=f"{list(gradient.shape)} of torch.float32 on {gradient.device}",
            hint="rest[:n] of the call before",
        )


def _run_on_gpu(
    gradient: Tensor, residual: Tensor | None, k: int, remainder: str | None, every: int, phase: int
) -> list[Tensor]:
    """The kernels where there are some for this GPU, and something to do."""
    if gradient.numel() == 0 or not is_hopper(gradient.get_device()):
        return run_reference(gradient, residual, k, remainder, every, phase)
    return _run()(gradient, residual, k, remainder, every, phase)


register_on_gpu(_run_on_gpu)


@cache
def _run() -> Callable[..., list[Tensor]]:
    """The launches, imported late: a process on the CPU needs neither a compiler nor a driver."""
    from .device import run

    return run
