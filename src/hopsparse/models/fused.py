"""Blocks of a language model with fewer launches: layers that share their inputs are one product.

q, k and v become one product, gate and up another with SwiGLU in its kernel, and the norm ahead of
layers that round their inputs goes into that rounding. Attention reads a cache of a fixed size
where it lies. The code of the model stays as it is: its modules are replaced by ones that answer in
the same way.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..nn import SparseLinear, after_norm, has_hooks, rms_eps, uses_of
from ._family import Family
from .joined import join, part, why_apart
from .rules import family_blocks, family_of
from .stream import PlusResidual, add_in_kernels, why_apart_from_stream

_SILU = ("SiLU", "SiLUActivation")  # of torch, and of transformers
_MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")


@dataclass
class FusedBlocks:
    """What became of the blocks of a model, and the way back.

    Attributes:
        fused: Full names of the layers that are parts of another now.
        left: Why others were left alone, by full names of the layers, joined by "+".
        adding: Full names of the layers that add to the residual stream in their kernels.
        not_adding: Why the last layers of other blocks do not, by their full names.
    """

    fused: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    adding: list[str] = field(default_factory=list)
    not_adding: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give every layer its own weight again; the same bits. A second time does nothing."""
        for step in reversed(self._undo):
            step()
        self._undo, self.fused, self.left = [], [], {}
        self.adding, self.not_adding = [], {}


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
    if is_fused(model):
        raise ArgumentError(
            "a model that is fused already",
            need="one that is not",
            hint="undo() of what fuse_blocks returned, or close() of a Generator",
        )
    try:
        paths = family_blocks(family, model)
    except AttributeError:
        raise ArgumentError(
            f"a {type(model).__name__} without {family.blocks}",
            need="the whole causal language model",
            hint="AutoModelForCausalLM.from_pretrained(...)",
        ) from None
    done, uses = FusedBlocks(), uses_of(model)
    done._undo.append(_attend_to_a_cache(model))
    try:
        for path in paths:
            for norm, names in family.scales:
                group = _Group(path, model.get_submodule(path), norm, names)
                if len(names) < 2:
                    continue
                taker = next((c.taker for c in family.channels if c.makers == names), None)
                why = group.why_not(uses)
                if why is None and taker is not None:
                    why = group.why_not_gated(taker)
                if why is not None:
                    done.left["+".join(group.full)] = why
                    continue
                done._undo.append(group.fuse() if taker is None else group.fuse_gated(taker))
                done.fused += group.full
            _add_to_stream(done, path, model.get_submodule(path), family, uses)
    except BaseException:
        done.undo()
        raise
    return done


def _attend_to_a_cache(model: nn.Module) -> Callable[[], None]:
    """Kernels of ours over a cache of a fixed size; returns the way back."""
    from .cached_attention import install  # It needs transformers, which made this model.

    return install(model)


def is_fused(model: nn.Module) -> bool:
    """Whether layers of a model are parts of another, or add to its stream."""
    known = (SharedInput, GatedMLP, PlusResidual)
    return any(isinstance(module, known) for module in model.modules())


def _add_to_stream(
    done: FusedBlocks, path: str, block: nn.Module, family: Family, uses: dict[int, int]
) -> None:
    """Let the last layers of a block add to its residual stream."""
    names = []
    for name, _ in family.residual:
        why = why_apart_from_stream(block, name, uses)
        if why is None:
            names.append(name)
        else:
            done.not_adding[f"{path}.{name}"] = why
    if names:
        done._undo.append(add_in_kernels(block, names))
        done.adding += [f"{path}.{name}" for name in names]


class _UnderWay(NamedTuple):
    """Results that were made, and not all taken.

    Attributes:
        x: What they were made of.
        state: Version of x, and what of torch says what a product is.
        left: Each, until it is taken.
    """

    x: Tensor
    state: tuple[object, ...]
    left: list[Tensor | None]


def _state_of(x: Tensor) -> tuple[object, ...]:
    kind = x.device.type
    return (
        -1 if x.is_inference() else x._version,
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
    )


class SharedInput(nn.Module):
    """One product for layers that are called one after the other with the same input.

    The first call makes all results, the others take theirs. Another input, or one that changed as
    torch counts it, starts anew. Tensors of inference mode have no such count: between two of the
    calls nothing may write them, as no known attention does.

    Args:
        linear: The rows of all.
        sizes: How many each has.
        norm: An RMSNorm ahead, or None.
    """

    def __init__(self, linear: SparseLinear, sizes: list[int], norm: nn.Module | None) -> None:
        super().__init__()
        self.linear, self.sizes, self.norm = linear, sizes, norm
        self._under_way: dict[int, _UnderWay] = {}  # by thread

    def take(self, which: int, x: Tensor) -> Tensor:
        """The result of one layer.

        Args:
            which: Its place.
            x: [..., in_features].

        Returns:
            [..., rows of that layer], a view.
        """
        # A compiler follows x itself, whatever is done to it.
        compiling = torch.compiler.is_compiling()
        state = () if compiling else _state_of(x)
        thread = 0 if compiling else threading.get_ident()
        known = self._under_way.get(thread)
        fits = known is not None and known.x is x and known.state == state
        if known is None or not fits or known.left[which] is None:
            known = _UnderWay(x, state, list(self(x).split(self.sizes, -1)))
            self._under_way[thread] = known
        found = cast(Tensor, known.left[which])
        known.left[which] = None
        if all(each is None for each in known.left):
            self._under_way.pop(thread, None)  # Nobody asks again: the memory is free.
        return found

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_under_way": {}}

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


