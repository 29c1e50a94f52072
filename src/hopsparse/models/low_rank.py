"""Low-rank products of a checkpoint: files beside its shards, layers beside its sparse ones."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..files import open_tensors
from ..nn import SparseLinear
from ..recover import LowRank
from ._files import write_tensors
from .rules import replace_module

#: Where products lie in a checkpoint: in a folder, so that other readers pass over them.
LOW_RANK_FOLDER = "low_rank"
_FILE = "products.safetensors"


def load_low_rank(model: nn.Module, folder: Path | str) -> list[str]:
    """Put the low-rank products of a checkpoint beside the sparse layers of its loaded model.

    `hopsparse.load` and `from_pretrained` load the sparse weights alone: a checkpoint that was
    recovered with `lora_rank` needs this as well.

    Args:
        model: What `hopsparse.load(folder)` returned; changed in place.
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
    with open_tensors(path) as file:
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


def _product(base: nn.Module | None, a: Tensor | None, b: Tensor | None) -> LowRank | None:
    """The product beside a layer; None if they do not belong together."""
    if not isinstance(base, SparseLinear) or a is None or b is None or a.dim() != 2:
        return None
    if (a.shape[1], *b.shape) != (base.in_features, base.out_features, a.shape[0]):
        return None
    product = LowRank(base, a.shape[0]).requires_grad_(False)
    product.a.data, product.b.data = a.to(product.a), b.to(product.b)
    return product


def products_of(model: nn.Module) -> dict[str, Tensor]:
    """The two factors of each product of `model`, by name."""
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
