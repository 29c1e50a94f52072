"""Blocks of a language model with fewer launches: layers that share their inputs are one product.

q, k and v become one product, gate and up another with SwiGLU in its kernel, and the norm ahead of
layers that round their inputs goes into that rounding. The code of the model stays as it is: its
modules are replaced by ones that answer in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..formats import Quantized
from ..nn import SparseLinear, after_norm, rms_eps
from .joined import join, part, why_apart
from .rules import family_blocks, family_of

_SILU = ("SiLU", "SiLUActivation")  # of torch, and of transformers


@dataclass
class FusedBlocks:
    """What became of the blocks of a model, and the way back.

    Attributes:
        fused: Full names of the layers that are parts of another now.
        left: Why others were left alone, by full names of the layers, joined by "+".
    """

    fused: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give every layer its own weight again; the same bits. A second time does nothing."""
        for step in reversed(self._undo):
            step()
        self._undo, self.fused, self.left = [], [], {}


def fuse_blocks(model: nn.Module) -> FusedBlocks:
    """Let layers of each block that share their inputs be one product.

    Args:
        model: A causal language model of transformers, of a known family, in evaluation mode.
            Changed in place; until `undo` it is for inference, and its state dict is another.

    Returns:
        What was done, and the way back.

    Raises:
        ArgumentError: The model is in training mode, on the meta device, or fused already.
        UnsupportedError: Its architecture is of no known family.
    """
    kind = getattr(getattr(model, "config", None), "model_type", "")
    family = family_of(str(kind))
    if model.training or any(each.is_meta for each in model.parameters()):
        raise ArgumentError(
            "a model in training mode" if model.training else "a model without weights",
            need="a model in evaluation mode, with its weights",
            hint="model.eval(), after the checkpoint is loaded",
        )
    if any(isinstance(module, SharedInput) for module in model.modules()):
        raise ArgumentError("a model that is fused already", need="one that is not", hint="undo()")
    done = FusedBlocks()
    for path in family_blocks(family, model):
        block = model.get_submodule(path)
        gated = family.channels[0]
        for norm, names in family.scales:
            if names == gated.makers:
                _fuse_gated(done, path, block, norm, gated.makers, gated.taker)
            elif len(names) > 1:
                _fuse_rows(done, path, block, norm, names)
    return done


