"""Is a checkpoint or a file of matrices whole: readable, valid, finite, of the right sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, HopsparseError, VerificationError
from ..files import open_tensors, unbroken
from ..formats import Quantized, SparseMatrix, read_facts, read_matrices
from ..formats.exchange import FOREIGN
from ._files import sha256
from .checkpoint import CheckpointReader
from .kinds import kind_of
from .load import architecture_of, model_class
from .source import undescribed
from .sparse24 import packed_modules, read_packed

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        ok: Whether it holds.
        detail: The first fact that does not, or what was covered.
    """

    name: str
    ok: bool
    detail: str


def verify_checkpoint(path: Path | str) -> list[Check]:
    """Check that a checkpoint folder or a .safetensors file is whole; every value is read.

    Shards are present and readable, every matrix validates (of hopsparse and of
    `sparse-24-bitmask`), every value is finite, sizes agree with config.json, and shards have the
    SHA-256 that the index records.

    Returns:
        What was checked.

    Raises:
        CheckpointError: There is nothing of a known kind at `path`.
        VerificationError: Something is wrong; it names the first.

    Example:
        >>> verify_checkpoint("no/such/folder")
        Traceback (most recent call last):
        hopsparse.errors.CheckpointError: no/such/folder does not exist. Required: a checkpoint ...
    """
    checks = list(checks_of(Path(path)))
    failed = [check for check in checks if not check.ok]
    if failed:
        raise VerificationError(
            f"{len(failed)} of {len(checks)} checks of {path} failed; the first: "
            f"{failed[0].name}: {failed[0].detail}",
            need="a whole checkpoint",
            hint=f"`hopsparse verify {path}` lists them; download or write it again",
        )
    return checks


def checks_of(path: Path) -> Iterator[Check]:
    """Check everything below `path`; a missing path is an error, damage is a failed check.

    Raises:
        CheckpointError: There is nothing of a known kind at `path`.
    """
    try:
        kind = kind_of(path)
    except CheckpointError as error:
        damaged = path.is_file() and path.suffix == ".safetensors"
        if not damaged and not (path / "config.json").is_file():
            raise
        yield Check(path.name, False, str(error))
        return
    if kind in FOREIGN.values():
        raise CheckpointError(
            f"{path} is a file of another program ({kind})",
            need="a checkpoint folder or a .safetensors file",
            hint=f"`hopsparse inspect {path}` reads and checks it whole",
        )
    if kind == "matrices":
        yield from _file_checks(path)
    elif kind == "tensors":
        yield from _tensor_file_checks(path)
    else:
        yield from _folder_checks(path)


def _file_checks(path: Path) -> Iterator[Check]:
    try:
        names = list(read_facts(path))
    except HopsparseError as error:
        yield Check(path.name, False, str(error))
        return
    for name in names:
        try:
            matrix = read_matrices(path, [name], validate=True)[name]
            assert isinstance(matrix, SparseMatrix)
            yield _matrix_check(name, matrix)
        except HopsparseError as error:
            yield Check(name, False, str(error))


def _tensor_file_checks(path: Path) -> Iterator[Check]:
    with open_tensors(path) as file:
        for name in sorted(file.keys()):
            with unbroken():
                tensor = file.get_tensor(name)
            fault = _not_finite(tensor)
            yield Check(name, not fault, fault or "finite")


def _folder_checks(path: Path) -> Iterator[Check]:
    try:
        reader = CheckpointReader(path)
    except HopsparseError as error:
        yield Check(path.name, False, str(error))
        return
    with reader:
        yield Check("config.json and shards", True, f"{len(reader.shards())} shards, all present")
        modules = reader.sparse.modules if reader.sparse else {}
        shapes: dict[str, tuple[int, ...]] = {}
        parts: set[str] = set()
        for module, entry in modules.items():
            parts |= {f"{module}.{part}" for part in entry.parts}
            shapes[f"{module}.weight"] = entry.shape
            yield _module_check(reader, module)
        for module in packed_modules(reader) if not modules else ():
            parts |= {f"{module}.{part}" for part in ("shape", "compressed", "bitmask")}
            check, shape = _packed_check(reader, module)
            shapes |= {f"{module}.weight": shape} if shape else {}
            yield check
        for name in reader.names():
            if name not in parts:
                check, shape = _tensor_check(reader, name)
                shapes |= {name: shape} if shape is not None else {}
                yield check
        yield _config_check(reader, shapes)
        # Last: any other fault says more.
        for shard in reader.shards() if reader.digests else ():
            yield _digest_check(reader, shard)


