"""Is a checkpoint or a file of matrices whole: readable, valid, finite, of the right sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import HopsparseError
from ..formats import SparseMatrix, read_facts, read_matrices
from .stored import kind_of
from .verify import Check

if TYPE_CHECKING:
    from ..models.checkpoint import CheckpointReader

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def path_checks(path: Path) -> Iterator[Check]:
    """Check everything below `path`; a missing path is an error, damage is a failed check.

    Raises:
        CheckpointError: There is nothing of a known kind at `path`.
    """
    kind = kind_of(path)
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
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            fault = _not_finite(file.get_tensor(name))
            yield Check(name, not fault, fault or "finite")


def _folder_checks(path: Path) -> Iterator[Check]:
    from ..models.checkpoint import CheckpointReader

    try:
        reader = CheckpointReader(path)
        names = reader.names()
    except HopsparseError as error:
        yield Check(path.name, False, str(error))
        return
    with reader:
        yield Check("config.json and shards", True, f"{len(reader.shards())} shards, all present")
        parts = set()
        for module in reader.sparse.modules if reader.sparse else ():
            parts |= {f"{module}.{part}" for part in _parts_of(reader, module)}
            yield _module_check(reader, module)
        rest = [name for name in names if name not in parts]
        yield from (_tensor_check(reader, name) for name in rest)
        yield from _config_checks(reader, rest)


def _parts_of(reader: CheckpointReader, module: str) -> tuple[str, ...]:
    from ..formats import FORMATS

    assert reader.sparse is not None
    return FORMATS[reader.sparse.modules[module].format].PARTS


def _module_check(reader: CheckpointReader, module: str) -> Check:
    try:
        matrix = reader.matrix(module)
        matrix.validate()
        return _matrix_check(module, matrix)
    except HopsparseError as error:
        return Check(module, False, str(error))


def _matrix_check(name: str, matrix: SparseMatrix) -> Check:
    for part, tensor in matrix.parts().items():
        if fault := _not_finite(tensor):
            return Check(name, False, f"part {part!r}: {fault}")
    return Check(name, True, f"{matrix.name} {matrix.shape[0]} x {matrix.shape[1]}, valid")


def _tensor_check(reader: CheckpointReader, name: str) -> Check:
    try:
        fault = _not_finite(reader.load(name))
    except HopsparseError as error:
        return Check(name, False, str(error))
    return Check(name, not fault, fault or "finite")


def _config_checks(reader: CheckpointReader, names: list[str]) -> Iterator[Check]:
    """Compare stored shapes with those of the model that config.json describes."""
    title = "sizes of config.json"
    try:
        expected = _expected_shapes(reader.folder)
    except ImportError:
        yield Check(title, True, "not compared: transformers is not installed")
        return
    except (ValueError, TypeError, KeyError, OSError) as error:
        # A model type of another library, or a config that describes no causal language model.
        yield Check(title, True, f"not compared: {str(error).splitlines()[0]}")
        return
    modules = reader.sparse.modules if reader.sparse else {}
    shapes = {f"{name}.weight": tuple(entry.shape) for name, entry in modules.items()}
    try:
        shapes |= {name: tuple(reader.load(name).shape) for name in names}
    except HopsparseError as error:
        yield Check(title, False, str(error))
        return
    faults = [
        f"{name} is {list(shapes[name]) if name in shapes else 'not stored'}, "
        f"config.json describes {list(wanted)}"
        for name, wanted in expected.items()
        if shapes.get(name) != wanted
    ]
    yield Check(title, not faults, faults[0] if faults else f"{len(expected)} weights agree")


def _expected_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of the described model, tied ones once; no weight is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def _not_finite(tensor: Tensor) -> str:
    """The first value that is no number, in words; "" when all are finite."""
    if not tensor.is_floating_point():
        return ""
    finite = torch.isfinite(tensor.float() if tensor.dtype in _FLOAT8 else tensor)
    if bool(finite.all()):
        return ""
    first = int((~finite).flatten().nonzero()[0])
    return f"{int((~finite).sum())} values are not finite, the first at flat index {first}"
