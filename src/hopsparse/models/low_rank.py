"""Low-rank products of a checkpoint: files beside its shards, layers beside its sparse ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, UnsupportedError
from ..files import open_tensors, unbroken
from ..nn import SparseLinear
from ._files import write_tensors
from .rules import replace_module

if TYPE_CHECKING:
    from ..recover import LowRank

#: Where products lie in a checkpoint: in a folder, so that other readers pass over them.
LOW_RANK_FOLDER = "low_rank"
_FILE = "products.safetensors"
_FOLLOW = ContextVar("hopsparse_products_follow", default=False)


def load_low_rank(model: nn.Module, folder: Path | str) -> list[str]:
    """Put the low-rank products of a checkpoint beside the sparse layers of its loaded model.

    `hopsparse.load` does this itself. `from_pretrained` of transformers, which builds the classes
    that config.json names and no others, warns and loads the sparse weights alone.

    Args:
        model: A model with the sparse layers of the checkpoint; changed in place. Products that it
            has already are replaced by those of the folder.
        folder: The checkpoint.

    Returns:
        Names of the layers that have a product now.

    Raises:
        CheckpointError: There are none, or they do not fit the model.

    Example:
        >>> load_low_rank(nn.Identity(), "no/such")
        Traceback (most recent call last):
        hopsparse.errors.CheckpointError: no/such/low_rank/products.safetensors cannot be read: ...
    """
    path = Path(folder) / LOW_RANK_FOLDER / _FILE
    with open_tensors(path) as file, unbroken():
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = sorted({name.rpartition(".")[0] for name in tensors})
    layers = dict(model.named_modules())
    made: dict[str, LowRank] = {}
    for name in names:
        product = _product(layers.get(name), tensors.get(f"{name}.a"), tensors.get(f"{name}.b"))
        if product is None:
            raise CheckpointError(
                f"{path} holds a product for {name!r}",
                need="a sparse layer of that name and shape in the model",
                hint=f"hopsparse.load({str(folder)!r}) first",
            )
        made[name] = product
    for name, product in made.items():
        replace_module(model, name, lambda _, new=product: new)  # type: ignore[misc]
    return names


def has_low_rank(folder: Path | str) -> bool:
    """Whether a checkpoint has low-rank products beside its sparse weights."""
    return (Path(folder) / LOW_RANK_FOLDER).exists()


def refuse_low_rank(folder: Path | str) -> None:
    """Refuse a checkpoint whose products would be lost.

    Raises:
        UnsupportedError: It has low-rank products.
    """
    if has_low_rank(folder):
        raise UnsupportedError(
            f"{folder} has low-rank products beside its weights",
            need="sparse weights alone: no other format has a place for the products",
            hint="the checkpoint that those products were trained for",
        )


@contextmanager
def products_follow() -> Iterator[None]:
    """While open, this thread puts products beside loaded layers by itself: nobody is warned."""
    token = _FOLLOW.set(True)
    try:
        yield
    finally:
        _FOLLOW.reset(token)


def warn_of_products(folder: Path) -> None:
    """Warn whoever loads a checkpoint without its products, if it has some."""
    if has_low_rank(folder) and not _FOLLOW.get():
        warnings.warn(
            f"{folder} was recovered with low-rank products, which from_pretrained leaves out: "
            f"the model is not the one that was measured. hopsparse.load({str(folder)!r}) loads "
            "both; hopsparse.load_low_rank(model, folder) adds the products to this model.",
            stacklevel=2,
        )


def _product(base: nn.Module | None, a: Tensor | None, b: Tensor | None) -> LowRank | None:
    """The product beside a layer; None if they do not belong together."""
    from ..recover import LowRank

    if isinstance(base, LowRank):
        base = base.base
    if not isinstance(base, SparseLinear) or a is None or b is None or a.dim() != 2:
        return None
    if (a.shape[1], *b.shape) != (base.in_features, base.out_features, a.shape[0]):
        return None
    product = LowRank(base, a.shape[0]).requires_grad_(False)
    product.a.data, product.b.data = a.to(product.a), b.to(product.b)
    return product


def products_of(model: nn.Module) -> dict[str, Tensor]:
    """The two factors of each product of `model`, by name."""
    from ..recover import LowRank

    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, LowRank):
            found |= {f"{name}.a": module.a.detach(), f"{name}.b": module.b.detach()}
    return found


def write_low_rank(folder: Path, model: nn.Module, dtype: torch.dtype) -> None:
    """Write the products of `model` into the checkpoint at `folder`; nothing if it has none.

    Raises:
        CheckpointError: They cannot be written.
    """
    products = products_of(model)
    if products:
        (folder / LOW_RANK_FOLDER).mkdir(exist_ok=True)
        cast = {name: tensor.to(dtype) for name, tensor in products.items()}
        write_tensors(folder / LOW_RANK_FOLDER / _FILE, cast)
