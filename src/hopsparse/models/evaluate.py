"""How good a language model is on a text, and how far it is from another model.

Perplexity says how well a model predicts the text; top-1 agreement and KL divergence say how close
it is to a reference, whatever the text. Windows are the unit of chance: standard errors and
intervals come from the spread between windows, so they need at least two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError, VerificationError
from ..prune import quiet, without_cache
from ._interval import Interval, mean_and_error, paired_interval

# Entries of a float32 copy of logits: 64 MB, and KL needs a few of them at a time.
_CHUNK_ENTRIES = 1 << 24

LanguageModel = nn.Module | Callable[[Tensor], Tensor]


@dataclass
class Quality:
    """What was seen on some windows of text.

    Attributes:
        nll: Summed negative log-likelihood in nats.
        tokens: Predictions counted.
        top1: Most likely next token at each position, one tensor a window.
        window_nll: The part of `nll` of each window.
        window_tokens: The part of `tokens` of each window.
        window_kl: Summed KL(reference || model) of each window; empty without a reference.
    """

    nll: float = 0.0
    tokens: int = 0
    top1: list[Tensor] = field(default_factory=list, repr=False)
    window_nll: list[float] = field(default_factory=list, repr=False)
    window_tokens: list[int] = field(default_factory=list, repr=False)
    window_kl: list[float] = field(default_factory=list, repr=False)

    @classmethod
    def sum(cls, parts: Iterable[Quality]) -> Quality:
        """The quality on all windows of `parts`, in their order."""
        total = cls()
        for part in parts:
            total.nll += part.nll
            total.tokens += part.tokens
            total.top1 += part.top1
            total.window_nll += part.window_nll
            total.window_tokens += part.window_tokens
            total.window_kl += part.window_kl
        return total

    @property
    def mean_nll(self) -> float:
        """Negative log-likelihood in nats a token."""
        return self.nll / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        """exp(mean negative log-likelihood): infinite where that overflows, NaN for NaN logits."""
        return math.inf if self.mean_nll > 700 else math.exp(self.mean_nll)

    @property
    def standard_error(self) -> float | None:
        """Standard error of `mean_nll` over windows; None for fewer than two.

        Perplexity times this is about the standard error of the perplexity. It is large where
        windows differ in difficulty, which two models share: compare them by `compare`.
        """
        return mean_and_error(self.window_nll, self.window_tokens)[1]

    @property
    def kl(self) -> float | None:
        """Mean KL(reference || model) in nats a token; None where a window had no reference."""
        if not self.window_kl or len(self.window_kl) != len(self.window_nll):
            return None
        return mean_and_error(self.window_kl, self.window_tokens)[0]

    @property
    def kl_standard_error(self) -> float | None:
        """Standard error of `kl` over windows; None for fewer than two."""
        if self.kl is None:
            return None
        return mean_and_error(self.window_kl, self.window_tokens)[1]

    def add(self, logits: Tensor, window: Tensor, reference: Tensor | None = None) -> None:
        """Count one window.

        Args:
            logits: [1, tokens, vocabulary], any float dtype; computed with in float32.
            window: Token ids [1, tokens], whose next tokens the logits are judged by.
            reference: Logits of the reference model, of the same shape, for the KL divergence.

        Raises:
            ArgumentError: Vocabularies of different sizes.
        """
        if reference is not None and reference.shape != logits.shape:
            raise ArgumentError(
                f"logits of shapes {list(reference.shape)} and {list(logits.shape)}: "
                "vocabularies differ",
                need="two models of one vocabulary",
                hint="a model and what was made from it",
            )
        target = window[0, 1:].to(logits.device)
        losses, tops, divergence = [], [], 0.0
        step = max(1, _CHUNK_ENTRIES // logits.shape[-1])
        for start in range(0, target.numel(), step):
            rows = slice(start, min(start + step, target.numel()))
            predicted = logits[0, rows].float()
            losses.append(F.cross_entropy(predicted, target[rows], reduction="none"))
            tops.append(predicted.argmax(-1).cpu())
            if reference is not None:
                wanted = reference[0, rows].to(logits.device).float()
                divergence += float(_divergence(wanted, predicted).sum(dtype=torch.float64))
        nll = float(torch.cat(losses).sum(dtype=torch.float64)) if losses else 0.0
        self.nll += nll
        self.tokens += target.numel()
        self.top1.append(torch.cat(tops) if tops else target.cpu())
        self.window_nll.append(nll)
        self.window_tokens.append(target.numel())
        if reference is not None:
            self.window_kl.append(divergence)

    def agreement(self, other: Quality) -> float:
        """Fraction of positions at which both predict the same token."""
        pairs = list(zip(self.top1, other.top1, strict=True))
        same = sum(int((mine == theirs).sum()) for mine, theirs in pairs)
        return same / max(1, self.tokens)


@dataclass(frozen=True)
class Comparison:
    """Two models on the same windows: `a` is the reference, `b` what became of it.

    Attributes:
        a: Quality of the reference.
        b: Quality of the other, with KL(a || b).
        ratio: Perplexity of b over that of a, with a 95 % interval from the paired windows:
            what both find hard does not widen it.
        agreement: Fraction of positions at which both rank the same token first.
    """

    a: Quality
    b: Quality
    ratio: Interval
    agreement: float

    @property
    def kl(self) -> float:
        """Mean KL(a || b) in nats a token."""
        assert self.b.kl is not None
        return self.b.kl


def evaluate(model: LanguageModel, windows: Iterable[Tensor]) -> Quality:
    """Run `model` over token windows, in evaluation mode and without a cache.

    Args:
        model: An HF language model, or a function from token ids to logits.
        windows: Token ids [1, tokens] on any device.

    Returns:
        Quality; `.perplexity`, `.standard_error`, and `.agreement(other)` between two of them.

    Raises:
        ArgumentError: A window is not [1, tokens].
        VerificationError: The model gives NaN.

    Example:
        >>> uniform = lambda ids: torch.zeros(1, ids.shape[1], 50)
        >>> round(evaluate(uniform, [torch.arange(9)[None]]).perplexity, 3)
        50.0
    """
    quality = Quality()
    with _evaluating(model) as run:
        for index, window in enumerate(windows):
            quality.add(_logits(run, window, index, "the model"), window)
    return quality


def compare(a: LanguageModel, b: LanguageModel, windows: Iterable[Tensor]) -> Comparison:
    """Run two models over the same windows, one window at a time.

    Args:
        a: The reference: an HF language model, or a function from token ids to logits.
        b: What is compared with it.
        windows: Token ids [1, tokens] on any device. Logits of one window are in memory at a time.

    Returns:
        Both qualities, the ratio of perplexities with its interval, agreement, and KL(a || b).

    Raises:
        ArgumentError: No window, a window that is not [1, tokens], or vocabularies that differ.
        VerificationError: A model gives NaN.

    Example:
        >>> uniform = lambda ids: torch.zeros(1, ids.shape[1], 50)
        >>> sure = lambda ids: 9.0 * torch.nn.functional.one_hot(ids.roll(-1), 50).float()
        >>> found = compare(uniform, sure, [torch.arange(9)[None], torch.arange(9)[None]])
        >>> found.ratio.value < 0.05, round(found.kl, 2)
        (True, 4.91)
        >>> compare(uniform, uniform, [torch.arange(9)[None]]).kl
        0.0
    """
    first, second = Quality(), Quality()
    with _evaluating(a) as run_a, _evaluating(b) as run_b:
        for index, window in enumerate(windows):
            reference = _logits(run_a, window, index, "the first model")
            logits = reference if a is b else _logits(run_b, window, index, "the second model")
            second.add(logits, window, reference)
            first.add(reference, window)
    if not first.tokens:
        raise ArgumentError("no window", need="at least one window", hint="a longer text")
    ratio = paired_interval(second.window_nll, first.window_nll, first.window_tokens)
    return Comparison(first, second, ratio, second.agreement(first))


def _divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || model) of each row; a token that the reference rules out adds nothing."""
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def _logits(run: Callable[[Tensor], Any], window: Tensor, index: int, who: str) -> Tensor:
    """The logits of one window, looked through for NaN."""
    if window.ndim != 2 or window.shape[0] != 1:
        raise ArgumentError(
            f"a window of shape {list(window.shape)}",
            need="[1, tokens]",
            hint="window.split(1), or window[None]",
        )
    output = run(window)
    logits: Tensor = getattr(output, "logits", output)
    # A row with a NaN anywhere has a NaN sum; infinities of both signs make one too.
    bad = logits[0].sum(-1, dtype=torch.float32).isnan().nonzero()
    for position in bad.flatten().tolist():
        if bool(logits[0, position].isnan().any()):
            raise VerificationError(
                f"{who} gives NaN logits in window {index + 1}, first at token {position + 1} "
                f"of {window.shape[1]}",
                need="numbers",
                hint="`hopsparse verify PATH` for damaged weights, or float32 arithmetic",
            )
    return logits


@contextmanager
def _evaluating(model: LanguageModel) -> Iterator[Callable[[Tensor], Any]]:
    """A function that runs the model where its weights are; modes of submodules come back."""
    if not isinstance(model, nn.Module):
        yield model
        return
    weight = next(model.parameters(), None)
    device = weight.device if weight is not None else torch.device("cpu")
    options = without_cache(model)
    with quiet(model):
        yield lambda window: model(window.to(device), **options)
