"""Text from a causal language model, piece by piece, with its decode step in a CUDA graph."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

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
        whole = type(self.top_k) is type(self.seed) is int
        fits = whole and self.top_k >= 0 and 0 <= self.seed < 2**63
        if not fits or not 0.0 <= self.temperature < float("inf"):
            need = "numbers from 0 on; top_k and seed whole, and of 63 bits"
            raise ArgumentError(f"{self}", need=need, hint="Sampling(temperature=0.7, top_k=50)")


@dataclass
class Generator:
    """A model that writes, with room for so many tokens.

    On a GPU the step that makes one token is captured once, and replayed for each; a model whose
    cache counts its tokens on the host, as those with sliding windows do, runs it eagerly. One text
    is written at a time. As a context manager it closes itself.

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

        from .cached_attention import room_for

        model: Any = self.opened.model
        context = getattr(model.config, "max_position_embeddings", None)
        if self.max_tokens < 2 or (isinstance(context, int) and self.max_tokens > context):
            raise ArgumentError(
                f"{self.max_tokens} tokens for {self.opened.name}",
                need=f"2 to its context of {context}",
                hint="fewer new tokens, or a shorter prompt",
            )
        self._model, self._device = model, next(model.parameters()).device
        room = room_for(self.max_tokens)
        self._cache = StaticCache(config=model.config, max_cache_len=room)
        self._cache_name, self._turn = cache_argument(model), 0
        self._step: Captured | Callable[[Tensor], Tensor] | None = None
        if self.fuse:
            with contextlib.suppress(UnsupportedError):  # Another family: it runs as it is.
                self.fused = fuse_blocks(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the graph, and give the model back as it was."""
        if isinstance(self._step, Captured):
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
        ids = prompt_ids(self.opened, prompt)
        tokens = self.tokens(ids, max_new_tokens=max_new_tokens, sampling=sampling)
        return self._pieces(ids, tokens)

    def _pieces(self, ids: list[int], tokens: Iterator[int]) -> Iterator[str]:
        # Behind its prompt: alone, some tokenizers would drop the space that it starts with.
        shown, found = self._decoded(ids), [*ids]
        for token in tokens:
            found.append(token)
            whole = self._decoded(found)
            if not whole.endswith(_UNFINISHED) and len(whole) > len(shown):
                yield whole[len(shown) :]
                shown = whole
        if len(whole := self._decoded(found)) > len(shown):
            yield whole[len(shown) :]

    def _decoded(self, ids: list[int]) -> str:
        return str(self.opened.tokenizer.decode(ids, skip_special_tokens=True))

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
                hint="a prompt that is not empty, or a shorter one",
            )
        self._turn += 1
        most = min(max_new_tokens, self.max_tokens + 1 - len(ids))
        return self._written(self._turn, ids, most, sampling or Sampling())

    def _written(self, turn: int, ids: list[int], most: int, sampling: Sampling) -> Iterator[int]:
        draws = torch.Generator(self._device).manual_seed(sampling.seed)
        ends = self._end_tokens()
        step = self._decode_step()
        with torch.no_grad():
            self._cache.reset()
            logits = self._forward(torch.tensor([ids], device=self._device))
        for count in range(1, most + 1):
            token = chosen(logits, sampling, draws)
            number, self.written = int(token), count
            yield number
            if number in ends or count == most:
                return
            if turn != self._turn:
                raise ArgumentError(
                    "a text that goes on after another one was started",
                    need="one text at a time: they share a cache",
                    hint="a Generator for each",
                )
            with torch.no_grad():
                logits = step(token.view(1, 1))

    def _decode_step(self) -> Captured | Callable[[Tensor], Tensor]:
        if self._step is None:
            # What these runs leave in the cache is forgotten when it is reset.
            first = torch.zeros(1, 1, dtype=torch.long, device=self._device)
            with torch.no_grad():
                self._forward(first)
            self._step = self._forward
            if counts_on_device(self._cache):
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


def counts_on_device(cache: Any) -> bool:
    """Whether a graph can go on with a cache: a number of the host would stay what it was."""
    return all(isinstance(layer.get_seq_length(), Tensor) for layer in cache.layers)


def cache_argument(model: Any) -> str:
    """What a model of transformers calls the cache it is given; versions differ."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def prompt_ids(opened: OpenedModel, prompt: str) -> list[int]:
    """Tokens of a prompt.

    Raises:
        ArgumentError: It is no text: bytes of a command line that are no UTF-8.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"a prompt with {prompt[error.start]!r}", need="text in UTF-8", hint="'a prompt'"
        ) from error
    ids: list[int] = opened.tokenizer(prompt)["input_ids"]
    return ids


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
    # From the largest down: however small the temperature is, the largest stays finite.
    scaled = (logits.float() - logits.max().float()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        best, places = scaled.topk(sampling.top_k)
        return places[torch.multinomial(best.softmax(-1), 1, generator=draws)]
    return torch.multinomial(scaled.softmax(-1), 1, generator=draws)
