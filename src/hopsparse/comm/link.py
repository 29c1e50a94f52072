"""How fast ranks reach each other and how fast they code: measured once, the same on all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError
from .average import Part, decoded_mean, prepare
from .coding import Layout
from .collective import Group, gather
from .memory import Kept
from .options import HybridOptions
from .state import HybridState

_SMALL, _LARGE = 16, 1 << 20
_ROUNDS = 3
# A link on which a mebibyte takes longer is slow enough to be measured by one.
_SLOW_S = 0.25
# One on which it takes less has to be given more: what a launch takes hides what a byte does.
_FAST_S, _LARGEST = 2e-3, 64 << 20
_SIDE = 1024


@dataclass(frozen=True)
class Link:
    """Costs of one rank, in seconds: those of the slowest.

    Attributes:
        reduce_s: An all-reduce of next to nothing.
        reduce_byte_s: A byte more of float32.
        half_byte_s: A byte more of bfloat16, with the conversions to it and back.
        gather_s: An all-gather of next to nothing.
        gather_byte_s: A byte more that a rank sends.
        code_value_s: Coding a value, and decoding it from two ranks.
        low_rank_value_s: A value of a matrix in the products of PowerSGD of rank 1.
        half_s: An all-reduce of next to nothing in bfloat16, with the conversions; 0: as in
            float32.
    """

    reduce_s: float
    reduce_byte_s: float
    half_byte_s: float
    gather_s: float
    gather_byte_s: float
    code_value_s: float
    low_rank_value_s: float
    half_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """What an all-gather reaches.

        Example:
            >>> Link(1e-4, 1e-8, 1e-8, 1e-4, 8e-8, 1e-8, 1e-9).bytes_per_s
            12500000.0
        """
        return 1 / self.gather_byte_s

    def to_tensor(self) -> Tensor:
        """As a checkpoint keeps it: float64 [8]."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def from_tensor(cls, numbers: Tensor) -> Link:
        """What `to_tensor` gave.

        Raises:
            ArgumentError: It did not.
        """
        known = len(fields(cls))
        # Links of seven are from before conversions were measured on their own.
        whole = numbers.numel() in (known - 1, known) and bool((numbers[: known - 1] > 0).all())
        if not whole or not bool(((numbers >= 0) & numbers.isfinite()).all()):
            raise ArgumentError(
                f"a link of {numbers.tolist()}",
                need=f"{known} times, all but the last above 0",
                hint="measure_link",
            )
        return cls(*numbers.double().tolist())


def measure_link(group: Group, options: HybridOptions, device: torch.device) -> Link:
    """Measure; every rank must call it at the same time, and all get the same answer.

    It exchanges 6 MiB over a slow link and 18 MiB over a quick one. Where a mebibyte takes less
    than 2 ms it exchanges up to 1.2 GiB.

    Args:
        group: Ranks.
        options: What is to be coded.
        device: Where gradients are.
    """
    reduce_s, reduce_byte_s = _line(group, device, lambda n: _reduced(group, device, n))
    half_s, half_byte_s = _line(group, device, lambda n: _halved(group, device, n))
    sent = group.size() - 1
    gather_s, gather_byte_s = _line(group, device, lambda n: _gathered(group, device, n))
    own = torch.tensor(
        [_coding(options, device), _multiplying(device)], dtype=torch.float64, device=device
    )
    code_value_s, low_rank_value_s = gather(own, group).amax(0).tolist()
    return Link(
        reduce_s,
        reduce_byte_s,
        half_byte_s,
        gather_s,
        gather_byte_s / max(sent, 1),
        code_value_s,
        low_rank_value_s,
        half_s,
    )


def _line(
    group: Group, device: torch.device, exchanged: Callable[[int], object]
) -> tuple[float, float]:
    """Seconds of a small exchange, and of a byte more in a large one."""
    small = _slowest(group, device, lambda: exchanged(_SMALL), _ROUNDS)
    size, large = _LARGE, _slowest(group, device, lambda: exchanged(_LARGE), 1)
    # All ranks know the same time, and go the same way.
    while large < _FAST_S and size < _LARGEST:
        size *= 8
        large = _slowest(group, device, partial(exchanged, size), 1)
    if large < _SLOW_S:
        large = _slowest(group, device, partial(exchanged, size), _ROUNDS)
    return small, max(large - small, 1e-9) / (size - _SMALL)


def _slowest(group: Group, device: torch.device, work: Callable[[], object], rounds: int) -> float:
    """The best time of the rank whose best is worst."""
    work()
    best = min(_seconds(device, work) for _ in range(rounds))
    return float(gather(torch.tensor([best], dtype=torch.float64, device=device), group).max())


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _reduced(group: Group, device: torch.device, nbytes: int) -> None:
    dist.all_reduce(torch.ones(nbytes // 4, device=device), group=group)


def _halved(group: Group, device: torch.device, nbytes: int) -> None:
    whole = torch.ones(nbytes // 2, device=device)
    half = whole.bfloat16()
    dist.all_reduce(half, group=group)
    whole.copy_(half)


def _gathered(group: Group, device: torch.device, nbytes: int) -> None:
    gather(torch.ones(nbytes, dtype=torch.uint8, device=device), group)


def _coding(options: HybridOptions, device: torch.device) -> float:
    """Seconds a value, for coding it and decoding it from two ranks."""
    values = torch.randn(_SIDE * _SIDE, generator=torch.Generator().manual_seed(0)).to(device)
    state = HybridState(**{**options.facts(), "dense_below": 0, "warmup": 0})
    layout = Layout.of(values.numel(), state.options, 0, ranks=2)

    def work() -> None:
        pending = prepare(state, Part("measured", values), 2)
        tensors = [each.flatten() for each in (*pending.exact, *pending.coded)]
        decoded_mean(layout, [tensors, tensors], None)
        state.memory.kept["measured"] = Kept(values.numel(), residual=pending.local)

    work()
    return min(_seconds(device, work) for _ in range(_ROUNDS)) / values.numel()


def _multiplying(device: torch.device) -> float:
    """Seconds a value of a matrix, for the products and copies of PowerSGD of rank 1."""
    matrix = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0)).to(device)
    q = matrix[:, :1].clone()

    def work() -> None:
        copy = matrix.clone().add_(matrix)
        p = copy @ q
        matrix.sub_(torch.mm(p, (copy.T @ p).T, out=copy) * 0)

    work()
    return min(_seconds(device, work) for _ in range(_ROUNDS)) / matrix.numel()
