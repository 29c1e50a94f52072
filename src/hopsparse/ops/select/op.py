"""The largest scores of each row: checks, plan, run."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._call import is_plain
from .._product import is_dense, is_hopper, told
from .dispatch import register_on_gpu, run_reference, traced
from .plan import MOST_COLUMNS

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A rank is 32 bits and a place in a row is signed.
_LONGEST = 2**31 - 1


def select(
    scores: Tensor,
    k: int | Tensor,
    *,
    lengths: Tensor | None = None,
    top_p: float | Tensor | None = None,
    threshold: float | Tensor | None = None,
    sink: int = 0,
    recent: int = 0,
    most: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose columns of each row of scores: exactly, and the same on every device.

    The order: the last `recent` columns of a row, the last one first; then its first `sink` ones;
    then the others by their scores, the largest first, and of equal ones the lowest column first.
    -0.0 equals 0.0. NaN is above +inf, and all NaN are equal: a row that is damaged shows it.
    -inf means "not there" and is chosen only by `recent` or `sink`. A row takes the first k of that
    order, or fewer where fewer are there:

    - with `top_p`, only until they hold that part of the mass exp(score) of the row;
    - with `threshold`, only scores that are not below it (and `sink` and `recent`).

    Mass is counted in whole numbers, 2^32 for the largest score: what is 2^-33 of it counts as
    nothing, and where the largest is +inf or NaN, these alone have mass.

    Args:
        scores: [..., columns], float32, bfloat16 or float16, any strides; made contiguous.
        k: At most so many; a number, or int32 [...].
        lengths: int32 [...], columns of each row that exist; None: all.
        top_p: 0 to 1; a number, or float32 [...].
        threshold: A number, or float32 [...].
        sink: First columns that are chosen whatever their scores; they count against k.
        recent: Last ones, likewise.
        most: Columns of the result; None: those of the largest k that could be.

    Returns:
        indices: int32 [..., most], ascending, -1 behind the chosen ones.
        counts: int32 [...].

    Raises:
        ArgumentError: Arguments do not fit each other.
        UnsupportedError: A CUDA graph is being captured, and the kernel is not loaded yet.

    Example:
        >>> select(torch.tensor([3.0, 1.0, 3.0, 2.0]), 3, sink=1, recent=1)[0].tolist()
        [0, 2, 3]
    """
    _check_scores(scores)
    columns, rows = scores.shape[-1], scores.shape[:-1]
    for name, value in (("sink", sink), ("recent", recent)):
        check_count(name, value)
    width = width_of(k, most, columns)
    by, limits, number = limit_of(top_p, threshold, scores)
    ks, k_of_all = row_numbers("k", k, scores, torch.int32)
    ns, _ = row_numbers("lengths", columns if lengths is None else lengths, scores, torch.int32)
    flat = scores.detach().reshape(rows.numel(), columns).contiguous()
    run = _run_on_gpu if flat.is_cuda and is_plain(flat) else traced
    sizes = [int(k_of_all), width, min(sink, columns), min(recent, columns)]
    indices, counts = run(flat, ks, ns, by, limits, number, sizes)
    return indices.view(*rows, width), counts.view(rows)


def limit_of(top_p: Any, threshold: Any, scores: Tensor) -> tuple[str, Tensor | None, float]:
    """What ends a row besides k: how, with a number for each row or one for all.

    Raises:
        ArgumentError: Both, or numbers that fit no row.
    """
    if top_p is not None and threshold is not None:
        raise ArgumentError(
            "select: top_p and threshold together", need="one of the two", hint="top_p alone"
        )
    by, name, wanted = "rank", "none", 0.0
    if top_p is not None:
        by, name, wanted = "mass", "top_p", top_p
    elif threshold is not None:
        by, name, wanted = "threshold", "threshold", threshold
    if isinstance(wanted, float) and abs(wanted) > torch.finfo(torch.float32).max:
        wanted = math.copysign(math.inf, wanted)  # as float32 has it
    limits, number = row_numbers(name, wanted, scores, torch.float32)
    return by, limits, float(number)