class SharedInput(nn.Module):
    """One product for layers that are called one after the other with the same input.

    The first call makes all results, the others take theirs. Another input, or one that changed,
    starts anew.

    Args:
        linear: The rows of all.
        sizes: How many each has.
        norm: An RMSNorm ahead, or None.
    """

    def __init__(self, linear: SparseLinear, sizes: list[int], norm: nn.Module | None) -> None:
        super().__init__()
        self.linear, self.sizes, self.norm = linear, sizes, norm
        self._input: tuple[Tensor, int] | None = None
        self._left: list[Tensor | None] = []

    def take(self, which: int, x: Tensor) -> Tensor:
        """The result of one layer.

        Args:
            which: Its place.
            x: [..., in_features].

        Returns:
            [..., rows of that layer], a view.
        """
        known = self._input
        # A compiler follows x itself, whatever is done to it.
        counts = not torch.compiler.is_compiling() and not x.is_inference()
        version = x._version if counts else -1
        if known is None or known[0] is not x or known[1] != version or self._left[which] is None:
            self._input, self._left = (x, version), list(self(x).split(self.sizes, -1))
        found = cast(Tensor, self._left[which])
        self._left[which] = None
        if all(each is None for each in self._left):
            self._input = None  # Nobody asks again: the memory is free.
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: all results, one behind the other."""
        if self.norm is not None:
            return after_norm(self.linear, x, self.norm)
        y: Tensor = self.linear(x)
        return y


class RowsOf(nn.Module):
    """A layer that is part of a `SharedInput`; the first of them holds it as its module.

    Args:
        shared: The product.
        which: Place of this layer in it.
    """

    def __init__(self, shared: SharedInput, which: int) -> None:
        super().__init__()
        if which == 0:
            self.shared = shared
        self._shared, self._which = (shared,), which

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., rows]."""
        return self._shared[0].take(self._which, x)

    def extra_repr(self) -> str:
        """Its rows."""
        return f"rows={self._shared[0].sizes[self._which]}, part {self._which} of one product"


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up one product that ends in SwiGLU.

    Args:
        gate_up: Both, with `act="swiglu"`.
        down: The layer behind.
        norm: An RMSNorm ahead, or None.
    """

    def __init__(self, gate_up: SparseLinear, down: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.norm = gate_up, down, norm

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        norm = self.norm
        inner = self.gate_up_proj(x) if norm is None else after_norm(self.gate_up_proj, x, norm)
        y: Tensor = self.down_proj(inner)
        return y


def _fuse_rows(
    done: FusedBlocks, path: str, block: nn.Module, norm: str, names: tuple[str, ...]
) -> None:
    layers = [block.get_submodule(name) for name in names]
    full = [f"{path}.{name}" for name in names]
    if (why := why_apart(layers)) is not None:
        done.left["+".join(full)] = why
        return
    found = [cast(SparseLinear, layer) for layer in layers]
    linear, sizes = join(found), [layer.out_features for layer in found]
    ahead = _norm_of(block, norm, linear)
    shared = SharedInput(linear, sizes, ahead)
    for which, name in enumerate(names):
        _replace(block, name, RowsOf(shared, which))
    if ahead is not None:
        _replace(block, norm, nn.Identity())
    done.fused += full

    def undo() -> None:
        for name, layer in zip(names, part(linear, sizes), strict=True):
            _replace(block, name, layer)
        if ahead is not None:
            _replace(block, norm, ahead)

    done._undo.append(undo)


def _fuse_gated(
    done: FusedBlocks,
    path: str,
    block: nn.Module,
    norm: str,
    makers: tuple[str, ...],
    taker: str,
) -> None:
    layers, home = [block.get_submodule(name) for name in makers], taker.rpartition(".")[0]
    mlp, full = block.get_submodule(home), [f"{path}.{name}" for name in makers]
    why = why_apart(layers)
    if why is None and type(getattr(mlp, "act_fn", None)).__name__ not in _SILU:
        why = "the activation between them is no SiLU"
    if why is None and cast(SparseLinear, layers[0]).out_features % 8:
        why = "their rows are no multiple of 8"
    if why is not None:
        done.left["+".join(full)] = why
        return
    found = [cast(SparseLinear, layer) for layer in layers]
    gate_up, sizes = join(found, gate_up=True), [layer.out_features for layer in found]
    ahead = _norm_of(block, norm, gate_up)
    _replace(block, home, GatedMLP(gate_up, block.get_submodule(taker), ahead).eval())
    # The old module is only the way back: its weights are free.
    for name in makers:
        setattr(mlp, name.rpartition(".")[2], nn.Identity())
    if ahead is not None:
        _replace(block, norm, nn.Identity())
    done.fused += full

    def undo() -> None:
        for name, layer in zip(makers, part(gate_up, sizes, gate_up=True), strict=True):
            setattr(mlp, name.rpartition(".")[2], layer)
        _replace(block, home, mlp)
        if ahead is not None:
            _replace(block, norm, ahead)

    done._undo.append(undo)


def _norm_of(block: nn.Module, name: str, layer: SparseLinear) -> nn.Module | None:
    """The norm ahead, if the rounding of that layer's inputs can take it over."""
    norm, form = block.get_submodule(name), layer._form
    rounds = isinstance(form, Quantized) and form.scheme.activations != "none"
    hooked = norm._forward_hooks or norm._forward_pre_hooks
    return norm if rounds and rms_eps(norm) is not None and not hooked else None


def _replace(block: nn.Module, name: str, module: nn.Module) -> None:
    home, _, last = name.rpartition(".")
    setattr(block.get_submodule(home), last, module)


def describe(done: FusedBlocks) -> str:
    """What was fused, for people.

    Example:
        >>> describe(FusedBlocks(["a.q", "a.k"], {"a.gate+a.up": "one is a Linear"}))
        '2 layers are parts of others; a.gate+a.up: one is a Linear'
    """
    told = [f"{len(done.fused)} layers are parts of others"]
    told += [f"{names}: {why}" for names, why in done.left.items()]
    return "; ".join(told)
