"""Text from a causal language model, piece by piece, with its decode step in a CUDA graph."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ArgumentError, UnsupportedError
from ..graphs import Captured, capture
from .fused import FusedBlocks, fuse_blocks

if TYPE_CHECKING:
    from .opened import OpenedModel

_UNFINISHED = "�"  # what a tokenizer makes of bytes that are no character yet


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the likeliest; else logits are divided by it, and one is drawn.
        top_k: Draw from so many of the likeliest; 0 is all.
        seed: Of the draws: the same seed gives the same text on the same machine.

    Raises:
        ArgumentError: A negative number, or a temperature that is not finite.
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        finite = 0.0 <= self.temperature < float("inf")
        if not finite or self.top_k < 0 or self.seed < 0:
            raise ArgumentError(
                f"{self}", need="numbers from 0 on", hint="Sampling(temperature=0.7, top_k=50)"
            )


@dataclass
class Generator:
    """A model that writes, with room for so many tokens.

    On a GPU the step that makes one token is captured once, and replayed for each. One text is
    written at a time.

    Args:
        opened: A causal language model of transformers and its tokenizer.
        max_tokens: Most tokens of a prompt and what follows it.
        fuse: Let layers that share their inputs be one product (`fuse_blocks`), where the family
            of the model is known; `close` undoes it.

    Attributes:
        fused: What was fused; None if nothing was to be.
        written: Tokens of the text that was written last, so far.

    Raises:
        ArgumentError: More tokens than the model has a context for.

    Example:
        >>> from hopsparse.models.opened import open_model
        >>> opened = open_model("smollm2-135m")  # doctest: +SKIP
        >>> print(*Generator(opened).text("Once upon a time"), sep="")  # doctest: +SKIP
    """

    opened: OpenedModel
    max_tokens: int = 512
    fuse: bool = True
    fused: FusedBlocks | None = field(default=None, init=False)
    written: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        from transformers import StaticCache

        model: Any = self.opened.model
        context = getattr(model.config, "max_position_embeddings", None)
        if self.max_tokens < 2 or (isinstance(context, int) and self.max_tokens > context):
            raise ArgumentError(
                f"{self.max_tokens} tokens for {self.opened.name}",
                need=f"2 to its context of {context}",
                hint=f"max_tokens={context}",
            )
        if self.fuse:
            try:
                self.fused = fuse_blocks(model)
            except UnsupportedError:  # Another family: it runs as it is.
                self.fused = None
        self._model, self._device = model, next(model.parameters()).device
        self._cache = StaticCache(config=model.config, max_cache_len=self.max_tokens)
        self._cache_name = cache_argument(model)
        self._step: Captured | None = None

    def close(self) -> None:
        """Free the graph, and give the model back as it was."""
        if self._step is not None:
            self._step.release()
        if self.fused is not None:
            self.fused.undo()

    def text(
        self, prompt: str, *, max_new_tokens: int = 64, sampling: Sampling | None = None
    ) -> Iterator[str]:
        """What follows a prompt, in pieces of whole characters, as they are known.

        Args:
            prompt: Any text that is at least one token.
            max_new_tokens: It ends there, at an end token of the model, or where there is no room.
            sampling: How tokens are chosen; None takes the likeliest.

        Raises:
            ArgumentError: The prompt is empty, or leaves no room.
        """
        ids: list[int] = self.opened.tokenizer(prompt)["input_ids"]
        shown, found = "", list[int]()
        for token in self.tokens(ids, max_new_tokens=max_new_tokens, sampling=sampling):
            found.append(token)
            whole = str(self.opened.tokenizer.decode(found, skip_special_tokens=True))
            if not whole.endswith(_UNFINISHED) and len(whole) > len(shown):
                yield whole[len(shown) :]
                shown = whole
        whole = str(self.opened.tokenizer.decode(found, skip_special_tokens=True))
        if len(whole) > len(shown):
            yield whole[len(shown) :]

    def tokens(
        self, ids: list[int], *, max_new_tokens: int = 64, sampling: Sampling | None = None
    ) -> Iterator[int]:
        """As `text`, in tokens.

        Args:
            ids: Of the prompt.
            max_new_tokens: As for `text`, like all the rest.
            sampling: How tokens are chosen.
        """
        if not 1 <= len(ids) < self.max_tokens or max_new_tokens < 1:
            raise ArgumentError(
                f"a prompt of {len(ids)} tokens, and {max_new_tokens} new ones",
                need=f"at least one of each, and at most {self.max_tokens - 1} of the prompt",
                hint=f"max_tokens={len(ids) + max(1, max_new_tokens)}",
            )
        return self._written(ids, max_new_tokens, sampling or Sampling())

    def _written(self, ids: list[int], most: int, sampling: Sampling) -> Iterator[int]:
        draws = torch.Generator(self._device).manual_seed(sampling.seed)
        ends, self.written = self._end_tokens(), 0
        step = self._decode_step()
        with torch.no_grad():
            self._cache.reset()
            logits = self._forward(torch.tensor([ids], device=self._device))
            for position in range(len(ids), min(len(ids) + most, self.max_tokens + 1)):
                token = chosen(logits, sampling, draws)
                number = int(token)
                self.written = position - len(ids) + 1
                yield number
                if number in ends or position == self.max_tokens:
                    return
                logits = step(token.view(1, 1))

    def _decode_step(self) -> Captured:
        if self._step is None:
            # What the runs before the capture leave in the cache is forgotten when it is reset.
            first = torch.zeros(1, 1, dtype=torch.long, device=self._device)
            self._step = capture(self._forward, first, reuse_outputs=True)
        return self._step

    def _forward(self, ids: Tensor) -> Tensor:
        """Logits [vocabulary] of the token behind the last of ids [1, tokens]."""
        cache = {self._cache_name: self._cache}
        logits: Tensor = self._model(ids, use_cache=True, **cache).logits
        return logits[0, -1]

    def _end_tokens(self) -> set[int]:
        config = getattr(self._model, "generation_config", None) or self._model.config
        ends = config.eos_token_id
        return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


def cache_argument(model: Any) -> str:
    """What a model of transformers calls the cache it is given; versions differ."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def chosen(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> Tensor:
    """The next token [1].

    Args:
        logits: [vocabulary].
        sampling: How to choose.
        draws: Where chance comes from, on the device of the logits.

    Example:
        >>> chosen(torch.tensor([0.0, 2.0, 1.0]), Sampling(), torch.Generator())
        tensor([1])
    """
    if sampling.temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    scaled = logits.float() / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        best, places = scaled.topk(sampling.top_k)
        return places[torch.multinomial(best.softmax(-1), 1, generator=draws)]
    return torch.multinomial(scaled.softmax(-1), 1, generator=draws)
