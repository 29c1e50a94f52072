"""The same weights in another format: a file at once, a checkpoint a shard at a time."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from ..errors import ArgumentError, CheckpointError, FormatError, HopsparseError, UnsupportedError
from ..formats import (
    BSR,
    BSR24,
    FORMATS,
    NM,
    NMPattern,
    Quantized,
    SparseMatrix,
    convert,
    format_named,
    parse_pattern,
    read_matrices,
    write_matrices,
)
from ..formats.exchange import MOST_DENSE, foreign_matrices
from ._files import check_result
from ._layers import check_stored, require_sparse, stored_specs
from .auto import AUTO, BY_DENSE, Chosen, choose
from .checkpoint import CheckpointReader, CheckpointWriter, ModuleEntry
from .kinds import SPARSE24, Kind, kind_of
from .low_rank import refuse_low_rank
from .sparse24 import export_sparse24, import_sparse24

#: What weights can be converted to; "auto" is the format that fits each of them.
TARGETS = (AUTO, *FORMATS, SPARSE24)
_IN_BLOCKS: dict[str, type[BSR | BSR24]] = {kind.name: kind for kind in (BSR, BSR24)}


@dataclass(frozen=True)
class Converted:
    """What a conversion did.

    Attributes:
        kind: What the source was.
        layers: Matrices converted.
        kept_dense: Why each other weight stayed or became dense, by name.
        chosen: What each matrix was stored as and why, by name, where `to` was "auto".
        notes: What was changed or left out when a foreign file was read.
    """

    kind: Kind
    layers: int
    kept_dense: dict[str, str]
    chosen: dict[str, Chosen] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Target:
    """Where to and how."""

    out: Path
    to: str
    pattern: NMPattern | None
    block: tuple[int, int] | None
    overwrite: bool
    folder: bool
    chosen: dict[str, Chosen] = field(default_factory=dict)


def convert_checkpoint(
    src: Path | str,
    dst: Path | str,
    *,
    to: str,
    pattern: NMPattern | str | None = None,
    block: tuple[int, int] | None = None,
    overwrite: bool = False,
) -> Converted:
    """Store the same weights in another format, exactly; nothing is pruned.

    Args:
        src: A hopsparse checkpoint, a checkpoint of compressed-tensors with a `sparsity_config`,
            a .safetensors file, in which without hopsparse metadata every 2-D floating-point
            tensor is a matrix, or a foreign file: .mtx, .smtx, .npz, .pt (docs/inspect.md).
        dst: The folder or file to make; it appears when it is complete.
        to: One of `TARGETS`: a format, "dense", "sparse-24-bitmask" (folders only), or "auto": for
            each matrix the format that its pattern asks for (`measure.ranking.choose_storage`).
        pattern: For "nm", the N:M to pack (default: that of the source, else 2:4).
        block: For "bsr" and "bsr24", the sides of a block (default: those of the source, else
            32 x 32).
        overwrite: Replace a file, or a checkpoint that hopsparse wrote.

    Raises:
        ArgumentError: An option means nothing here.
        CheckpointError: `src` is missing, damaged or plainly dense; `dst` exists.
        FormatError: A matrix does not obey the pattern; the message names it.
        UnsupportedError: The weights are also quantised, have low-rank products beside them, or
            none obeys 2:4.

    Example:
        >>> convert_checkpoint("no/such/folder", "out", to="csr")
        Traceback (most recent call last):
        hopsparse.errors.CheckpointError: no/such/folder does not exist. Required: a checkpoint ...
    """
    src, dst = Path(src), Path(dst)
    check_result(dst)
    target = _Target(dst, to, _parsed(to, pattern, block), block, overwrite, src.is_dir())
    kind = kind_of(src)
    if src.resolve() == dst.resolve():
        raise ArgumentError(
            f"{dst} as both source and result", need="another path", hint="another -o"
        )
    if not src.is_dir():
        return _convert_file(src, kind, target)
    if kind == "hopsparse":
        return _convert_own(src, kind, target)
    if to == "nm" and target.pattern is None:
        sparse = import_sparse24(src, dst, overwrite=overwrite)
        return Converted(kind, len(sparse.modules), sparse.kept_dense)
    # Beside the result, so that both are on one disk; gone afterwards whatever happens.
    parent = dst.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        imported = Path(folder) / "imported"
        sparse = import_sparse24(src, imported)
        done = _convert_own(imported, kind, target)
    return replace(done, kept_dense={**sparse.kept_dense, **done.kept_dense})


def _parsed(
    to: str, pattern: NMPattern | str | None, block: tuple[int, int] | None
) -> NMPattern | None:
    """The pattern as a value, after refusing options that mean nothing."""
    if to not in TARGETS:
        raise ArgumentError(f"--to {to!r}", need="one of " + ", ".join(TARGETS), hint="--to nm")
    if (pattern is not None and to != "nm") or (block is not None and to not in _IN_BLOCKS):
        raise ArgumentError(
            f"--to {to} with --pattern or --block",
            need="--pattern only with nm, --block only with bsr and bsr24",
            hint="leave the option out",
        )
    wanted = parse_pattern(pattern) if isinstance(pattern, str) else pattern
    if wanted is not None and not isinstance(wanted, NMPattern):
        raise ArgumentError(f"pattern {wanted} for nm", need="N:M", hint="--pattern 2:4")
    return wanted


def _convert_file(src: Path, kind: Kind, target: _Target) -> Converted:
    """Convert every matrix of a file."""
    if target.to == SPARSE24:
        raise UnsupportedError(
            f"--to {SPARSE24} for a file", need="a checkpoint folder", hint="--to bitmask"
        )
    _refuse_existing(target)
    items, notes = _items(src, kind)
    done: dict[str, SparseMatrix | Tensor] = {}
    count = 0
    for name, item in items.items():
        is_matrix = isinstance(item, SparseMatrix) or _is_weight(item)
        done[name] = _converted(name, item, target) if is_matrix else item
        count += is_matrix
    if not count:
        raise CheckpointError(
            f"{src} holds no matrix", need="a 2-D tensor", hint="`hopsparse inspect` it"
        )
    write_matrices(target.out, done)
    return Converted(kind, count, {}, target.chosen, notes)


def _items(src: Path, kind: Kind) -> tuple[dict[str, SparseMatrix | Tensor], list[str]]:
    """All that a file holds, and what must be said of it."""
    if kind == "matrices":
        return read_matrices(src, validate=True), []
    if kind == "tensors":
        return dict(load_file(src)), []
    read = {name: each() for name, each in foreign_matrices(src).items()}
    notes = [f"{name}: {note}" for name, each in read.items() for note in each.notes]
    return {name: each.matrix for name, each in read.items()}, notes


def _refuse_existing(target: _Target) -> None:
    if target.out.exists() and not target.overwrite:
        raise CheckpointError(
            f"{target.out} exists", need="a new file", hint="another -o, or --overwrite"
        )
    if target.out.is_dir() or target.out.suffix != ".safetensors":
        raise CheckpointError(
            f"{target.out} as the result of a .safetensors file",
            need="a path that ends in .safetensors",
            hint="-o " + target.out.with_suffix(".safetensors").name,
        )


def _converted(name: str, item: SparseMatrix | Tensor, target: _Target) -> SparseMatrix | Tensor:
    """One matrix as `target` stores it.

    Raises:
        FormatError: It does not obey the pattern; the message names the matrix.
        UnsupportedError: It is quantized, and would become plainly dense; or it would become dense
            on the way, and is too large for that.
    """
    if target.to == AUTO:
        chosen = target.chosen[name] = choose(name, item, folder=target.folder)
        target = replace(target, to=chosen.format, block=chosen.block)
    _check_dense_copy(name, item, target.to)
    if target.to == "dense" and isinstance(item, Quantized):
        raise UnsupportedError(
            f"{name} under {item.scheme} as a plain dense weight",
            need="a format that keeps codes, scales and rounded inputs",
            hint="--to nm or bitmask; `hopsparse.load(path)` and `.dequantize()` give the weights",
        )
    try:
        if target.to == "dense":
            return item.to_dense() if isinstance(item, SparseMatrix) else item
        if isinstance(item, SparseMatrix):
            return convert(item, target.to, pattern=target.pattern, block=target.block)
        if target.to == "nm":
            return NM.from_dense(item, target.pattern or NMPattern(2, 4))
        if target.to in _IN_BLOCKS:
            return _IN_BLOCKS[target.to].from_dense(item, target.block or (32, 32))
        return format_named(target.to).from_dense(item)
    except HopsparseError as error:
        raise FormatError(f"{name}: {error.got}", need=error.need, hint=error.hint) from error


def _check_dense_copy(name: str, item: SparseMatrix | Tensor, to: str) -> None:
    entries = item.shape[0] * item.shape[1]
    if isinstance(item, SparseMatrix) and to in BY_DENSE and entries > MOST_DENSE:
        raise UnsupportedError(
            f"{name} of {item.shape[0]} x {item.shape[1]} to {to}, by a dense copy",
            need=f"at most {MOST_DENSE} entries",
            hint="--to csr, csc, hyb or bitmask, which need none",
        )


def _is_weight(item: SparseMatrix | Tensor) -> bool:
    return isinstance(item, Tensor) and item.ndim == 2 and item.is_floating_point()


def _convert_own(folder: Path, kind: Kind, target: _Target) -> Converted:
    """Convert every sparse layer of a hopsparse checkpoint; a failure leaves nothing behind."""
    if target.to == SPARSE24:
        return _export(folder, kind, target)
    with CheckpointReader(folder) as reader:
        sparse = require_sparse(reader)
        refuse_low_rank(folder)
        check_stored(sparse, stored_specs(folder / shard for shard in reader.shards()))
        entries: dict[str, ModuleEntry] = {}
        with CheckpointWriter(target.out, overwrite=target.overwrite, resumable=False) as writer:
            for shard in reader.shards():
                tensors = _converted_shard(reader, shard, target, entries)
                if tensors:
                    writer.write_shard(shard, tensors)
            writer.copy_extras(folder)
            config = {k: v for k, v in reader.config.items() if k != "quantization_config"}
            if target.to != "dense":
                ordered = {name: entries[name] for name in sparse.modules}
                config["quantization_config"] = replace(sparse, modules=ordered).to_json()
            writer.commit(config)
        return Converted(kind, len(sparse.modules), sparse.kept_dense, target.chosen)


def _export(folder: Path, kind: Kind, target: _Target) -> Converted:
    if target.overwrite:
        raise ArgumentError(
            f"--overwrite with --to {SPARSE24}",
            need="a new folder: only hopsparse checkpoints are ever overwritten",
            hint="another -o",
        )
    dense_again = export_sparse24(folder, target.out)
    with CheckpointReader(folder) as reader:
        sparse = require_sparse(reader)
        layers = len(sparse.modules) - len(dense_again)
        return Converted(kind, layers, {**sparse.kept_dense, **dense_again})


def _converted_shard(
    reader: CheckpointReader, shard: str, target: _Target, entries: dict[str, ModuleEntry]
) -> dict[str, Tensor]:
    """Tensors of one shard of the result; the entries of its sparse modules go to `entries`.

    The parts of a matrix may lie in several shards: it goes where its values were.
    """
    modules = require_sparse(reader).modules
    tensors: dict[str, Tensor] = {}
    for name in reader.names_in(shard):
        module, _, part = name.rpartition(".")
        if module not in modules or part not in modules[module].parts:
            tensors[name] = reader.load(name)
            continue
        if part != modules[module].values_part:
            continue
        matrix = reader.matrix(module)
        matrix.validate()
        result = _converted(module, matrix, target)
        if isinstance(result, SparseMatrix):
            tensors |= {f"{module}.{key}": tensor for key, tensor in result.parts().items()}
            entries[module] = ModuleEntry.of(result)
        else:
            tensors[f"{module}.weight"] = result
    return tensors
