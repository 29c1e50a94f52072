"""How good a language model is on a text: perplexity, and agreement with another model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
    top1: list[Tensor] = field(default_factory=list)

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
        """exp(mean negative log-likelihood); infinite where exp overflows."""
        mean = self.nll / max(1, self.tokens)
        return math.exp(mean) if mean < 700 else math.inf

    def add(self, logits: Tensor, window: Tensor) -> None:
        """Count one window: logits [1, tokens, vocabulary] against its own next tokens."""
        predicted, target = logits[0, :-1].float(), window[0, 1:].to(logits.device)
        self.nll += float(F.cross_entropy(predicted, target, reduction="sum").double())
        self.tokens += target.numel()
        self.top1.append(predicted.argmax(-1).cpu())

    def agreement(self, other: Quality) -> float:
        """Fraction of positions at which both predict the same token."""
        pairs = list(zip(self.top1, other.top1, strict=True))
        same = sum(int((mine == theirs).sum()) for mine, theirs in pairs)
        return same / max(1, self.tokens)


@torch.inference_mode()
def evaluate(model: nn.Module | Callable[[Tensor], Tensor], windows: Iterable[Tensor]) -> Quality:
    """Run `model` over token windows [1, tokens].

    Args:
        model: An HF language model, or a function from token ids to logits.
        windows: As made by `hopsparse.models.text`.

    Returns:
        Quality; `.perplexity`, and `.agreement(other)` between two of them.
    """
    quality = Quality()
    for window in windows:
        output = model(window)
        quality.add(getattr(output, "logits", output), window)
    return quality
