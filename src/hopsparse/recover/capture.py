"""A language model up to its head: the last hidden states, and those behind its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError
from ..prune import without_cache


@dataclass(frozen=True)
class Layout:
    """Where the parts of a language model are.

    Attributes:
        blocks: Path of each block in run order; a block takes hidden states first, and returns
            them, alone or first in a tuple.
        head: Path of the nn.Linear whose output the logits are.

    Example:
        >>> Layout(("layers.0", "layers.1"), "lm_head").head
        'lm_head'
    """

    blocks: tuple[str, ...]
    head: str

    def chosen(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Paths of the blocks with these indices; all when there are none.

        Raises:
            ArgumentError: There is no such block.
        """
        count = len(self.blocks)
        for index in indices:
            if not -count <= index < count:
                raise ArgumentError(
                    f"hidden_blocks with {index} in a model of {count} blocks",
                    need=f"{-count} to {count - 1}",
                    hint="hidden_blocks=() for all",
                )
        wanted = {index % count for index in indices} or set(range(count))
        return tuple(self.blocks[index] for index in sorted(wanted))


class Streams(NamedTuple):
    """What a model computed for some windows.

    Attributes:
        last: [windows, tokens, width], the inputs of the head.
        hidden: The same shape, behind each of the blocks asked for.
    """

    last: Tensor
    hidden: list[Tensor]


@dataclass(frozen=True)
class Head:
    """logits = hidden @ weight.T + bias.

    Attributes:
        weight: [vocabulary, width]; products are taken in its dtype.
        bias: [vocabulary] or None.
    """

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, model: nn.Module, layout: Layout, dtype: torch.dtype | None = None) -> Head:
        """The head of a model; a copy if `dtype` is another one than its own.

        Raises:
            ArgumentError: It has no weight [vocabulary, width].
        """
        module = _module(model, layout.head)
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise ArgumentError(
                f"a {type(module).__name__} at {layout.head!r} as the head",
                need="an nn.Linear, whose output the logits are",
                hint="Layout(blocks, head='lm_head')",
            )
        wanted = weight.dtype if dtype is None else dtype
        cast = None if bias is None else bias.detach().to(wanted)
        return cls(weight.detach().to(wanted), cast)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocabulary] of hidden states [n, width], in float32 at least."""
        logits = F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        return logits if logits.dtype == torch.float64 else logits.float()


class UpToHead(nn.Module):
    """Runs a model on token ids and returns `Streams`; its head sees no token.

    Logits of a whole batch are the largest tensor of a step by far. What needs them computes them
    from `Streams.last`, a few positions at a time.

    Args:
        model: Returns anything; called with token ids, and without a cache.
        head: Path of its head.
        blocks: Paths of the blocks whose outputs are wanted.
    """

    def __init__(self, model: nn.Module, head: str, blocks: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self._head = head
        self.blocks = tuple(blocks)
        self._options = without_cache(model)

    def forward(self, ids: Tensor) -> Streams:
        """Token ids [windows, tokens] -> `Streams`."""
        last: list[Tensor] = []
        hidden: dict[str, Tensor] = {}

        def before_head(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            last.append(args[0])
            return (args[0][:, :0], *args[1:])

        def after_block(path: str) -> Any:
            def keep(_: nn.Module, __: Any, output: Any) -> None:
                hidden[path] = output[0] if isinstance(output, tuple | list) else output

            return keep

        handles = [_module(self.model, self._head).register_forward_pre_hook(before_head)]
        for path in self.blocks:
            block = _module(self.model, path)
            handles.append(block.register_forward_hook(after_block(path)))
        try:
            self.model(ids, **self._options)
        finally:
            for handle in handles:
                handle.remove()
        if len(last) != 1 or len(hidden) != len(self.blocks):
            raise ArgumentError(
                f"a {type(self.model).__name__} that called its head {len(last)} times and "
                f"{len(hidden)} of {len(self.blocks)} blocks",
                need="a model that calls each of them once",
                hint="Layout(blocks, head) with the paths of this model",
            )
        return Streams(last[0], [hidden[path] for path in self.blocks])


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        known = [name for name, _ in model.named_children()]
        raise ArgumentError(
            f"no module {path!r} in a {type(model).__name__}",
            need="paths of its blocks and of its head",
            hint=f"Layout(blocks, head); its parts are {', '.join(known[:6])}",
        ) from error
