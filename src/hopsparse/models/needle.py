"""A fact hidden in a long text, and a question for it at the end."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_THINGS = ("lamp", "river", "garden", "violin", "harbour", "mirror", "candle", "bridge")


@dataclass(frozen=True)
class Needle:
    """One trial.

    Attributes:
        window: Token ids [1, tokens]: the text with the fact, the question and its answer.
        answer: How many of the last tokens are the answer.
        depth: Where the fact is, 0 (first) to 1 (last).
    """

    window: Tensor
    answer: int
    depth: float

    def judged(self, logits: Tensor) -> tuple[bool, float]:
        """Whether every token of the answer was the likeliest; and its mean loss in nats.

        Args:
            logits: [1, tokens, vocabulary] of `window`.
        """
        target = self.window[0, -self.answer :].to(logits.device)
        rows = logits[0, -self.answer - 1 : -1].float()
        loss = torch.nn.functional.cross_entropy(rows, target)
        return bool((rows.argmax(-1) == target).all()), float(loss)


def needles(
    text: str, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, seed: int = 0
) -> list[Needle]:
    """Trials of `tokens` tokens each, whose facts lie at even depths.

    Args:
        text: What the facts are hidden in; it is repeated where it is too short.
        tokenizer: Of the model.
        tokens: Of each trial.
        count: Trials.
        seed: Draws things and numbers.

    Raises:
        ArgumentError: No room for the text beside the fact and the question.
    """
    draw = random.Random(seed)
    filler = _ids(tokenizer, text)
    found = []
    for trial in range(count):
        thing, number = draw.choice(_THINGS), draw.randint(10_000, 99_999)
        depth = (trial + 0.5) / count
        fact = _ids(tokenizer, f" The secret number of the {thing} is {number}. ")
        question = _ids(tokenizer, f" Remember: the secret number of the {thing} is")
        answer = _ids(tokenizer, f" {number}")
        room = tokens - len(fact) - len(question) - len(answer)
        if room < len(fact) or not filler:
            raise ArgumentError(
                f"needles of {len(fact)} tokens in windows of {tokens}",
                need="room for the text around them",
                hint="--needles 0, or longer contexts",
            )
        # Not the same text around every fact.
        start = draw.randrange(len(filler))
        around = [filler[(start + index) % len(filler)] for index in range(room)]
        place = int(depth * room)
        ids = [*around[:place], *fact, *around[place:], *question, *answer]
        found.append(Needle(torch.tensor([ids]), len(answer), depth))
    return found


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
