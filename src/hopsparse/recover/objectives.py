"""What a stage of training runs and what it minimises: the whole model, or one block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..prune import Activations, quiet
from ..prune.activations import call
from .capture import Head, Layout, Streams, UpToHead
from .logit_loss import logit_loss
from .machine import Machine
from .options import RecoverOptions
from .teacher import Lesson, Teacher, at_positions
from .windows import Corpus, Part, drawn_positions


class Objective(Protocol):
    """One stage of training."""

    #: What is prepared, called and trained.
    module: nn.Module

    def loss(self, run: Callable[..., Any], part: Part, step: int) -> Tensor:
        """Mean loss on the windows of a part; `run` is the prepared module."""

    def held_out(self, index: int) -> float:
        """Loss on the held-out window of this index in the corpus, without a gradient."""


class EndToEnd:
    """The whole student: its logits and hidden states towards the teacher's.

    Args:
        model: The student.
        layout: Where its parts are.
        teacher: Its teacher.
        corpus: The windows.
        options: The losses.
        machine: Where it runs.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        teacher: Teacher,
        corpus: Corpus,
        options: RecoverOptions,
        machine: Machine,
    ) -> None:
        blocks = layout.chosen(options.hidden_blocks) if options.hidden else ()
        self.module: nn.Module = UpToHead(model, layout.head, blocks)
        self._head = Head.of(model, layout, machine.dtype)
        self._teacher = teacher
        self._corpus = corpus
        self._options = options
        self._machine = machine

    def loss(self, run: Callable[..., Any], part: Part, step: int) -> Tensor:
        """See `Objective`."""
        positions = drawn_positions(step, part.slots, self._corpus.tokens, self._options)
        windows = self._corpus.batch(part.indices).to(self._machine.device)
        lesson = self._teacher.lesson(part.indices, positions)
        streams = Streams(*run(windows))
        return self._compare(streams, lesson, windows, positions)

    def held_out(self, index: int) -> float:
        """See `Objective`."""
        windows = self._corpus.batch([index]).to(self._machine.device)
        lesson = self._teacher.lesson([index], None)
        with quiet(self.module), self._machine.autocast():
            streams = self.module(windows)
        with torch.no_grad():
            return float(self._compare(streams, lesson, windows, None))

    def _compare(
        self, streams: Streams, lesson: Lesson, windows: Tensor, positions: list[Tensor] | None
    ) -> Tensor:
        options = self._options
        total = streams.last.new_zeros((), dtype=torch.float32)
        if options.uses_logits:
            following = torch.roll(windows, -1, dims=1)
            total = total + logit_loss(
                at_positions(streams.last, positions),
                self._head,
                lesson.target,
                at_positions(following, positions),
                options.kl,
                options.cross_entropy,
            )
        for mine, theirs in zip(streams.hidden, lesson.hidden, strict=True):
            share = options.hidden / len(streams.hidden)
            total = total + share * stream_distance(mine, theirs)
        return total


class OneBlock:
    """One block of the student: its output towards that of the teacher's block on equal inputs.

    Source: EBFT (arXiv:2402.12419). The inputs are the student's own: what the blocks before it
    make of the text once they have been recovered.

    Args:
        block: The student's.
        teacher: The teacher's; run once a window.
        inputs: Calls of the block, one for each window of the corpus, held-out ones last.
        machine: Where it runs.
    """

    def __init__(
        self, block: nn.Module, teacher: nn.Module, inputs: Activations, machine: Machine
    ) -> None:
        self.module: nn.Module = _HiddenOnly(block)
        self._teacher = _HiddenOnly(teacher)
        self._inputs = inputs
        self._machine = machine
        self._targets: dict[int, Tensor] = {}

    def loss(self, run: Callable[..., Any], part: Part, step: int) -> Tensor:
        """See `Objective`."""
        # One window at a time: their other arguments may differ.
        losses = [
            stream_distance(self._call(run, index), self._target(index)) for index in part.indices
        ]
        return torch.stack(losses).mean()

    def held_out(self, index: int) -> float:
        """See `Objective`."""
        with quiet(self.module), self._machine.autocast():
            mine = self._call(self.module, index)
        return float(stream_distance(mine, self._target(index)))

    def _target(self, index: int) -> Tensor:
        if index not in self._targets:
            with quiet(self._teacher):
                self._targets[index] = self._call(self._teacher, index)
        return self._targets[index]

    def _call(self, run: Callable[..., Any], index: int) -> Tensor:
        found: Tensor = call(run, self._inputs, index)
        return found


def stream_distance(mine: Tensor, theirs: Tensor) -> Tensor:
    """Mean over tokens of |mine - theirs|² / |theirs|².

    In parts of each token's own size: the first tokens of a window are often a hundred times
    larger than the others, and would be all that counts.

    Args:
        mine: [..., width].
        theirs: The same shape; gets no gradient.

    Example:
        >>> float(stream_distance(torch.zeros(1, 2, 4), torch.ones(1, 2, 4)))
        1.0
    """
    mine, theirs = mine.float(), theirs.detach().float()
    size = theirs.square().sum(-1).clamp_(min=torch.finfo(torch.float32).tiny)
    return ((mine - theirs).square().sum(-1) / size).mean()


class _HiddenOnly(nn.Module):
    """A block that returns its hidden states alone."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = self.block(hidden, *args, **kwargs)
        found: Tensor = output[0] if isinstance(output, tuple | list) else output
        return found
