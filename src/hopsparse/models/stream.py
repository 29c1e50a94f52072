"""Blocks that add to the residual stream in the kernels of their last layers.

A block of transformers is x + attention(norm(x)), then the same of its MLP. Both end in a layer,
whose kernel can add: the block hands the stream to that layer before it calls what is around it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..nn import SparseLinear, has_hooks, plus_residual

# Those that are x + attention(norm(x)), then x + mlp(norm(x)), and end as they should.
_BLOCKS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
_ENDS_IN = {
    "self_attn": ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"),
    "mlp": ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "GatedMLP"),
}
_LAST = ("self_attn.o_proj", "mlp.down_proj")


class PlusResidual(nn.Module):
    """A layer that adds what it was given for its next call in this thread, if it was.

    Args:
        linear: The layer.
    """

    def __init__(self, linear: SparseLinear) -> None:
        super().__init__()
        self.linear = linear
        self._given: dict[int, Tensor] = {}  # by thread

    def give(self, residual: Tensor) -> None:
        """What the next call adds.

        Args:
            residual: [..., out_features].
        """
        self._given[_thread()] = residual

    def take(self) -> Tensor | None:
        """What was given and not yet added."""
        return self._given.pop(_thread(), None)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_given": {}}

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        residual = self.take()
        if residual is None:
            y: Tensor = self.linear(x)
            return y
        return plus_residual(self.linear, x, residual)


def why_apart_from_stream(block: nn.Module, name: str, uses: dict[int, int]) -> str | None:
    """What keeps a layer from adding to the stream, as a clause; None if nothing does.

    Args:
        block: The block.
        name: Of the layer, in the block.
        uses: In how many places modules stand, by id.
    """
    home = name.partition(".")[0]
    if type(block).__name__ not in _BLOCKS or name not in _LAST:
        return f"a {type(block).__name__} may do something else with it"
    try:
        around, layer = block.get_submodule(home), block.get_submodule(name)
    except AttributeError:
        return "it is missing"
    if type(around).__name__ not in _ENDS_IN[home]:
        return f"a {type(around).__name__} may do something else with it"
    if any(uses.get(id(each), 1) > 1 for each in (block, around, layer)):
        return "one of their modules stands in two places"
    if type(layer) is not SparseLinear:
        return f"it is a {type(layer).__name__}"
    if has_hooks(block, around, layer):
        return "it, or what is around it, has hooks"
    return None if layer.act is None else "it has an activation of its own"


def add_in_kernels(block: nn.Module, names: list[str]) -> Callable[[], None]:
    """Let layers of a block add to the stream; returns the way back.

    The block stays the object that it is, of a class made from its own: who looks for blocks by
    their class finds it.

    Args:
        block: The block.
        names: Layers that `why_apart_from_stream` has nothing against.
    """
    for name in names:
        home, _, last = name.rpartition(".")
        layer = cast(SparseLinear, block.get_submodule(name))
        setattr(block.get_submodule(home), last, PlusResidual(layer).eval())
    before = type(block)
    block.__class__ = _adding(cast(Any, before))

    def undo() -> None:
        block.__class__ = before
        for name in names:
            home, _, last = name.rpartition(".")
            found = block.get_submodule(name)
            if isinstance(found, PlusResidual):  # Somebody may have replaced it since.
                setattr(block.get_submodule(home), last, found.linear.train(block.training))

    return undo


@cache
def _adding(kind: Any) -> Any:
    """A block of that class, whose layers add."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args:  # transformers names them; others are for the code that it has.
            found: Tensor = kind.forward(self, hidden_states, *args, **kwargs)
            return found
        normed = self.input_layernorm(hidden_states)
        end = self.self_attn.o_proj
        stream = _added(
            end, hidden_states, lambda: self.self_attn(hidden_states=normed, **kwargs)[0]
        )
        normed_again = self.post_attention_layernorm(stream)
        return _added(self.mlp.down_proj, stream, lambda: self.mlp(normed_again))

    methods = {"forward": forward, "__reduce__": lambda self: made_again(_adding, kind, self)}
    return type(kind.__name__, (kind,), methods | {"__module__": __name__})


def made_again(make: Callable[[Any], Any], kind: type, module: nn.Module) -> tuple[Any, ...]:
    """How copy and pickle make a module of a class that stands in no file.

    Args:
        make: Makes that class of one that does; a function of a file.
        kind: That one.
        module: What is copied.
    """
    return _empty, (make, kind), module.__dict__


def _empty(make: Callable[[Any], Any], kind: type) -> Any:
    made = make(kind)
    return made.__new__(made)


def _added(end: nn.Module, stream: Tensor, call: Callable[[], Tensor]) -> Tensor:
    """The stream and what `call` makes of it; `call` ends in the layer `end`."""
    if not isinstance(end, PlusResidual):
        return stream + call()
    end.give(stream)
    try:
        made = call()
    finally:
        left = end.take()
    return made if left is None else stream + made


def _thread() -> int:
    # A compiler follows one thread, and guards what it asks of others.
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
