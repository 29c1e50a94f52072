"""From dense layers of a model to empty sparse ones, and what the files must hold for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import nn

from ..errors import CheckpointError, FormatError
from ..files import read_header
from ..formats import NM, Quantized, SparseMatrix, packed_k
from ..nn import SparseLinear
from .checkpoint import CheckpointReader, ModuleEntry, SparseConfig
from .rules import replace_module

#: Shape and dtype of stored tensors by name; dtypes as safetensors writes them.
StoredSpecs = dict[str, tuple[tuple[int, ...], str]]

_SAFETENSORS_DTYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def require_sparse(reader: CheckpointReader) -> SparseConfig:
    """The sparse part of a checkpoint.

    Raises:
        CheckpointError: It is dense, or another tool's.
    """
    if reader.sparse is not None:
        return reader.sparse
    folder = str(reader.folder)
    method = (reader.config.get("quantization_config") or {}).get("quant_method")
    got = f"{folder} is " + (f"quantised by {method!r}" if method else "a dense checkpoint")
    if method == "compressed-tensors":
        hint = f"hopsparse.import_sparse24({folder!r}, OUT)"
    else:
        hint = f"AutoModelForCausalLM.from_pretrained({folder!r}), or `hopsparse sparsify` first"
    raise CheckpointError(
        got, need='a quantization_config of method "hopsparse" in config.json', hint=hint
    )


def stored_specs(shards: Iterable[Path | str]) -> StoredSpecs:
    """Read the headers of safetensors files, which also shows a truncated one.

    Raises:
        CheckpointError: A shard is missing or damaged.
    """
    specs: StoredSpecs = {}
    for shard in shards:
        specs |= read_header(Path(shard)).tensors
    return specs


def check_stored(sparse: SparseConfig, stored: StoredSpecs) -> None:
    """Compare what config.json promises with what the shards hold.

    Raises:
        CheckpointError: A part of a matrix is missing, or has another shape or dtype.
    """
    for module, entry in sparse.modules.items():
        for part, (shape, dtype) in entry.part_specs().items():
            wanted = (shape, _SAFETENSORS_DTYPES.get(str(dtype).removeprefix("torch.")))
            found = stored.get(f"{module}.{part}")
            if found == wanted:
                continue
            raise CheckpointError(
                f"the shards hold no tensor {module}.{part}"
                if found is None
                else f"{module}.{part} is stored as {found[1]} {list(found[0])}",
                need=f"{wanted[1]} {list(shape)}, as config.json says",
                hint="download or write the checkpoint again",
            )


def check_contents(module: str, matrix: SparseMatrix) -> None:
    """Refuse a filled weight whose indices lead outside, or that is no matrix of its pattern.

    Every index is read, except in `nm`, whose packed indices cannot lead outside a window and take
    long to unpack: there two corners show whether the pattern is the right one.

    Raises:
        CheckpointError: The weight is damaged, or config.json describes it wrongly.
    """
    try:
        if isinstance(matrix, Quantized):
            matrix.check_scales()
            matrix = matrix.codes()
        for part in _corners(matrix) if isinstance(matrix, NM) else (matrix,):
            part.validate()
    except FormatError as error:
        raise CheckpointError(f"{module}: {error.got}", need=error.need, hint=error.hint) from error


def _corners(matrix: NM) -> Iterator[NM]:
    """The first and the last columns of the first and of the last panel, as matrices.

    16 groups of M columns fill whole units, the tiles of a panel.
    """
    cols = 16 * matrix.pattern.m
    units = packed_k(cols, matrix.pattern) // 64
    steps = matrix.values.shape[1] // matrix.meta.shape[1] * units
    last_panel, last = matrix.meta.shape[0] - 1, (matrix.meta.shape[1] - 1) // units
    for panel, block in {(0, 0), (last_panel, last)}:
        shape = (
            min(64, matrix.shape[0] - 64 * panel),
            min(cols, matrix.shape[1] - cols * block),
        )
        here = slice(panel, panel + 1)
        values = matrix.values[here, steps * block : steps * (block + 1)]
        meta = matrix.meta[here, units * block : units * (block + 1)]
        yield NM(shape, values, meta, matrix.pattern)


def make_sparse(model: nn.Module, modules: Mapping[str, ModuleEntry]) -> list[str]:
    """Replace the dense layers named in `modules` by empty ones on the meta device.

    A head-less model finds the layers of a full one, and the other way round: names may lack or
    have a first component. All names are looked up before anything is replaced.

    Returns:
        Names of the new layers in `model`.

    Raises:
        CheckpointError: A layer is not there, is no nn.Linear, or has another shape.
    """
    linears = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    }
    prefix = getattr(model, "base_model_prefix", "")
    found: dict[str, ModuleEntry] = {}
    for name, entry in modules.items():
        options = [name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]
        place = next((option for option in options if option in linears), None)
        if place is None:
            raise CheckpointError(
                f"the checkpoint stores a sparse weight for {name!r}",
                need=f"an nn.Linear of that name in {type(model).__name__}",
                hint="load it into the architecture that config.json names",
            )
        linear = linears[place]
        if (linear.out_features, linear.in_features) != entry.shape:
            raise CheckpointError(
                f"{name} is stored as {list(entry.shape)}",
                need=f"[{linear.out_features}, {linear.in_features}] for this model",
                hint="load it into the architecture that config.json names",
            )
        found[place] = entry
    for place, entry in found.items():
        layer = SparseLinear.empty(
            entry.shape,
            entry.torch_dtype,
            entry.format,
            entry.attributes,
            bias=linears[place].bias is not None,
            device="meta",
        ).train(linears[place].training)
        # A module that the model holds under several names stays one module.
        for alias in [name for name, module in linears.items() if module is linears[place]]:
            replace_module(model, alias, lambda _, layer=layer: layer)  # type: ignore[misc]
    return list(found)