def _check_scores(scores: object) -> None:
    if not is_dense(scores) or scores.dtype not in _DTYPES or scores.dim() < 1:
        raise ArgumentError(
            f"select: scores {told(scores)}",
            need="[..., columns] in float32, bfloat16 or float16",
            hint="scores.float()",
        )
    if scores.shape[-1] > _LONGEST:
        raise ArgumentError(
            f"select: rows of {scores.shape[-1]}",
            need=f"at most {_LONGEST}",
            hint="scores of blocks",
        )


def check_count(name: str, value: object, least: int = 0) -> None:
    """Refuse what is no number of columns.

    Raises:
        ArgumentError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LONGEST:
        raise ArgumentError(
            f"select: {name}={value!r}", need=f"a whole number from {least}", hint=str(least)
        )


def width_of(k: int | Tensor, most: int | None, columns: int) -> int:
    """Columns of the result.

    Raises:
        ArgumentError: A number that is none.
    """
    if not isinstance(k, Tensor):
        check_count("k", k, 1)
    if most is not None:
        check_count("most", most, 1)
    largest = columns if isinstance(k, Tensor) else min(k, columns)
    return largest if most is None else min(most, largest) if columns else 0


def row_numbers(
    name: str, value: Any, scores: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, float]:
    """Numbers [rows] on the device of the scores; or none, and one for all rows.

    Raises:
        ArgumentError: Neither one for each row nor one for all.
    """
    rows = scores.shape[:-1]
    if not isinstance(value, Tensor):
        _check_number(name, value)
        return None, value
    fits = is_dense(value) and value.dtype == dtype and value.shape == rows
    if not fits or value.device != scores.device:
        raise ArgumentError(
            f"select: {name} {told(value)}",
            need=f"{list(rows)} of {dtype} on {scores.device}, or one number",
            hint=f"{name}.to(scores.device, {dtype})",
        )
    if value.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_values(name, value, scores.shape[-1])
    return value.detach().reshape(-1).contiguous(), 0.0


def _check_number(name: str, value: Any) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool) and value == value
    if not number or (name == "top_p" and not 0 < value <= 1):
        need = "above 0 and at most 1" if name == "top_p" else "one number, or one for each row"
        raise ArgumentError(f"select: {name}={value!r}", need=need, hint="0.95")


def _check_values(name: str, value: Tensor, columns: int) -> None:
    """Values are looked at where that waits for nothing; a kernel takes the nearest it can use."""
    wrong = {
        "k": value < 0,
        "lengths": (value < 0) | (value > columns),
        "top_p": ~((value > 0) & (value <= 1)),
        "threshold": value.isnan(),
    }[name]
    if bool(wrong.any()):
        first = int(wrong.reshape(-1).nonzero()[0, 0])
        need = {
            "k": "0 and more",
            "lengths": f"0 to {columns}",
            "top_p": "above 0 and at most 1",
            "threshold": "numbers",
        }[name]
        raise ArgumentError(
            f"select: {name} of row {first} is {value.reshape(-1)[first].item()}",
            need=need,
            hint=f"{name}.clamp(...)",
        )


def _run_on_gpu(
    scores: Tensor,
    k: Tensor | None,
    lengths: Tensor | None,
    by: str,
    limit: Tensor | None,
    number: float,
    sizes: list[int],
) -> list[Tensor]:
    """The kernel where there is one for this GPU, and something to do."""
    rows, columns = scores.shape
    fits = rows > 0 and 0 < columns <= MOST_COLUMNS and sizes[1] > 0
    run = _run() if fits and is_hopper(scores.get_device()) else run_reference
    return run(scores, k, lengths, by, limit, number, sizes)


register_on_gpu(_run_on_gpu)


@cache
def _run() -> Callable[..., list[Tensor]]:
    """The launch, imported late: a process on the CPU needs neither a compiler nor a driver."""
    from .device import run

    return run
