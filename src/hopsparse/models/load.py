"""`hopsparse.load`: a checkpoint folder to a model, with transformers or into any module."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, CheckpointError, HopsparseError, UnsupportedError
from ..nn import SparseLinear
from ..ops import COMPUTE_DTYPES
from ._layers import check_contents, check_stored, make_sparse, require_sparse, stored_specs
from .checkpoint import CheckpointReader, SparseConfig
from .low_rank import has_low_rank, load_low_rank, products_follow
from .register import register

_Module = TypeVar("_Module", bound=nn.Module)
# from_pretrained of transformers changes global state, and gives garbage in two threads at once.
_ONE_AT_A_TIME = threading.Lock()


def load(
    path: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    into: _Module | None = None,
) -> nn.Module:
    """Load a sparse checkpoint.

    Low-rank products that recovery left beside the sparse weights are loaded with them.
    Patterns and ranges of indices are checked, values are not: `hopsparse verify` reads all.
    Threads may load at the same time; transformers' own `from_pretrained` is not made for that.

    Args:
        path: The folder that `hopsparse sparsify` wrote.
        device: Where the weights go.
        dtype: Of all float weights; as stored when None.
        into: A model of the right architecture, whose weights may be on the meta device. Its
            layers are replaced and filled in place; transformers is not needed.

    Returns:
        `into`, or a transformers model in evaluation mode.

    Raises:
        CheckpointError: The folder is missing, damaged, too new, dense, or does not fit `into`.
        ArgumentError: Sparse weights cannot have that dtype, or torch does not know the device.
        UnsupportedError: transformers is needed and not installed.

    Example:
        >>> load("no/such/folder")
        Traceback (most recent call last):
        hopsparse.errors.CheckpointError: no/such/folder is no folder. Required: a checkpoint ...
    """
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise ArgumentError(
            f"dtype {dtype}", need="float32, bfloat16 or float16", hint="torch.bfloat16"
        )
    place = check_device(device)
    with CheckpointReader(path) as reader:
        sparse = require_sparse(reader)
        check_stored(sparse, stored_specs(reader.folder / shard for shard in reader.shards()))
        if into is not None:
            loaded: nn.Module = _fill(into, reader, sparse, place, dtype)
        else:
            architecture = architecture_of(reader.config)
            with products_follow():
                loaded = _from_pretrained(Path(path), architecture, place, dtype)
    if has_low_rank(path):
        load_low_rank(loaded, path)
    return loaded


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class that config.json names; a causal language model if it names none."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) else "AutoModelForCausalLM"


def model_class(architecture: str) -> Any:
    """The model class of that name in transformers; other things of that name do not count."""
    import transformers

    found = getattr(transformers, architecture, None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else transformers.AutoModelForCausalLM


def check_device(device: torch.device | str) -> torch.device:
    """The device, if this machine and this build of torch have it.

    Raises:
        ArgumentError: They do not.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"device {str(device)!r} ({str(error).splitlines()[0]})",
            need="a device that this torch can use",
            hint="cpu, and `hopsparse doctor` for what is missing",
        ) from error
    return place


def _from_pretrained(
    path: Path, architecture: str, device: torch.device, dtype: torch.dtype | None
) -> nn.Module:
    register()
    try:
        kind = model_class(architecture)
    except ImportError as error:
        raise UnsupportedError(
            f"{path} holds a model of class {architecture}, and transformers is not installed",
            need="transformers, or a model to load into",
            hint='pip install "hopsparse[models]", or hopsparse.load(path, into=model)',
        ) from error
    # A device map needs accelerate; the CPU needs neither.
    placed = {} if device.type == "cpu" else {"device_map": {"": device}}
    wanted = "auto" if dtype is None else dtype
    try:
        with _ONE_AT_A_TIME:
            model: nn.Module = kind.from_pretrained(
                path, dtype=wanted, local_files_only=True, **placed
            )
    except (HopsparseError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Whatever the code of an architecture does with a wrong field.
        why = " ".join(str(error).split())
        raise CheckpointError(
            f"transformers cannot build the model of {path} ({type(error).__name__}: {why})",
            need="a config.json that describes the stored weights",
            hint="restore config.json; `hopsparse verify` looks for other damage",
        ) from error
    return model


def _fill(
    model: _Module,
    reader: CheckpointReader,
    sparse: SparseConfig,
    device: torch.device,
    dtype: torch.dtype | None,
) -> _Module:
    """Check that everything fits, then replace layers and read a tensor at a time."""
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        # accelerate's empty weights lose the sharing that the constructor set up.
        tie()
    _check_fit(model, reader, sparse)
    layers = make_sparse(model, sparse.modules)
    # Tensors shared by several names, such as tied embeddings, stay shared.
    filled: dict[int, nn.Parameter] = {}
    stored = set(reader.names())
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in stored and id(parameter) not in filled:
            tensor = _placed(reader.load(name), device, dtype)
            filled[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        _assign(model, name, filled[id(parameter)])
    for name, _ in list(model.named_buffers(remove_duplicate=False)):
        if name in stored:
            # Buffers keep the dtype they have on disk; a layer is cast as a whole below.
            _assign(model, name, _placed(reader.load(name), device, None))
    for name in layers:
        layer = model.get_submodule(name)
        assert isinstance(layer, SparseLinear)
        check_contents(name, layer.matrix)
        if dtype is not None and layer.values_dtype != dtype:
            layer.to(dtype)
    return model.to(device)


def _check_fit(model: nn.Module, reader: CheckpointReader, sparse: SparseConfig) -> None:
    """Refuse a model with weights that are not stored, or the other way round."""
    stored = set(reader.names())
    parts = {f"{module}.{part}" for module, entry in sparse.modules.items() for part in entry.parts}
    state = model.state_dict(keep_vars=True)
    weights = {f"{module}.weight" for module in sparse.modules}
    present = {id(tensor) for name, tensor in state.items() if name in stored or name in weights}
    missing = [
        name
        for name, tensor in state.items()
        if name not in stored and name not in weights and id(tensor) not in present
    ]
    unexpected = sorted(stored - parts - state.keys())
    for names, got in ((missing, "the checkpoint lacks"), (unexpected, "the model lacks")):
        if names:
            raise CheckpointError(
                f"{got} {', '.join(names[:3])}" + (" and others" if len(names) > 3 else ""),
                need=f"the same weights in both ({type(model).__name__})",
                hint="build the model that the checkpoint was made from",
            )
    for name, tensor in state.items():
        if name in stored and tensor.shape != reader.load(name).shape:
            raise CheckpointError(
                f"{name} is stored as {list(reader.load(name).shape)}",
                need=f"{list(tensor.shape)} for {type(model).__name__}",
                hint="build the model that the checkpoint was made from",
            )
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in state]
    if lost:
        raise CheckpointError(
            f"buffers {', '.join(lost[:3])} are on the meta device and not stored",
            need="a model whose non-persistent buffers are real",
            hint="accelerate.init_empty_weights(include_buffers=False) around its construction",
        )


def _placed(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and tensor.dtype in COMPUTE_DTYPES else tensor.dtype
    # A copy in any case: a view of the file would break when the file is replaced.
    return tensor.to(device, wanted, copy=True)


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, child = name.rpartition(".")
    setattr(model.get_submodule(owner), child, value)
