"""The student: which of its weights train, and how it becomes sparse again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..nn import SparseLinear
from ..quant import SharedInput
from .layers import MaskedLinear
from .low_rank import LowRank
from .options import RecoverOptions

# Scales of quantized weights follow them this often: those of int4 are a search.
_RESCALE_STEPS = 16


class Student:
    """A model whose sparse layers were replaced by trainable ones.

    Args:
        model: Changed in place until `pack`.
        options: What trains.
        head: Path of the head, which does not.

    Attributes:
        model: The model.
        layers: The trainable layers by name; empty with `lora_rank`.
        low_rank: The low-rank products by name.
        trained: Every parameter that trains, by full name.

    Raises:
        ArgumentError: No sparse layer, weights that are not float32, or masks that cannot be
            re-selected.
    """

    def __init__(self, model: nn.Module, options: RecoverOptions, head: str = "") -> None:
        self.model = model
        self._options = options
        self._flags = {name: each.requires_grad for name, each in model.named_parameters()}
        self.layers: dict[str, MaskedLinear] = {}
        self.low_rank: dict[str, LowRank] = {}
        sparse = _sparse_layers(model)
        self._shared = SharedInput()
        made: dict[SparseLinear, nn.Module] = {}
        for layer, names in sparse.items():
            if options.lora_rank:
                made[layer] = self.low_rank[names[0]] = _beside(layer, names[0], options)
            else:
                made[layer] = self.layers[names[0]] = MaskedLinear(layer, self._shared)
        if options.masks == "sr-ste":
            for name, masked in self.layers.items():
                _select_first(name, masked, options)
        # Replaced last: an error leaves the model as it was.
        for layer, names in sparse.items():
            for name in names:
                _put(model, name, made[layer])
        self.trained = self._choose(head)

    def inside(self, path: str) -> Student:
        """The part of the student below a module: what a layer-wise run trains at a time."""
        part = object.__new__(Student)
        part.model, part._options, part._flags = self.model.get_submodule(path), self._options, {}
        prefix = f"{path}."
        part._shared = self._shared
        part.layers = _below(self.layers, prefix)
        part.low_rank = _below(self.low_rank, prefix)
        part.trained = _below(self.trained, prefix)
        return part

    def before_step(self) -> None:
        """What is added to the gradients of a whole step, and what is no longer needed."""
        self._shared.clear()
        for layer in self.layers.values():
            layer.pull()

    def after_step(self, step: int, *, exact: bool = False) -> None:
        """What follows an optimizer step: zeros are zeros again, masks and scales are renewed.

        Args:
            step: The step.
            exact: The optimizer leaves a zero without a gradient exactly as it is, as AdamW does
                while it has no momentum there: then nothing is to be made zero.
        """
        options = self._options
        if options.masks == "sr-ste":
            if step == options.frozen_from:
                for layer in self.layers.values():
                    layer.freeze()
            elif step < options.frozen_from and (step + 1) % options.mask_every == 0:
                for layer in self.layers.values():
                    layer.select(options.mask_decay)
        # A pass over all weights, 3 % of a step on a CPU.
        if not exact or options.masks == "sr-ste":
            for layer in self.layers.values():
                layer.clean()
        if (step + 1) % _RESCALE_STEPS == 0:
            self.rescale()

    def rescale(self) -> None:
        """Let scales of quantized weights follow the weights."""
        for layer in self.layers.values():
            layer.rescale()

    def snapshot(self, inside: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
        """Copies of all that training changes: weights, masks that move, scales.

        Args:
            inside: Starts of the names that are wanted.
        """
        changing = self._changing().items()
        return {n: tensor.detach().clone() for n, tensor in changing if n.startswith(inside)}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Put a snapshot back.

        Raises:
            KeyError: It is of another student.
        """
        for name, tensor in self._changing().items():
            tensor.copy_(snapshot[name])

    @torch.no_grad()
    def restore_some(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a part of a snapshot back."""
        changing = self._changing()
        for name, tensor in tensors.items():
            changing[name].copy_(tensor)

    def scales(self) -> dict[str, Tensor]:
        """Copies of the scales of quantized weights, as `snapshot` calls them."""
        return {
            f"{name}.scales": layer.scales.clone()
            for name, layer in self.layers.items()
            if layer.scales is not None
        }

    def check_zeros(self) -> None:
        """Assert that fixed zeros are zeros, bit by bit."""
        for name, layer in self.layers.items():
            assert layer.selecting or layer.is_clean(), f"{name} has pruned weights that moved"

    def resume_masks(self, step: int) -> None:
        """Leave SR-STE mode if the run being resumed had left it before `step`."""
        if self._options.masks == "sr-ste" and step > self._options.frozen_from:
            for layer in self.layers.values():
                layer.freeze()

    def pack(self) -> None:
        """Put sparse layers back, in their old formats; a low-rank product stays beside its own."""
        places = _all_modules(self.model)
        for layer in self.layers.values():
            packed = layer.packed()
            for name in [name for name, module in places if module is layer]:
                _put(self.model, name, packed)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._flags.get(name, True))
            parameter.grad = None

    def _changing(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self.trained)
        for name, layer in self.layers.items():
            if self._options.masks == "sr-ste":
                found[f"{name}.pruned"] = layer.pruned
            if layer.scales is not None:
                found[f"{name}.scales"] = layer.scales
        return found

    def _choose(self, head: str) -> dict[str, nn.Parameter]:
        """Freeze everything, then let train what the options name."""
        self.model.requires_grad_(False)
        trained: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            trained[f"{name}.weight"] = layer.weight
        for name, product in self.low_rank.items():
            trained |= {f"{name}.a": product.a, f"{name}.b": product.b}
        if self._options.train == "all":
            frozen = _vocabulary(self.model, head)
            known = {id(parameter) for parameter in trained.values()}
            for name, parameter in self.model.named_parameters():
                if id(parameter) not in frozen | known and parameter.is_floating_point():
                    trained[name] = parameter
        for parameter in trained.values():
            parameter.requires_grad_(True)
        return trained


@contextmanager
def training(model: nn.Module, options: RecoverOptions, head: str = "") -> Iterator[Student]:
    """A student while it trains; whatever happens, its layers are sparse again afterwards."""
    student = Student(model, options, head)
    try:
        yield student
    finally:
        student.pack()


def _sparse_layers(model: nn.Module) -> dict[SparseLinear, list[str]]:
    """Every sparse layer with all its names."""
    if isinstance(model, SparseLinear):
        raise ArgumentError(
            "a model that is itself a SparseLinear, which cannot be replaced in place",
            need="a module that holds sparse layers",
            hint="nn.Sequential(layer)",
        )
    found: dict[SparseLinear, list[str]] = {}
    for name, module in _all_modules(model):
        if isinstance(module, SparseLinear):
            found.setdefault(module, []).append(name)
    if not found:
        raise ArgumentError(
            f"a {type(model).__name__} without sparse layers",
            need="at least one SparseLinear to recover",
            hint='hopsparse.sparsify(model, "2:4", inputs) first',
        )
    return found


def _beside(layer: SparseLinear, name: str, options: RecoverOptions) -> LowRank:
    # A seed of its own for each layer, that does not depend on the others.
    seed = int.from_bytes(name.encode()[-6:], "big") + options.seed
    return LowRank(layer, options.lora_rank, seed)


def _select_first(name: str, layer: MaskedLinear, options: RecoverOptions) -> None:
    try:
        layer.select(options.mask_decay)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error.got}", need=error.need, hint=error.hint) from None


def _vocabulary(model: nn.Module, head: str) -> set[int]:
    """Parameters of embeddings and of the head."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if head:
        modules.append(model.get_submodule(head))  # type: ignore[arg-type]
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _below(found: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)
    }


def _all_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, child = name.rpartition(".")
    setattr(model.get_submodule(owner), child, module)
