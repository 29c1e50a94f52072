"""What the student is trained towards: a teacher that runs at every step, or once a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..prune import quiet
from ..units import bytes_text
from .capture import Head, Layout, UpToHead
from .logit_loss import FromHidden, FromTop, Target
from .machine import Machine
from .options import RecoverOptions
from .windows import Corpus


class Lesson(NamedTuple):
    """What the teacher says about some windows.

    Attributes:
        target: At the chosen positions, windows one after another.
        hidden: [windows, tokens, width] behind each block that is compared.
    """

    target: Target
    hidden: list[Tensor]


class Teacher(Protocol):
    """Gives lessons on windows of the corpus."""

    def lesson(self, indices: Sequence[int], positions: list[Tensor] | None) -> Lesson:
        """About windows by index, at these positions of each (None: all that predict)."""


def at_positions(stream: Tensor, positions: list[Tensor] | None) -> Tensor:
    """[windows, tokens, ...] -> [n, ...] at the positions; all but the last when None."""
    if positions is None:
        return stream[:, :-1].flatten(0, 1)
    return torch.cat([stream[i][where.to(stream.device)] for i, where in enumerate(positions)])


@dataclass(frozen=True)
class Live:
    """The teacher itself.

    Attributes:
        runner: The model up to its head.
        head: Its head.
        corpus: The windows.
        machine: Where it runs.
    """

    runner: UpToHead
    head: Head
    corpus: Corpus
    machine: Machine

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layout: Layout,
        corpus: Corpus,
        options: RecoverOptions,
        machine: Machine,
    ) -> Live:
        """Take a model as the teacher, on the device of `machine`."""
        blocks = layout.chosen(options.hidden_blocks) if options.hidden else ()
        moved = model.to(machine.device)
        head = Head.of(moved, layout, machine.dtype)
        return cls(UpToHead(moved, layout.head, blocks), head, corpus, machine)

    def lesson(self, indices: Sequence[int], positions: list[Tensor] | None) -> Lesson:
        """See `Teacher`."""
        with quiet(self.runner), self.machine.autocast():
            streams = self.runner(self.corpus.batch(indices).to(self.machine.device))
        return Lesson(FromHidden(at_positions(streams.last, positions), self.head), streams.hidden)


class Cached:
    """What the teacher said, window by window; the teacher is no longer needed.

    Each position keeps the `cache_top` likeliest tokens (4 bytes a token, 4 its log-probability)
    and the mass of the others; hidden states are kept in float32, where they are compared.

    Args:
        live: The teacher; each window is run by itself, once.
        indices: The windows that will be asked for.
        options: `cache_top` and `cache_limit`.
        tell: Called with windows done and windows in all.

    Raises:
        ArgumentError: It would take more than `cache_limit` bytes.
    """

    def __init__(
        self,
        live: Live,
        indices: Iterable[int],
        options: RecoverOptions,
        tell: Callable[[int, int], None] = lambda _, __: None,
    ) -> None:
        wanted = sorted(set(indices))
        self._device = live.machine.device
        self._kept: dict[int, tuple[FromTop, list[Tensor]]] = {}
        _check_room(live, len(wanted), options)
        for done, index in enumerate(wanted, 1):
            target, hidden = live.lesson([index], None)
            assert isinstance(target, FromHidden)
            with torch.no_grad():
                top = FromTop.of(target.hidden, target.head, _top(live, options))
            here = FromTop(top.tokens.cpu(), top.log_probs.cpu(), top.rest.cpu())
            self._kept[index] = (here, [each.cpu() for each in hidden])
            tell(done, len(wanted))

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        tensors = [
            tensor
            for target, hidden in self._kept.values()
            for tensor in (target.tokens, target.log_probs, target.rest, *hidden)
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def lesson(self, indices: Sequence[int], positions: list[Tensor] | None) -> Lesson:
        """See `Teacher`."""
        kept = [self._kept[index] for index in indices]
        targets = [target for target, _ in kept]
        if positions is not None:
            pairs = zip(targets, positions, strict=True)
            targets = [target.rows(where) for target, where in pairs]
        whole = FromTop(
            torch.cat([target.tokens for target in targets]).to(self._device),
            torch.cat([target.log_probs for target in targets]).to(self._device),
            torch.cat([target.rest for target in targets]).to(self._device),
        )
        layers = zip(*(hidden for _, hidden in kept), strict=True)
        return Lesson(whole, [torch.cat(layer).to(self._device) for layer in layers])


def cache_bytes(windows: int, tokens: int, top: int, width: int, blocks: int) -> int:
    """Bytes of the cache: 8 * `top` + 4 a predicting position, 4 * `width` a token and block.

    Example:
        >>> cache_bytes(windows=300, tokens=512, top=64, width=576, blocks=0)
        79102800
    """
    return windows * ((tokens - 1) * (8 * top + 4) + tokens * blocks * width * 4)


def _check_room(live: Live, windows: int, options: RecoverOptions) -> None:
    width = live.head.weight.shape[1]
    blocks = len(live.runner.blocks)
    top = _top(live, options)
    needed = cache_bytes(windows, live.corpus.tokens, top, width, blocks)
    if needed > options.cache_limit:
        raise ArgumentError(
            f"a cache of the teacher of {bytes_text(needed)} for {windows} windows",
            need=f"at most {bytes_text(options.cache_limit)}",
            hint="a smaller cache_top, fewer hidden_blocks, or cache_teacher=False",
        )


def _top(live: Live, options: RecoverOptions) -> int:
    return min(options.cache_top, live.head.weight.shape[0])
