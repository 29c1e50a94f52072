"""A language model made quick to call: blocks fused, prefill chunks and the step in graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self, overload

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..graphs import Captured, capture
from ..graphs import accelerate as accelerate_module
from .fused import fuse_blocks
from .generate import cache_argument, counts_on_device

#: Tokens of the chunks that prompts are cut in.
CHUNKS = (64, 512)
_PAGE = 64  # our attention reads a cache of whole pages where it lies


class AcceleratedModel:
    """A causal language model of transformers with a cache of its own, and graphs for what it does.

    A prompt is cut in chunks, of which each is one launch, and so is a step. The last chunk is
    filled up behind the prompt, where no token of it looks, and the cache is set back. Tensors of
    the model stay where they are. Calls take turns: there is one cache.

    Attributes:
        fused: What became of the blocks (`FusedBlocks`).
        tokens: In the cache, of each text.

    Example:
        >>> run = accelerate(model, max_tokens=1024)  # doctest: +SKIP
        >>> logits = run.prefill(ids)  # doctest: +SKIP
        >>> logits = run.step(logits.argmax(-1, keepdim=True))  # doctest: +SKIP
    """

    def __init__(self, model: Any, batch: int, max_tokens: int, chunks: tuple[int, ...]) -> None:
        from transformers import StaticCache

        self._model, self._batch, self._chunks = model, batch, tuple(sorted(chunks))
        self._device = next(model.parameters()).device
        # What fills up the last chunk lies behind the last token.
        room = -(-(max_tokens + self._chunks[-1]) // _PAGE) * _PAGE
        self._cache = StaticCache(config=model.config, max_cache_len=room)
        self._name, self.tokens, self._most = cache_argument(model), 0, max_tokens
        self._graphs: dict[int, Captured] = {}
        self._lengths: list[Tensor] = []
        self._places: dict[int, Tensor] = {}
        self._released = False
        self.fused = fuse_blocks(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def prefill(self, ids: Tensor) -> Tensor:
        """Forget all, and read prompts.

        Args:
            ids: int64 [batch, tokens], of one length.

        Returns:
            Logits [batch, vocabulary] of the token behind the last.

        Raises:
            ArgumentError: Another batch, no tokens, or more than there is room for.
        """
        self._check(ids, self._most)
        if self._lengths:
            torch._foreach_zero_(self._lengths)  # Keys that nothing counts need no zeros.
        elif self.tokens:
            self._cache.reset()
        self.tokens, logits = 0, torch.empty(0)
        while self.tokens < ids.shape[1]:
            rest = ids[:, self.tokens :]
            chunk = next((c for c in self._chunks if c >= rest.shape[1]), self._chunks[-1])
            logits = self._run(rest[:, :chunk], chunk)
        return logits

    def step(self, ids: Tensor) -> Tensor:
        """Read one more token of each text.

        Args:
            ids: int64 [batch, 1].

        Returns:
            Logits [batch, vocabulary].

        Raises:
            ArgumentError: Another batch, more than one token, or no room.
        """
        self._check(ids, 1)
        if not 0 < self.tokens < self._most:
            raise ArgumentError(
                f"a token behind {self.tokens}",
                need=f"a prompt first, and at most {self._most} tokens in all",
                hint="prefill(ids), or accelerate(model, max_tokens=...)",
            )
        return self._run(ids, 1)

    def release(self) -> None:
        """Free the graphs, and give the model back as it was; a second time does nothing."""
        for graph in self._graphs.values():
            graph.release()
        self._graphs, self._released = {}, True
        self.fused.undo()

    def _check(self, ids: Tensor, most: int) -> None:
        if self._released:
            raise ArgumentError(
                "a model that was released", need="one that is not", hint="accelerate(model)"
            )
        fits = isinstance(ids, Tensor) and ids.dim() == 2 and ids.dtype == torch.long
        if not fits or ids.shape[0] != self._batch or not 0 < ids.shape[1] <= most:
            told = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ArgumentError(
                f"ids of {told}",
                need=f"int64 [{self._batch}, 1 to {most}]",
                hint="accelerate(model, batch=..., max_tokens=...)",
            )

    def _run(self, ids: Tensor, chunk: int) -> Tensor:
        """Logits [batch, vocabulary] behind the last of at most a chunk of tokens."""
        count = ids.shape[1]
        with torch.no_grad():
            if not self._takes_memory():
                found = self._logits(ids.contiguous(), self._place(count))
            else:
                filled = nn.functional.pad(ids, (0, chunk - count))
                found = self._graph(chunk)(filled.contiguous(), self._place(count))
        self.tokens += count
        return found

    def _takes_memory(self) -> bool:
        """Let the cache have its memory; whether it counts its tokens on the device."""
        if not self._cache.layers[0].is_initialized:
            self._logits(self._nothing(1), self._place(1))
            self._cache.reset()
            if counts_on_device(self._cache):
                self._lengths = [layer.cumulative_length for layer in self._cache.layers]
        return bool(self._lengths)

    def _graph(self, chunk: int) -> Captured:
        if chunk not in self._graphs:
            # Runs before the capture are of no tokens: what they write is written again.
            example = self._nothing(chunk), self._place(0)
            self._graphs[chunk] = capture(self._counted, example)
        return self._graphs[chunk]

    def _counted(self, ids: Tensor, last: Tensor) -> Tensor:
        """A chunk that is filled up behind `last`: the cache counts the tokens up to it."""
        found = self._logits(ids, last)
        # One tensor for each: a single one would be read on the host.
        torch._foreach_add_(self._lengths, [(last + 1 - ids.shape[1])[0]] * len(self._lengths))
        return found

    def _logits(self, ids: Tensor, last: Tensor) -> Tensor:
        given = {self._name: self._cache, "use_cache": True, "logits_to_keep": last}
        found: Tensor = self._model(ids, **given).logits
        return found[:, 0]

    def _nothing(self, tokens: int) -> Tensor:
        return torch.zeros(self._batch, tokens, dtype=torch.long, device=self._device)

    def _place(self, count: int) -> Tensor:
        """Where the last of so many tokens is, on the device."""
        if count not in self._places:
            self._places[count] = torch.tensor([count - 1], device=self._device)
        return self._places[count]


@overload
def accelerate(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    *,
    buckets: Iterable[int] | None = None,
    reuse_outputs: bool = False,
) -> Captured: ...


@overload
def accelerate(
    model: nn.Module,
    example: None = None,
    *,
    batch: int = 1,
    max_tokens: int = 2048,
    chunks: Iterable[int] = CHUNKS,
) -> AcceleratedModel: ...


def accelerate(
    model: nn.Module,
    example: Tensor | Sequence[Tensor] | None = None,
    *,
    buckets: Iterable[int] | None = None,
    reuse_outputs: bool = False,
    batch: int = 1,
    max_tokens: int = 2048,
    chunks: Iterable[int] = CHUNKS,
) -> Captured | AcceleratedModel:
    """Make a model quick to call, until `release()`.

    With an example, any module: its activations go into its sparse layers, and its forward pass is
    captured (`hopsparse.graphs.accelerate`). Without one, a causal language model of transformers:
    its blocks are fused (`hopsparse.fuse_blocks`), and prompts and steps are graphs.

    Args:
        model: In evaluation mode. Tensors stay on the GPU that they are on.
        example: Its inputs.
        buckets: With an example: numbers of tokens, or None.
        reuse_outputs: With an example: return the memory of the graph, and no copies of it.
        batch: Of a language model: texts side by side.
        max_tokens: Most tokens of a prompt and what follows it.
        chunks: Sizes of the chunks that prompts are cut in.

    Returns:
        What is called instead of the model.

    Raises:
        ArgumentError: The model is in training mode, on the meta device or accelerated already; or
            a number makes no sense.
        UnsupportedError: A language model of an unknown family, or a CUDA graph is being captured.

    Example:
        >>> from hopsparse.nn import SparseLinear
        >>> layer = SparseLinear.from_linear(nn.Linear(8, 8, bias=False), "csr")
        >>> run = accelerate(nn.Sequential(layer, nn.ReLU()).eval(), torch.ones(4, 8))
        >>> run(-torch.ones(4, 8)).shape
        torch.Size([4, 8])
    """
    if example is not None:
        return accelerate_module(model, example, buckets=buckets, reuse_outputs=reuse_outputs)
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ArgumentError(
            f"a {type(model).__name__} without an example",
            need="a causal language model of transformers, or an example of the inputs",
            hint="accelerate(model, x)",
        )
    sizes = tuple(chunks) if isinstance(chunks, Iterable) else (chunks,)
    numbers = (batch, max_tokens, *sizes)
    if not sizes or any(type(each) is not int or each < 1 for each in numbers):
        raise ArgumentError(
            f"batch={batch}, max_tokens={max_tokens}, chunks={sizes}",
            need="whole numbers, 1 and more",
            hint="batch=1, max_tokens=2048, chunks=(64, 512)",
        )
    return AcceleratedModel(model, batch, max_tokens, sizes)