@dataclass(frozen=True)
class _Group:
    """Layers of a block that share their input.

    Attributes:
        path: Of the block.
        block: The block.
        norm: What makes the input, by its name in the block.
        names: Of the layers, there.
    """

    path: str
    block: nn.Module
    norm: str
    names: tuple[str, ...]

    @property
    def full(self) -> list[str]:
        """Full names of the layers."""
        return [f"{self.path}.{name}" for name in self.names]

    def why_not(self, uses: dict[int, int]) -> str | None:
        """What keeps them apart, as a clause; None if nothing does."""
        home = self.names[0].rpartition(".")[0]
        try:
            around = [self.block.get_submodule(name) for name in (self.norm, home)]
            layers = [self.block.get_submodule(name) for name in self.names]
        except AttributeError:
            return "one is missing"
        if any(uses[id(each)] > 1 for each in (self.block, *around, *layers)):
            return "one of their modules stands in two places"
        return why_apart(layers)

    def why_not_gated(self, taker: str) -> str | None:
        """What keeps gate and up from ending in SwiGLU."""
        mlp = self.block.get_submodule(taker.rpartition(".")[0])
        act = getattr(mlp, "act_fn", None)
        if type(act).__name__ not in _SILU:
            return "the activation between them is no SiLU"
        if type(mlp).__name__ not in _MLPS:
            return f"a {type(mlp).__name__} may do something else with them"
        if has_hooks(mlp, act):
            return "the module around them has hooks"
        return "their rows are no multiple of 8" if self._layers()[0].out_features % 8 else None

    def fuse(self) -> Callable[[], None]:
        """One product for all; returns the way back."""
        layers = self._layers()
        linear, sizes = join(layers), [layer.out_features for layer in layers]
        biases, ahead = [layer.bias for layer in layers], self._norm_ahead()
        shared = SharedInput(linear, sizes, ahead).eval()
        for which, name in enumerate(self.names):
            _replace(self.block, name, RowsOf(shared, which).eval())
        self._put_norm(ahead, nn.Identity())
        from .self_attention import append_in_kernels  # It needs transformers too.

        home = self.names[0].rpartition(".")[0]
        apart = append_in_kernels(self.block.get_submodule(home), shared)

        def undo() -> None:
            apart()
            for name, layer in zip(self.names, part(linear, sizes, biases), strict=True):
                _replace(self.block, name, layer.train(self.block.training))
            self._put_norm(ahead, ahead)

        return undo

    def fuse_gated(self, taker: str) -> Callable[[], None]:
        """One product for gate and up, and what is around them; returns the way back."""
        layers, (home, _, last) = self._layers(), taker.rpartition(".")
        gate_up, sizes = join(layers, gate_up=True), [layer.out_features for layer in layers]
        biases, ahead = [layer.bias for layer in layers], self._norm_ahead()
        mlp, down = self.block.get_submodule(home), self.block.get_submodule(taker)
        gated = GatedMLP(gate_up, down, ahead).eval()
        _replace(self.block, home, gated)
        self._put_norm(ahead, nn.Identity())
        # Another model may hold the module too: what is kept for the way back is a copy without
        # weights, so that those are free if nobody does.
        shell = copy.copy(mlp)
        shell._modules = dict(mlp._modules) | {
            name.rpartition(".")[2]: nn.Identity() for name in self.names
        }

        def undo() -> None:
            parts = part(gate_up, sizes, biases, gate_up=True)
            for name, layer in zip(self.names, parts, strict=True):
                setattr(shell, name.rpartition(".")[2], layer)
            setattr(shell, last, gated.down_proj)
            _replace(self.block, home, shell.train(self.block.training))
            self._put_norm(ahead, ahead)

        return undo

    def _layers(self) -> list[SparseLinear]:
        return [cast(SparseLinear, self.block.get_submodule(name)) for name in self.names]

    def _norm_ahead(self) -> nn.Module | None:
        """The norm ahead, if it is of a kind that can go before that layer in a launch or two."""
        norm = self.block.get_submodule(self.norm)
        return norm if rms_eps(norm) is not None and not has_hooks(norm) else None

    def _put_norm(self, ahead: nn.Module | None, module: nn.Module | None) -> None:
        if ahead is not None and module is not None:
            _replace(self.block, self.norm, module)


def _replace(block: nn.Module, name: str, module: nn.Module) -> None:
    home, _, last = name.rpartition(".")
    setattr(block.get_submodule(home), last, module)
