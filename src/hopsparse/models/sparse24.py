"""The `sparse-24-bitmask` checkpoints of compressed-tensors, which dropped the format after 0.14.

A weight NAME.weight [R, C] is stored as NAME.shape int64 [2, 1], NAME.compressed [R, C / 2] (the
kept values of each group of 4, in order) and NAME.bitmask uint8 [R, ceil(C / 8)] (bit i of byte j
is column 8j + i). Exactly two bits a group are set: groups with fewer non-zeros store zeros too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, FormatError, UnsupportedError
from ..formats import (
    NM,
    Bitmask,
    Quantized,
    Scheme,
    SparseMatrix,
    nonzero_mask,
    pack_bits,
)
from ..ops import COMPUTE_DTYPES
from ._entries import quantization_of
from ._layers import check_stored, require_sparse, stored_specs
from .checkpoint import CheckpointReader, CheckpointWriter, ModuleEntry, SparseConfig
from .low_rank import refuse_low_rank
from .sparse24_codes import (
    BESIDE,
    FORMATS_OF_CODES,
    check_codes,
    ignored_modules,
    pack_codes,
    scheme_of,
    with_scales,
)

_METHOD, _FORMAT, _PATTERN = "compressed-tensors", "sparse-24-bitmask", "2:4"
PARTS = ("shape", "compressed", "bitmask")
_VERSION = "0.14.0"
_MASK = ".bitmask"
# Two-dimensional weights that are no nn.Linear.
_TABLES = re.compile(r"(^|\.)([^.]*embed[^.]*|wte|wpe|shared)$")
# Tensors that only quantised checkpoints have.
_QUANTIZED = re.compile(
    r"\.(weight_packed|weight_scale|weight_zero_point|input_scale|weight_g_idx)$"
)

# Which two columns of a group are stored, by the 4-bit mask of its non-zeros. compressed-tensors
# takes the top 2 of |w| in torch.topk, whose ties fall like this (0.14.0 with torch 2.13, CPU).
_PADDED = {0b0000: (2, 3), 0b0001: (0, 2), 0b0010: (1, 3), 0b0100: (2, 3), 0b1000: (2, 3)}
_PAIRS = torch.tensor(
    [
        _PADDED.get(mask, ([bit for bit in range(4) if mask >> bit & 1] + [3, 3])[:2])
        for mask in range(16)
    ]
)


def import_sparse24(
    folder: Path | str, out: Path | str, *, overwrite: bool = False
) -> SparseConfig:
    """Read a compressed-tensors checkpoint of a 2:4 model and write ours, bit for bit.

    Both storage forms are read: `sparse-24-bitmask`, and `dense`, where each weight that obeys
    2:4 is packed and the others are kept dense, with the reason under `kept_dense`. Codes of int8
    and E4M3 keep their bits and scales; those that are not 2:4 are stored as codes too.

    Args:
        folder: HF folder whose config carries a `sparsity_config`.
        out: Folder to make.
        overwrite: Replace an existing hopsparse checkpoint.

    Returns:
        What was packed and what was kept dense.

    Raises:
        CheckpointError: The folder is missing or damaged, or carries no `sparsity_config`.
        UnsupportedError: The weights are quantised in a way that no scheme describes, in another
            format, or none obeys 2:4.

    Example:
        >>> import_sparse24("no/such/folder", "out")
        Traceback (most recent call last):
        hopsparse.errors.CheckpointError: no/such/folder is no folder. Required: a checkpoint ...
    """
    with CheckpointReader(folder) as reader:
        sparsity, scheme = _sparsity_config(reader)
        sparse = SparseConfig(_PATTERN, "imported", {}, {})
        with CheckpointWriter(out, overwrite=overwrite, resumable=False) as writer:
            for shard in reader.shards():
                tensors = _import_tensors(reader, shard, (sparsity, scheme), sparse)
                if tensors:
                    writer.write_shard(shard, tensors)
            if not sparse.modules:
                raise _nothing_packed(reader, sparse.kept_dense)
            writer.copy_extras(reader.folder)
            config = {k: v for k, v in reader.config.items() if k != "compression_config"}
            writer.commit(config | {"quantization_config": sparse.to_json()})
    return sparse


def export_sparse24(folder: Path | str, out: Path | str) -> dict[str, str]:
    """Write a hopsparse checkpoint as `sparse-24-bitmask`, as compressed-tensors 0.14.0 does.

    Args:
        folder: A hopsparse checkpoint.
        out: Folder to make.

    Returns:
        Why each sparse module that does not obey 2:4 was written dense, by name.

    Raises:
        CheckpointError: The folder is missing or damaged, or no hopsparse checkpoint.
        UnsupportedError: Values are 8-bit or quantized, or have low-rank products beside them.

    Example:
        >>> export_sparse24("no/such/folder", "out")
        Traceback (most recent call last):
        hopsparse.errors.CheckpointError: no/such/folder is no folder. Required: a checkpoint ...
    """
    dense_again: dict[str, str] = {}
    zeros: list[tuple[int, int]] = []
    with CheckpointReader(folder) as reader:
        sparse = require_sparse(reader)
        refuse_low_rank(reader.folder)
        check_stored(sparse, stored_specs(reader.folder / shard for shard in reader.shards()))
        with CheckpointWriter(out, resumable=False) as writer:
            for shard in reader.shards():
                tensors: dict[str, Tensor] = {}
                for name in reader.names_in(shard):
                    module, _, part = name.rpartition(".")
                    if module not in sparse.modules or part == "bias":
                        tensors[name] = reader.load(name)
                    elif part == sparse.modules[module].values_part:
                        tensors |= _export_module(reader, module, dense_again, zeros)
                if tensors:
                    writer.write_shard(shard, tensors)
            writer.copy_extras(reader.folder)
            sparsity = {
                "format": _FORMAT,
                "targets": ["Linear"],
                "ignore": sorted({*sparse.kept_dense, *dense_again}),
                "global_sparsity": sum(z for z, _ in zeros) / max(1, sum(n for _, n in zeros)),
                "sparsity_structure": _PATTERN,
            }
            section = {"quant_method": _METHOD, "version": _VERSION, "sparsity_config": sparsity}
            writer.commit(reader.config | {"quantization_config": section})
    return dense_again


def compress(weight: Tensor) -> dict[str, Tensor]:
    """The three tensors of `sparse-24-bitmask` for a weight [R, C] that obeys 2:4.

    Raises:
        FormatError: A group holds more than two non-zeros, or C is no multiple of 4.

    Example:
        >>> compress(torch.tensor([[0.0, 9, 0, 0, 0, 0, 0, 0]]))["bitmask"].item()
        202
    """
    rows, cols = weight.shape
    if cols % 4:
        raise FormatError(f"{cols} columns", need="a multiple of 4", hint="keep the weight dense")
    groups, live = (t.view(rows, -1, 4) for t in (weight.contiguous(), nonzero_mask(weight)))
    full = (live.sum(-1) > 2).nonzero()
    if full.numel():
        row, group = full[0].tolist()
        raise FormatError(
            f"row {row}, group {group} holds {int(live[row, group].sum())} non-zeros",
            need="at most 2 in every 4 columns",
            hint="keep the weight dense",
        )
    code = (live * torch.tensor([1, 2, 4, 8], dtype=torch.uint8)).sum(-1)
    pair = _PAIRS[code]
    stored = torch.zeros_like(live).scatter_(-1, pair, True)
    return {
        "shape": torch.tensor([[rows], [cols]]),
        "compressed": groups.gather(-1, pair).view(rows, cols // 2),
        "bitmask": pack_bits(stored.view(rows, cols)),
    }


def _import_tensors(
    reader: CheckpointReader,
    shard: str,
    form: tuple[Mapping[str, Any], Scheme | None],
    sparse: SparseConfig,
) -> dict[str, Tensor]:
    """The tensors of one shard in our form; what was found out is entered in `sparse`."""
    stored, (sparsity, scheme) = set(reader.names()), form
    ignored = ignored_modules(sparsity)
    tensors: dict[str, Tensor] = {}
    for name in reader.names_in(shard):
        module, _, part = name.rpartition(".")
        own = [key for key in ("compressed", "bitmask") if f"{module}.{key}" in stored]
        has_scales = scheme is not None and f"{module}.weight_scale" in stored
        found: SparseMatrix | str = ""
        if part in PARTS and own:
            # Parts may lie in different shards: one speaks for all three.
            if part == own[0]:
                codes = scheme if has_scales else None
                found = NM.from_dense(read_packed(reader, module, codes).to_dense())
        elif has_scales and part in BESIDE:
            continue
        else:
            tensors[name] = reader.load(name)
            if has_scales and part == "weight":
                assert scheme is not None
                check_codes(module, tensors[name].dtype, scheme)
                found = pack_codes(tensors[name])
            else:
                found = _pack_dense(name, tensors[name], sparsity["format"], ignored)
        if isinstance(found, SparseMatrix):
            if has_scales:
                assert scheme is not None
                found = with_scales(reader, module, found, scheme)
            tensors.pop(name, None)
            tensors |= {f"{module}.{key}": tensor for key, tensor in found.parts().items()}
            sparse.modules[module] = ModuleEntry.of(found)
        elif found:
            sparse.kept_dense[module] = found
    return tensors


def _export_module(
    reader: CheckpointReader,
    module: str,
    dense_again: dict[str, str],
    zeros: list[tuple[int, int]],
) -> dict[str, Tensor]:
    """The tensors of one sparse weight, compressed where it obeys 2:4."""
    matrix = reader.matrix(module)
    if isinstance(matrix, Quantized):
        raise UnsupportedError(
            f"{module} holds {matrix.scheme} codes and scales",
            need="float32, bfloat16 or float16 values",
            hint="--to bitmask, which keeps the scheme",
        )
    _check_dtype(module, matrix.dtype)
    matrix.validate()
    weight = matrix.to_dense()
    try:
        compressed = compress(weight)
    except FormatError as error:
        dense_again[module] = error.got
        return {f"{module}.weight": weight}
    zeros.append((weight.numel() - matrix.nnz, weight.numel()))
    return {f"{module}.{key}": tensor for key, tensor in compressed.items()}


def packed_modules(reader: CheckpointReader) -> list[str]:
    """Names of the modules whose weight a folder stores as `sparse-24-bitmask`."""
    return [name.removesuffix(_MASK) for name in reader.names() if name.endswith(_MASK)]


def read_packed(reader: CheckpointReader, module: str, scheme: Scheme | None = None) -> Bitmask:
    """Read one weight of `sparse-24-bitmask` and check it: sizes, dtypes, two bits a group.

    Args:
        reader: The checkpoint.
        module: Whose weight it is.
        scheme: What its values are codes of; None: they are no codes.

    Raises:
        CheckpointError: A part is missing or damaged, or values are no codes of the scheme.
        UnsupportedError: Its values are 8-bit, without a scheme.
    """
    shape, values, mask = (reader.load(f"{module}.{part}") for part in PARTS)
    if scheme is None:
        _check_dtype(module, values.dtype)
    else:
        check_codes(module, values.dtype, scheme)
    size = shape.flatten().tolist()
    try:
        rows, cols = size
        if not all(type(side) is int and side > 0 for side in size) or cols % 4:
            raise FormatError(f"shape {size}", need="[rows, cols], cols a multiple of 4", hint="")
        if tuple(values.shape) != (rows, cols // 2):
            raise FormatError(
                f"compressed {list(values.shape)}", need=f"[{rows}, {cols // 2}]", hint=""
            )
        matrix = Bitmask((rows, cols), values.flatten(), mask)
        matrix.validate()
        _check_groups(mask, cols)
    except ValueError as error:  # FormatError is one.
        got = error.got if isinstance(error, FormatError) else f"shape {size}"
        raise CheckpointError(
            f"{module} in {reader.folder} is damaged: {got}",
            need=f"the parts of a {_FORMAT} weight",
            hint="download the checkpoint again",
        ) from error
    return matrix


def _check_groups(mask: Tensor, cols: int) -> None:
    """Refuse a mask that does not set two bits in every group of 4 columns."""
    groups = torch.stack((mask & 15, mask >> 4), dim=-1).flatten(1)[:, : cols // 4]
    pairs = groups - (groups >> 1 & 5)
    wrong = ((pairs & 3) + (pairs >> 2) != 2).nonzero()
    if wrong.numel():
        row, group = wrong[0].tolist()
        bits = int(groups[row, group]).bit_count()
        raise FormatError(f"row {row}, group {group} has {bits} bits set", need="2", hint="")


def _pack_dense(name: str, tensor: Tensor, form: str, ignored: list[re.Pattern[str]]) -> NM | str:
    """Pack a dense weight that obeys 2:4, or say why it stays; "" for what no one expects to."""
    module = name.removesuffix(".weight")
    if module == name or tensor.ndim != 2 or _TABLES.search(module):
        return ""
    if form == _FORMAT:
        return "stored dense"
    if any(entry.match(module) for entry in ignored):
        return "ignored by its sparsity_config"
    if module.rpartition(".")[2] == "lm_head":
        return "outside the blocks"
    _check_dtype(module, tensor.dtype)
    if tensor.shape[1] % 4:
        return f"k = {tensor.shape[1]} is not a multiple of 4"
    try:
        return NM.from_dense(tensor)
    except FormatError as error:
        return error.got


def _sparsity_config(reader: CheckpointReader) -> tuple[Mapping[str, Any], Scheme | None]:
    """The `sparsity_config` of a checkpoint, and its scheme; all that is not 2:4 is refused."""
    # The second is the key of early versions.
    section = quantization_of(reader.config) or reader.config.get("compression_config")
    section = section if isinstance(section, Mapping) else {}
    sparsity = section.get("sparsity_config")
    plain = isinstance(sparsity, Mapping) and section.get("quant_method", _METHOD) == _METHOD
    if not sparsity or not plain:
        raise CheckpointError(
            f"{reader.folder} carries no sparsity_config",
            need=f"a quantization_config of method {_METHOD!r} with a sparsity_config",
            hint="`hopsparse sparsify` makes a dense model sparse",
        )
    found = [
        f"{key} = {section[key]!r:.60}"
        for key in ("kv_cache_scheme", "transform_config")
        if section.get(key)
    ]
    scheme = scheme_of(section, reader.folder)
    legal = (None, "dense", _FORMAT, *(FORMATS_OF_CODES if scheme else ()))
    if section.get("format") not in legal:
        found.append(f"format = {section['format']!r}")
    if scheme is None:
        found += [name for name in reader.names() if _QUANTIZED.search(name)][:1]
    if found:
        raise UnsupportedError(
            f"{reader.folder} is also quantised ({'; '.join(found)})",
            need="float32, bfloat16 or float16 weights, or codes of 8 bits",
            hint="the 2:4 checkpoint from before it was quantised",
        )
    if sparsity.get("format") not in ("dense", _FORMAT):
        raise UnsupportedError(
            f"{reader.folder} stores its weights as {sparsity.get('format')!r}",
            need=f"dense or {_FORMAT}",
            hint="decompress it with compressed-tensors 0.14.0",
        )
    return dict(sparsity), scheme


def _check_dtype(module: str, dtype: torch.dtype) -> None:
    if dtype not in COMPUTE_DTYPES:
        raise UnsupportedError(
            f"{module} holds {dtype} values",
            need="float32, bfloat16 or float16",
            hint="the checkpoint from before it was quantised",
        )


def _nothing_packed(reader: CheckpointReader, kept: Mapping[str, str]) -> UnsupportedError:
    reasons = "; ".join(f"{name}: {why}" for name, why in list(kept.items())[:3])
    return UnsupportedError(
        f"no weight of {reader.folder} obeys 2:4" + (f" ({reasons})" if reasons else ""),
        need="at least one",
        hint="`hopsparse sparsify` prunes it",
    )