def _module_check(reader: CheckpointReader, module: str) -> Check:
    try:
        matrix = reader.matrix(module)
        matrix.validate()
        return _matrix_check(module, matrix)
    except HopsparseError as error:
        return Check(module, False, str(error))


def _packed_check(reader: CheckpointReader, module: str) -> tuple[Check, tuple[int, ...] | None]:
    try:
        matrix = read_packed(reader, module)
    except HopsparseError as error:
        return Check(module, False, str(error)), None
    check = _matrix_check(module, matrix)
    detail = f"sparse-24-bitmask {matrix.shape[0]} x {matrix.shape[1]}, valid"
    return Check(module, check.ok, detail if check.ok else check.detail), matrix.shape


def _matrix_check(name: str, matrix: SparseMatrix) -> Check:
    for part, tensor in matrix.parts().items():
        if fault := _not_finite(tensor):
            return Check(name, False, f"part {part!r}: {fault}")
    kind = matrix.name
    if isinstance(matrix, Quantized):
        kind = f"{matrix.codes_format} of {matrix.scheme}"
    return Check(name, True, f"{kind} {matrix.shape[0]} x {matrix.shape[1]}, valid")


def _tensor_check(reader: CheckpointReader, name: str) -> tuple[Check, tuple[int, ...] | None]:
    try:
        tensor = reader.load(name)
    except HopsparseError as error:
        return Check(name, False, str(error)), None
    fault = _not_finite(tensor)
    return Check(name, not fault, fault or "finite"), tuple(tensor.shape)


def _digest_check(reader: CheckpointReader, shard: str) -> Check:
    title = f"SHA-256 of {shard}"
    found = sha256(reader.folder / shard)
    same = reader.digests.get(shard) == found
    detail = "as written" if same else f"{found}, the index says {reader.digests.get(shard)}"
    return Check(title, same, detail)


def _config_check(reader: CheckpointReader, shapes: dict[str, tuple[int, ...]]) -> Check:
    """Compare stored shapes with those of the model that config.json describes, both ways."""
    title = "sizes of config.json"
    try:
        model = _described_model(reader)
    except ImportError:
        return Check(title, True, "not compared: transformers is not installed")
    except Exception as error:  # Whatever the code of an architecture does with a wrong field.
        why = str(error).strip().splitlines() or [""]
        return Check(title, False, f"no model can be built: {type(error).__name__}: {why[0]}")
    if model is None:
        return Check(title, True, "not compared: no language model that transformers knows")
    # Tied weights once.
    expected = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    faults = [
        f"{name} is {list(shapes[name]) if name in shapes else 'not stored'}, "
        f"config.json describes {list(wanted)}"
        for name, wanted in expected.items()
        if shapes.get(name) != wanted
    ]
    faults += [
        f"{name} is stored, config.json describes no such weight"
        for name in undescribed(model, shapes)
    ]
    return Check(title, not faults, faults[0] if faults else f"{len(expected)} weights agree")


def _described_model(reader: CheckpointReader) -> Any:
    """The model that config.json describes, on the meta device; None if it is of another kind."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if reader.config.get("model_type") not in CONFIG_MAPPING:
        return None
    config = AutoConfig.from_pretrained(reader.folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    kind = model_class(architecture_of(reader.config))
    with torch.device("meta"):
        if hasattr(kind, "_from_config"):
            return kind._from_config(config)
        known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        return kind.from_config(config) if known else None


def _not_finite(tensor: Tensor) -> str:
    """The first value that is no number, in words; "" when all are finite."""
    if not tensor.is_floating_point():
        return ""
    finite = torch.isfinite(tensor.float() if tensor.dtype in _FLOAT8 else tensor)
    if bool(finite.all()):
        return ""
    first = int((~finite).flatten().nonzero()[0])
    return f"{int((~finite).sum())} values are not finite, the first at flat index {first}"
