"""Which windows a step sees: a function of the seed and the step alone.

Position `step * batch + slot` of an endless sequence of shuffled passes over the windows. A run
that is resumed, or split over more processes, sees the same windows at the same steps.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ArgumentError, CalibrationError
from .options import RecoverOptions


@dataclass(frozen=True)
class Corpus:
    """Token windows [1, tokens] of one length; those behind `train` are held out.

    Windows are named by one index: training windows first, held-out ones after them.

    Attributes:
        train: Windows to train on, in any number; they are seen again when they run out.
        held_out: Windows to stop by, never trained on.

    Raises:
        CalibrationError: No window to train on, or one that is not [1, tokens] of the others'
            length.

    Example:
        >>> Corpus([torch.zeros(1, 8, dtype=torch.int64)], []).tokens
        8
    """

    train: Sequence[Tensor]
    held_out: Sequence[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not len(self.train):
            raise CalibrationError("no window", need="at least one window", hint="a longer text")
        for window in (*self.train, *self.held_out):
            if window.dim() != 2 or window.shape[0] != 1 or window.shape[1] != self.tokens:
                raise CalibrationError(
                    f"a window of shape {list(window.shape)}",
                    need=f"[1, tokens], as long as the others: {self.tokens}",
                    hint="leave shorter windows out",
                )

    @property
    def tokens(self) -> int:
        """Tokens of a window."""
        return self.train[0].shape[-1]

    def check_length(self, tokens: int) -> None:
        """Refuse windows shorter or longer than asked.

        Raises:
            CalibrationError: They are.
        """
        if self.tokens != tokens:
            raise CalibrationError(
                f"windows of {self.tokens} tokens",
                need=f"windows of {tokens} tokens, as the options say",
                hint=f"window_tokens={self.tokens}, or a longer text",
            )

    def batch(self, indices: Sequence[int]) -> Tensor:
        """Windows by index, [len(indices), tokens]."""
        count = len(self.train)
        picked = [self.train[i] if i < count else self.held_out[i - count] for i in indices]
        return torch.cat(picked)

    def digest(self) -> str:
        """SHA-256 of all windows."""
        digest = hashlib.sha256()
        for window in (*self.train, *self.held_out):
            digest.update(repr(window.tolist()).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Part:
    """What one process runs at once: windows, and their places in the batch of all processes.

    Attributes:
        slots: Places in the batch of the step.
        indices: Windows of the corpus.
    """

    slots: tuple[int, ...]
    indices: tuple[int, ...]


def step_windows(step: int, count: int, options: RecoverOptions) -> list[int]:
    """Indices of the windows of a step, of `count` in all.

    Example:
        >>> sorted(step_windows(0, 4, RecoverOptions(batch_windows=4)))
        [0, 1, 2, 3]
    """
    found = []
    for position in range(step * options.batch_windows, (step + 1) * options.batch_windows):
        turn, place = divmod(position, count)
        found.append(_shuffled(count, turn, options.seed)[place])
    return found


def step_parts(step: int, count: int, options: RecoverOptions, rank: int, world: int) -> list[Part]:
    """What process `rank` of `world` runs in a step: every world-th window, in equal parts.

    The mean gradient over parts, then over processes, is that of the whole batch.

    Example:
        >>> options = RecoverOptions(batch_windows=4, accumulation=2)
        >>> [part.slots for part in step_parts(0, 9, options, 1, 2)]
        [(1,), (3,)]
    """
    windows = step_windows(step, count, options)
    slots = range(rank, options.batch_windows, world)
    size = len(slots) // options.accumulation
    parts = [slots[first : first + size] for first in range(0, len(slots), size)]
    return [Part(tuple(part), tuple(windows[slot] for slot in part)) for part in parts]


def check_split(options: RecoverOptions, world: int) -> None:
    """Refuse a batch that processes cannot share equally.

    Raises:
        ArgumentError: They cannot.
    """
    parts = world * options.accumulation
    if options.batch_windows % parts:
        raise ArgumentError(
            f"{options.batch_windows} windows a step for {world} processes, each in "
            f"{options.accumulation} parts",
            need=f"a multiple of {parts}",
            hint=f"batch_windows={parts * -(-options.batch_windows // parts)}",
        )


def drawn_positions(
    step: int, slots: Sequence[int], tokens: int, options: RecoverOptions
) -> list[Tensor] | None:
    """Positions of each window of a part at which logits are compared; None: all.

    The last position predicts nothing that the window holds and is never one of them. What is
    drawn depends on the step and the place in the batch, not on how processes share it.
    """
    if options.position_fraction == 1:
        return None
    count = max(1, round((tokens - 1) * options.position_fraction))
    found = []
    for slot in slots:
        generator = torch.Generator().manual_seed(
            random.Random(f"{options.seed} {step} {slot}").getrandbits(62)
        )
        found.append(torch.randperm(tokens - 1, generator=generator)[:count].sort().values)
    return found


def _shuffled(count: int, turn: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed} {turn}").shuffle(order)
    return order
