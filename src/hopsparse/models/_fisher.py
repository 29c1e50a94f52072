"""Gradients of a language model under its own predictions, a block at a time.

Memory holds one block and, of each window, the hidden states that enter every block and the
gradient that leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..prune import Activations, advance, capture_inputs
from ..prune.hooks import layer_input
from ._family import Family
from .source import WeightSource, dematerialize, materialize, materialize_outside

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BlockLoader:
    """The blocks of a model whose weights lie on disk; everything else is loaded at once.

    Args:
        model: The skeleton, weights on the meta device.
        source: Where its weights come from.
        family: Where its parts are.
        paths: Its blocks in run order.
        device: Where they run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        source: WeightSource,
        family: Family,
        paths: Sequence[str],
        device: str,
    ) -> None:
        self.paths = tuple(paths)
        self._model, self._source, self._family, self._device = model, source, family, device
        materialize_outside(model, self.paths, source, device)

    @contextmanager
    def block(self, index: int) -> Iterator[tuple[nn.Module, dict[str, torch.dtype]]]:
        """A block in float32, and the stored dtype of each of its weights by full name."""
        path = self.paths[index]
        block = self._model.get_submodule(path)
        try:
            yield block, materialize(block, path, self._source, self._device)
        finally:
            dematerialize(block)

    def capture(self, windows: Sequence[Tensor]) -> Activations:
        """How the first block is called for each window."""
        first = self._model.get_submodule(self.paths[0])
        placed = [window.to(self._device) for window in windows]
        return capture_inputs(lambda window: self._model(window, use_cache=False), first, placed)

    def logits(self, hidden: Tensor) -> Tensor:
        """What follows the last block."""
        norm = self._model.get_submodule(self._family.final_norm)
        head = self._model.get_submodule(self._family.head)
        logits: Tensor = head(norm(hidden))
        return logits


@dataclass
class Trace:
    """The windows of a run through a model and back.

    Attributes:
        entering: Hidden states [1, tokens, hidden] by block and window.
        leaving: Gradients of the loss with respect to the outputs of each block, likewise.
        calls: The other arguments of the blocks.
        tokens: Predictions in all windows together.
    """

    entering: list[list[Tensor]]
    leaving: list[list[Tensor]]
    calls: Activations
    tokens: int


@dataclass
class Sample:
    """What one layer saw in one window: inputs x [n, k], and gradients g [n, out]."""

    x: list[Tensor] = field(default_factory=list)
    g: list[Tensor] = field(default_factory=list)


OnBlock = Callable[[str], None]


@torch.no_grad()
def run_back(blocks: BlockLoader, windows: Sequence[Tensor], seed: int, on_block: OnBlock) -> Trace:
    """Run the model over `windows` and the gradient of its own surprise back to the first block.

    The loss of a window is the sum over its positions of -log p(v), where v is drawn from p itself,
    so the mean outer product of its gradients is the Fisher information.

    Args:
        blocks: The model.
        windows: Token ids [1, tokens].
        seed: Draws the targets.
        on_block: Called after each block, twice in all.
    """
    calls = blocks.capture(windows)
    entering: list[list[Tensor]] = []
    for index, path in enumerate(blocks.paths):
        with blocks.block(index) as (block, _):
            entering.append([hidden.clone() for hidden in calls.hidden])
            advance(block, calls)
        on_block(path)
    generator = torch.Generator().manual_seed(seed)
    last = [_surprise(blocks.logits, hidden, generator) for hidden in calls.hidden]
    tokens = sum(hidden.shape[1] for hidden in calls.hidden)
    trace = Trace(entering, [[] for _ in blocks.paths], calls, tokens)
    trace.leaving[-1] = last
    for index, path in reversed(list(enumerate(blocks.paths))):
        if index:
            with blocks.block(index) as (block, _):
                trace.leaving[index - 1] = [
                    _through(block, trace, index, window)[0] for window in range(len(calls))
                ]
        on_block(path)
    return trace


@torch.no_grad()
def layer_samples(
    block: nn.Module, layers: dict[str, nn.Module], trace: Trace, index: int
) -> dict[str, Sample]:
    """Inputs of each layer of block `index`, and gradients with respect to its outputs."""
    samples = {name: Sample() for name in layers}
    for window in range(len(trace.calls)):
        seen: list[tuple[str, Tensor, Tensor]] = []
        with _recording(layers, seen):
            _, *gradients = _through(block, trace, index, window, seen)
        for (name, x, _output), g in zip(seen, gradients, strict=True):
            samples[name].x.append(x.reshape(-1, x.shape[-1]))
            samples[name].g.append(g.reshape(-1, g.shape[-1]))
    return samples


def _surprise(
    logits: Callable[[Tensor], Tensor], hidden: Tensor, generator: torch.Generator
) -> Tensor:
    """Gradient of the summed loss of one window with respect to `hidden` [1, tokens, hidden]."""
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        predicted = logits(leaf)[0].float()
        # On the CPU, where the same seed draws the same targets whatever the device.
        chances = predicted.detach().softmax(-1).cpu()
        drawn = torch.multinomial(chances, 1, generator=generator)[:, 0].to(predicted.device)
        loss = F.cross_entropy(predicted, drawn, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


def _through(
    block: nn.Module,
    trace: Trace,
    index: int,
    window: int,
    seen: Sequence[tuple[str, Tensor, Tensor]] = (),
) -> list[Tensor]:
    """Gradients with respect to what enters block `index`, then to the outputs in `seen`."""
    calls, leaving = trace.calls, trace.leaving[index][window]
    with torch.enable_grad():
        leaf = trace.entering[index][window].detach().requires_grad_()
        # A copy: a block may add to its input in place, which a leaf does not allow.
        output: Any = block(leaf.clone(), *calls.args[window], **calls.kwargs[window])
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        wanted = [leaf, *(output for _, _, output in seen)]
        reached = [tensor for tensor in wanted if tensor.requires_grad]
        found = iter(torch.autograd.grad(hidden, reached, leaving, allow_unused=True))
    gradients = [next(found) if tensor.requires_grad else None for tensor in wanted]
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(wanted, gradients, strict=True)
    ]


def _recording(
    layers: dict[str, nn.Module], seen: list[tuple[str, Tensor, Tensor]]
) -> AbstractContextManager[None]:
    """While open, each call of a layer adds its name, input and output to `seen`."""

    def after(name: str) -> Callable[..., None]:
        def hook(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
        ) -> None:
            seen.append((name, layer_input(args, kwargs).detach(), output))

        return hook

    @contextmanager
    def hooked() -> Iterator[None]:
        handles = [
            layer.register_forward_hook(after(name), with_kwargs=True)
            for name, layer in layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return hooked()
