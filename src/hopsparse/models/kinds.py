"""What a path holds: a checkpoint folder of one kind or another, or a file of matrices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from ..errors import CheckpointError
from ..files import read_header
from ..formats import METADATA_KEY
from ..formats.exchange import FOREIGN as FOREIGN
from ._entries import QUANT_METHOD, quantization_of
from ._files import read_json

Kind = Literal[
    "hopsparse",
    "dense",
    "sparse-24-bitmask",
    "matrices",
    "tensors",
    "mtx",
    "smtx",
    "npz",
    "torch",
]
_NEED = "a checkpoint folder, or a file: .safetensors, " + ", ".join(FOREIGN)

SPARSE24: Literal["sparse-24-bitmask"] = "sparse-24-bitmask"


def kind_of(path: Path) -> Kind:
    """Tell what `path` holds, from its config or header alone.

    Raises:
        CheckpointError: Nothing is there, or nothing that can be read.
    """
    if path.is_dir():
        return _kind_of_config(read_json(path / "config.json"))
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist",
            need=_NEED,
            hint="check the path; `hopsparse sparsify MODEL -o OUT` makes a checkpoint",
        )
    if path.suffix.lower() in FOREIGN:  # Its contents say so, or are refused, when it is read.
        return cast(Kind, FOREIGN[path.suffix.lower()])
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} has no suffix of a file that is read",
            need=_NEED + "; pickled objects are never loaded",
            hint="safetensors.torch.save_file(tensors, path)",
        )
    return "matrices" if METADATA_KEY in read_header(path).metadata else "tensors"


def _kind_of_config(config: Mapping[str, Any]) -> Kind:
    section = quantization_of(config) or config.get("compression_config")
    section = section if isinstance(section, Mapping) else {}
    if section.get("quant_method") == QUANT_METHOD:
        return "hopsparse"
    sparsity = section.get("sparsity_config") or config.get("sparsity_config")
    packed = isinstance(sparsity, Mapping) and sparsity.get("format") == SPARSE24
    return SPARSE24 if packed else "dense"
