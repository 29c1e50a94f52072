"""The same weights in another format: a file at once, a checkpoint a shard at a time."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import ArgumentError, CheckpointError, FormatError, HopsparseError, UnsupportedError
from ..formats import (
    BSR,
    NM,
    NMPattern,
    SparseMatrix,
    convert,
    format_named,
    parse_pattern,
    read_matrices,
    write_matrices,
)
from ..models.checkpoint import CheckpointReader, CheckpointWriter, ModuleEntry
from ..models.sparse24 import export_sparse24, import_sparse24
from .stored import SPARSE24, Kind, kind_of, tensor_shapes

if TYPE_CHECKING:
    from .convert import Convert

# Written anew by the writer, or about the source alone: the rest of a folder is copied.
_OWN_FILES = {"config.json", "model.safetensors.index.json", "report.json"}
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja"}


@dataclass(frozen=True)
class Rewritten:
    """What a conversion did.

    Attributes:
        layers: Matrices converted.
        kept_dense: Why each other weight stayed or became dense, by name.
    """

    layers: int
    kept_dense: dict[str, str]


def rewrite_file(options: Convert) -> Rewritten:
    """Convert every matrix of a file.

    In a file without hopsparse metadata every 2-D floating-point tensor is a matrix.
    """
    if options.to == SPARSE24:
        raise UnsupportedError(
            f"--to {SPARSE24} for a file", need="a checkpoint folder", hint="--to bitmask"
        )
    if kind_of(options.src) == "matrices":
        items = read_matrices(options.src, validate=True)
    else:
        from safetensors.torch import load_file

        items = dict(load_file(options.src))
    done: dict[str, SparseMatrix | Tensor] = {}
    count = 0
    for name, item in items.items():
        is_matrix = isinstance(item, SparseMatrix) or _is_weight(item)
        done[name] = rewritten(name, item, options) if is_matrix else item
        count += is_matrix
    if not count:
        raise CheckpointError(
            f"{options.src} holds no matrix", need="a 2-D tensor", hint="`hopsparse inspect` it"
        )
    write_matrices(options.out, done)
    return Rewritten(count, {})


def rewritten(name: str, item: SparseMatrix | Tensor, options: Convert) -> SparseMatrix | Tensor:
    """One matrix as `options.to` stores it.

    Raises:
        FormatError: It does not obey the pattern; the message names the matrix.
    """
    try:
        if options.to == "dense":
            return item.to_dense() if isinstance(item, SparseMatrix) else item
        if not isinstance(item, SparseMatrix):
            return _packed(item, options)
        return convert(item, options.to, pattern=_pattern(options), block=options.sides())
    except HopsparseError as error:
        raise FormatError(f"{name}: {error.got}", need=error.need, hint=error.hint) from error


def _packed(dense: Tensor, options: Convert) -> SparseMatrix:
    if options.to == "nm":
        return NM.from_dense(dense, _pattern(options) or NMPattern(2, 4))
    if options.to == "bsr":
        return BSR.from_dense(dense, options.sides() or (32, 32))
    return format_named(options.to).from_dense(dense)


def _pattern(options: Convert) -> NMPattern | None:
    if options.pattern is None:
        return None
    pattern = parse_pattern(options.pattern)
    if not isinstance(pattern, NMPattern):
        raise FormatError(f"pattern {pattern} for nm", need="N:M", hint="--pattern 2:4")
    return pattern


def _is_weight(item: SparseMatrix | Tensor) -> bool:
    return isinstance(item, Tensor) and item.ndim == 2 and item.is_floating_point()


def rewrite_folder(options: Convert, kind: Kind) -> Rewritten:
    """Convert every sparse layer of a checkpoint; a failure leaves nothing behind."""
    partial = options.out.with_name(options.out.name + ".partial")
    # One that was there before is a run of `sparsify` that can be resumed: not ours to delete.
    was_there = partial.exists()
    try:
        return _rewrite_any(options, kind)
    except BaseException:
        if not was_there:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _rewrite_any(options: Convert, kind: Kind) -> Rewritten:
    """Convert a checkpoint of ours, or one from elsewhere by way of ours."""
    if kind == "hopsparse":
        return _rewrite_own(options.src, options)
    if options.to == "nm" and options.pattern is None:
        sparse = import_sparse24(options.src, options.out, overwrite=options.overwrite)
        return Rewritten(len(sparse.modules), sparse.kept_dense)
    # Beside the result, so that both are on one disk; gone afterwards whatever happens.
    with tempfile.TemporaryDirectory(dir=options.out.absolute().parent) as folder:
        imported = Path(folder) / "imported"
        sparse = import_sparse24(options.src, imported)
        done = _rewrite_own(imported, options)
    return Rewritten(done.layers, {**sparse.kept_dense, **done.kept_dense})


def _rewrite_own(folder: Path, options: Convert) -> Rewritten:
    if options.to == SPARSE24:
        return _export(folder, options)
    with CheckpointReader(folder) as reader:
        assert reader.sparse is not None
        with CheckpointWriter(options.out, overwrite=options.overwrite) as writer:
            entries = {}
            for shard, names in _names_by_shard(reader).items():
                tensors, own = _rewritten_shard(reader, names, options)
                writer.write_shard(shard, tensors)
                entries.update(own)
            _copy_extras(folder, writer)
            config = dict(reader.config)
            config.pop("quantization_config")
            if options.to != "dense":
                ordered = {name: entries[name] for name in reader.sparse.modules}
                sparse = replace(reader.sparse, modules=ordered)
                config["quantization_config"] = sparse.to_json()
            writer.commit(config)
        return Rewritten(len(reader.sparse.modules), reader.sparse.kept_dense)


def _export(folder: Path, options: Convert) -> Rewritten:
    if options.overwrite:
        raise ArgumentError(
            f"--overwrite with --to {SPARSE24}",
            need="a new folder: only hopsparse checkpoints are ever overwritten",
            hint="another -o",
        )
    dense_again = export_sparse24(folder, options.out)
    with CheckpointReader(folder) as reader:
        assert reader.sparse is not None
        layers = len(reader.sparse.modules) - len(dense_again)
        return Rewritten(layers, {**reader.sparse.kept_dense, **dense_again})


def _names_by_shard(reader: CheckpointReader) -> dict[str, set[str]]:
    return {shard: set(tensor_shapes(reader.folder / shard)) for shard in reader.shards()}


def _rewritten_shard(
    reader: CheckpointReader, names: set[str], options: Convert
) -> tuple[dict[str, Tensor], dict[str, ModuleEntry]]:
    """Tensors of one shard of the result, and the entries of its sparse modules."""
    assert reader.sparse is not None
    tensors: dict[str, Tensor] = {}
    entries: dict[str, ModuleEntry] = {}
    for module, entry in reader.sparse.modules.items():
        parts = {f"{module}.{part}" for part in format_named(entry.format).PARTS}
        if not parts & names:
            continue
        names -= parts
        result = rewritten(module, reader.matrix(module), options)
        if isinstance(result, SparseMatrix):
            tensors |= {f"{module}.{part}": tensor for part, tensor in result.parts().items()}
            entries[module] = ModuleEntry.of(result)
        else:
            tensors[f"{module}.weight"] = result
    tensors |= {name: reader.load(name) for name in sorted(names)}
    return tensors, entries


def _copy_extras(folder: Path, writer: CheckpointWriter) -> None:
    for path in sorted(folder.iterdir()):
        is_extra = path.suffix in _COPIED_SUFFIXES and path.name not in _OWN_FILES
        if path.is_file() and is_extra:
            writer.copy(path)
