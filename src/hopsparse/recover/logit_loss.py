"""Losses over the vocabulary, a few positions at a time: no [positions, vocabulary] is ever kept.

The gradient with respect to the hidden states is computed together with the loss, in closed form:
softmax(student) - target, times the head. Nothing but [positions, width] waits for the backward
pass. The head itself gets no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .capture import Head

# 64 MB of float32 logits at once, and a few tensors of that size beside them.
_CHUNK_ENTRIES = 1 << 24


@dataclass(frozen=True)
class FromHidden:
    """A teacher whose hidden states are there: its whole distribution.

    Attributes:
        hidden: [n, width].
        head: Its head.
    """

    hidden: Tensor
    head: Head

    def log_probs(self, rows: slice) -> Tensor:
        """[rows, vocabulary]."""
        return self.head(self.hidden[rows]).log_softmax(-1)


@dataclass(frozen=True)
class FromTop:
    """A teacher of which the likeliest tokens are kept, and the mass of all others together.

    Attributes:
        tokens: int32 [n, top].
        log_probs: float32 [n, top].
        rest: float32 [n], probability of the others; 0 when `top` is the whole vocabulary.
    """

    tokens: Tensor
    log_probs: Tensor
    rest: Tensor

    @classmethod
    def of(cls, hidden: Tensor, head: Head, top: int) -> FromTop:
        """Keep the `top` likeliest tokens at hidden states [n, width]."""
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        vocabulary = head.weight.shape[0]
        top = min(top, vocabulary)
        for rows in _chunks(hidden.shape[0], vocabulary):
            log_probs = FromHidden(hidden, head).log_probs(rows)
            best, tokens = log_probs.topk(top, dim=-1)
            # Summed over what is left, not one minus what is kept: that would be rounding noise.
            rest = log_probs.exp_().scatter_(1, tokens, 0.0).sum(-1)
            kept.append((tokens.int(), best, rest))
        return cls(*(torch.cat(each) for each in zip(*kept, strict=True)))

    def rows(self, index: Tensor) -> FromTop:
        """The same at some of the positions."""
        return FromTop(self.tokens[index], self.log_probs[index], self.rest[index])


Target = FromHidden | FromTop


def logit_loss(
    hidden: Tensor, head: Head, target: Target, following: Tensor, kl: float, cross_entropy: float
) -> Tensor:
    """Mean over positions of `kl` * KL(teacher || student) + `cross_entropy` * -log p(following).

    With a `FromTop` teacher KL is that of the events "token i" for the kept tokens and "any other":
    never larger than that of the whole distribution, and equal if all tokens are kept.

    Args:
        hidden: The student's [n, width]; the only thing that gets a gradient.
        head: The student's head.
        target: The teacher at the same positions.
        following: int64 [n], the tokens that follow.
        kl: Weight of the first term (Hinton et al., arXiv:1503.02531, temperature 1).
        cross_entropy: Weight of the second.

    Example:
        >>> head, hidden = Head(torch.eye(4), None), torch.randn(3, 4)
        >>> following = torch.zeros(3, dtype=torch.int64)
        >>> float(logit_loss(hidden, head, FromHidden(hidden, head), following, 1.0, 0.0))
        0.0
    """
    apply: Any = _LogitLoss.apply
    return cast(Tensor, apply(hidden, head, target, following, kl, cross_entropy))


class _LogitLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        target: Target,
        following: Tensor,
        kl: float,
        cross_entropy: float,
    ) -> Tensor:
        count, vocabulary = hidden.shape[0], head.weight.shape[0]
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for rows in _chunks(count, vocabulary):
            log_q = head(hidden[rows]).log_softmax(-1)
            slope = torch.zeros_like(log_q) if grad is not None else None
            if kl:
                total += kl * _divergence(log_q, target, rows, slope, kl)
            if cross_entropy:
                total += cross_entropy * _surprise(log_q, following[rows], slope, cross_entropy)
            if grad is not None and slope is not None:
                grad[rows] = slope.to(head.weight.dtype) @ head.weight
        ctx.grad = None if grad is None else grad.div_(count)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.grad * grads[0], None, None, None, None, None


def _divergence(
    log_q: Tensor, target: Target, rows: slice, slope: Tensor | None, weight: float
) -> Tensor:
    """Summed KL of a chunk; adds `weight` * its gradient to `slope`."""
    whole = isinstance(target, FromHidden) or target.tokens.shape[1] == log_q.shape[1]
    if not whole:
        return _divergence_of_top(log_q, cast(FromTop, target), rows, slope, weight)
    if isinstance(target, FromHidden):
        log_p = target.log_probs(rows)
    else:
        tokens = target.tokens[rows].long()
        log_p = torch.empty_like(log_q).scatter_(1, tokens, target.log_probs[rows].to(log_q.dtype))
    p = log_p.exp()
    if slope is not None:
        slope.add_(log_q.exp().sub_(p), alpha=weight)
    return log_p.sub_(log_q).mul_(p).sum()


def _divergence_of_top(
    log_q: Tensor, target: FromTop, rows: slice, slope: Tensor | None, weight: float
) -> Tensor:
    tokens, log_p = target.tokens[rows].long(), target.log_probs[rows].to(log_q.dtype)
    rest_p = target.rest[rows].to(log_q.dtype)
    p, kept_log_q = log_p.exp(), log_q.gather(1, tokens)
    others = log_q.exp().scatter_(1, tokens, 0.0)
    rest_q = others.sum(-1).clamp_(min=torch.finfo(log_q.dtype).tiny)
    if slope is not None:
        # d/dz of the student's logits: q - p at kept tokens; q (1 - rest_p / rest_q) elsewhere.
        others.mul_((1 - rest_p / rest_q).unsqueeze(1))
        others.scatter_(1, tokens, kept_log_q.exp().sub_(p))
        slope.add_(others, alpha=weight)
    kept = (log_p - kept_log_q).mul_(p).sum()
    return kept + (torch.xlogy(rest_p, rest_p) - rest_p * rest_q.log()).sum()


def _surprise(log_q: Tensor, following: Tensor, slope: Tensor | None, weight: float) -> Tensor:
    """Summed negative log-likelihood of a chunk; adds `weight` * its gradient to `slope`."""
    at = following.unsqueeze(1)
    if slope is not None:
        slope.add_(log_q.exp(), alpha=weight)
        slope.scatter_add_(1, at, torch.full_like(at, -weight, dtype=slope.dtype))
    return -log_q.gather(1, at).sum()


def _chunks(count: int, vocabulary: int) -> list[slice]:
    size = max(1, _CHUNK_ENTRIES // vocabulary)
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]
