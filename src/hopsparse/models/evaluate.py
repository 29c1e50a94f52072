"""How good a language model is on a text: perplexity, and agreement with another model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError
from ..prune import quiet


@dataclass
class Quality:
    """What was seen on some windows of text.

    Attributes:
        nll: Summed negative log-likelihood in nats.
        tokens: Predictions counted.
        top1: Most likely next token at each position, one tensor a window.
    """

    nll: float = 0.0
    tokens: int = 0
    top1: list[Tensor] = field(default_factory=list, repr=False)

    @classmethod
    def sum(cls, parts: Iterable[Quality]) -> Quality:
        """The quality on all windows of `parts`, in their order."""
        total = cls()
        for part in parts:
            total.nll += part.nll
            total.tokens += part.tokens
            total.top1 += part.top1
        return total

    @property
    def perplexity(self) -> float:
        """exp(mean negative log-likelihood): infinite where that overflows, NaN for NaN logits."""
        mean = self.nll / max(1, self.tokens)
        return math.inf if mean > 700 else math.exp(mean)

    def add(self, logits: Tensor, window: Tensor) -> None:
        """Count one window [1, tokens]: logits [1, tokens, vocabulary] against its next tokens."""
        predicted, target = logits[0, :-1].float(), window[0, 1:].to(logits.device)
        losses = F.cross_entropy(predicted, target, reduction="none")
        self.nll += float(losses.sum(dtype=torch.float64))
        self.tokens += target.numel()
        self.top1.append(predicted.argmax(-1).cpu())

    def agreement(self, other: Quality) -> float:
        """Fraction of positions at which both predict the same token."""
        pairs = list(zip(self.top1, other.top1, strict=True))
        same = sum(int((mine == theirs).sum()) for mine, theirs in pairs)
        return same / max(1, self.tokens)


def evaluate(model: nn.Module | Callable[[Tensor], Tensor], windows: Iterable[Tensor]) -> Quality:
    """Run `model` over token windows, in evaluation mode and without a cache.

    Args:
        model: An HF language model, or a function from token ids to logits.
        windows: Token ids [1, tokens] on any device.

    Returns:
        Quality; `.perplexity`, and `.agreement(other)` between two of them.

    Raises:
        ArgumentError: A window is not [1, tokens].

    Example:
        >>> uniform = lambda ids: torch.zeros(1, ids.shape[1], 50)
        >>> round(evaluate(uniform, [torch.arange(9)[None]]).perplexity, 3)
        50.0
    """
    quality = Quality()
    with _evaluating(model) as run:
        for window in windows:
            if window.ndim != 2 or window.shape[0] != 1:
                raise ArgumentError(
                    f"a window of shape {list(window.shape)}",
                    need="[1, tokens]",
                    hint="window.split(1), or window[None]",
                )
            output = run(window)
            quality.add(getattr(output, "logits", output), window)
    return quality


@contextmanager
def _evaluating(
    model: nn.Module | Callable[[Tensor], Tensor],
) -> Iterator[Callable[[Tensor], Any]]:
    """A function that runs the model where its weights are; modes of submodules come back."""
    if not isinstance(model, nn.Module):
        yield model
        return
    weight = next(model.parameters(), None)
    device = weight.device if weight is not None else torch.device("cpu")
    options = {"use_cache": False} if hasattr(model, "generation_config") else {}
    with quiet(model):
        yield lambda window: model(window.to(device), **options)
