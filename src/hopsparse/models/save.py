"""`hopsparse.save`: a model with sparse layers to a checkpoint folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentError, UnsupportedError
from ..nn import SparseLinear
from .checkpoint import SINGLE_NAME, CheckpointWriter, ModuleEntry, SparseConfig
from .fused import is_fused


def save(model: nn.Module, out: Path | str, *, overwrite: bool = False) -> None:
    """Write a model that `hopsparse.sparsify` made sparse.

    A transformers model loads again with `from_pretrained(out)` and `hopsparse.load(out)`, any
    other with `hopsparse.load(out, into=model)`.

    Args:
        model: Holds at least one `SparseLinear`.
        out: Folder to make; it appears when it is complete.
        overwrite: Replace a folder that hopsparse wrote.

    Raises:
        ArgumentError: The model has no sparse layer.
        UnsupportedError: It has low-rank products, whose place is beside a recovered checkpoint, or
            its blocks are fused.
        CheckpointError: `out` exists, or cannot be written.

    Example:
        >>> import tempfile, torch, hopsparse
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> _ = hopsparse.sparsify(model, "2:4", [torch.randn(8, 64)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(model, folder + "/out")
        ...     _ = hopsparse.load(folder + "/out", into=nn.Sequential(nn.Linear(64, 64)))
    """
    modules = sparse_modules(model)
    if not modules:
        raise ArgumentError(
            f"a {type(model).__name__} without sparse layers",
            need="at least one SparseLinear",
            hint='hopsparse.sparsify(model, "2:4", inputs) first',
        )
    sparse = SparseConfig(_common_pattern(modules), "in memory", modules, {})
    config: dict[str, Any] = {}
    attached = getattr(getattr(model, "config", None), "quantization_config", None)
    if isinstance(getattr(attached, "sparse", None), SparseConfig):
        known: SparseConfig = attached.sparse  # type: ignore[union-attr]
        sparse = SparseConfig(known.pattern, known.method, modules, known.kept_dense)
        config = model.config.to_diff_dict()  # type: ignore[union-attr, operator]
        config.pop("_name_or_path", None)
    with CheckpointWriter(out, overwrite=overwrite, resumable=False) as writer:
        writer.write_shard(SINGLE_NAME, _unshared(model.state_dict()))
        writer.commit(config | {"quantization_config": sparse.to_json()})


def sparse_modules(model: nn.Module) -> dict[str, ModuleEntry]:
    """How each sparse layer of `model` is stored, by module name.

    Raises:
        UnsupportedError: It has low-rank products, which no shard has a place for, or its blocks
            are fused.
    """
    from ..recover import LowRank  # training is not loaded with every checkpoint

    if is_fused(model):
        raise UnsupportedError(
            "a model whose blocks are fused",
            need="layers of their own",
            hint="undo() of what fuse_blocks returned",
        )
    if any(isinstance(module, LowRank) for module in model.modules()):
        raise UnsupportedError(
            "a model with low-rank products beside its sparse layers",
            need="sparse layers alone",
            hint="copy the folder that it was loaded from",
        )
    return {
        name: ModuleEntry.of(module.matrix)
        for name, module in model.named_modules()
        if isinstance(module, SparseLinear)
    }


def attach_to_transformers(
    model: nn.Module, pattern: str, method: str, kept_dense: Mapping[str, str]
) -> None:
    """Make `model.save_pretrained` write a sparse checkpoint, if it is a transformers model."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    from .quantizer import attach

    attach(model, SparseConfig(pattern, method, sparse_modules(model), dict(kept_dense)))


def _common_pattern(modules: Mapping[str, ModuleEntry]) -> str:
    patterns = {str(entry.attributes.get("pattern", entry.stored_as)) for entry in modules.values()}
    return patterns.pop() if len(patterns) == 1 else "mixed"


def _unshared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once: tied weights under their first name, as loaders expect them."""
    seen: set[tuple[int, int]] = set()
    result = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.numel())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        result[name] = tensor
    return result
