"""What the config.json of a checkpoint says of its sparse weights, read without trust."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from ..errors import CheckpointError, FormatError
from ..formats import FORMAT_VERSION, MatrixFacts, SparseMatrix

QUANT_METHOD = "hopsparse"
_RESTORE = "restore config.json from the original checkpoint"


@dataclass(frozen=True)
class ModuleEntry(MatrixFacts):
    """How the weight of one module is stored."""

    @classmethod
    def from_json(cls, module: str, value: object) -> Self:
        """Read one entry of `quantization_config["modules"]`.

        Raises:
            CheckpointError: It describes no matrix.
        """
        try:
            return cls.parse(value)
        except ValueError as error:  # FormatError and ArgumentError are some.
            got, need = getattr(error, "got", error), getattr(error, "need", "facts of a matrix")
            raise CheckpointError(
                f"the entry of {module} in config.json is malformed: {got}",
                need=need,
                hint=f"{_RESTORE}; if a newer version wrote it, pip install --upgrade hopsparse",
            ) from error

    def matrix(self, module: str, load: Callable[[str], Tensor]) -> SparseMatrix:
        """Build the weight of `module` from its stored parts; contents are not validated.

        Raises:
            CheckpointError: A part has another shape or dtype than this entry says.
        """
        try:
            return self.restore({part: load(f"{module}.{part}") for part in self.parts})
        except FormatError as error:
            raise CheckpointError(
                f"{module}: {error.got}", need=error.need, hint=error.hint
            ) from error


@dataclass(frozen=True)
class SparseConfig:
    """The `quantization_config` of a checkpoint.

    Attributes:
        pattern: What was asked for, such as "2:4".
        method: How the weights were pruned, or "imported".
        modules: Stored form of each sparse weight by module name.
        kept_dense: Why each other projection stayed dense, by module name.
    """

    pattern: str
    method: str
    modules: dict[str, ModuleEntry]
    kept_dense: dict[str, str]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read a `quantization_config`.

        Raises:
            CheckpointError: It was written by a newer version, or is malformed.
        """
        version = value.get("format_version")
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint of format version {version!r}",
                need=f"version {FORMAT_VERSION} or older",
                hint="pip install --upgrade hopsparse",
            )
        modules = _text_map(value, "modules")
        kept = _text_map(value, "kept_dense")
        reasons = all(isinstance(reason, str) for reason in kept.values())
        words = (value.get("pattern"), value.get("method"))
        if not reasons or not all(isinstance(word, str) for word in words):
            raise CheckpointError(
                "pattern, method or a reason in kept_dense of config.json is no text",
                need="text",
                hint=_RESTORE,
            )
        entries = {name: ModuleEntry.from_json(name, entry) for name, entry in modules.items()}
        return cls(str(words[0]), str(words[1]), entries, kept)

    def to_json(self) -> dict[str, Any]:
        """The JSON form, as stored under `quantization_config`."""
        return {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "pattern": self.pattern,
            "method": self.method,
            "modules": {name: entry.to_json() for name, entry in self.modules.items()},
            "kept_dense": self.kept_dense,
        }


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of a config.json; empty for a dense model.

    Raises:
        CheckpointError: It is no JSON object.
    """
    section = config.get("quantization_config")
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise CheckpointError(
            f"quantization_config {section!r:.60} in config.json",
            need="a JSON object",
            hint=_RESTORE,
        )
    return section


def _text_map(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(
            f"{key} of quantization_config is {found!r:.60}", need="a JSON object", hint=_RESTORE
        )
    return dict(found)
